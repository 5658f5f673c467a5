"""A learner's state in memory: a run resumes from it bit for bit, and every part of it is needed for that."""

import copy
import math

import pytest
import torch

from cases import often
from heedful import A2CConfig, DPOConfig, GRPOConfig, KTOConfig, OnlineDPOConfig, PPOConfig, RewardConfig, SFTConfig
from heedful.algorithms.online.start import start
from heedful.training.state import load_trained_weights, trained_weights
from jsonl import timeless
from trainers import CONFIGS, MODULES, begin, step_online

BEFORE, AFTER = 2, 2
UPDATES = {"minibatch_size": 4, "ppo_epochs": 2}
EVERYTHING = {**UPDATES, "critic": "separate", "lora_rank": 4, "kl_target": 1.0, "kl_horizon": 40, "ema_decay": 0.9}
EVERYTHING |= {"score_norm_samples": 8, "ptx_coef": 0.5}
KINDS = {
    "sft": (SFTConfig, {}),
    "sft-dropout": (SFTConfig, {"lora_rank": 4, "lora_dropout": 0.3}),
    "reward": (RewardConfig, {}),
    "reward-float16": (RewardConfig, {"dtype": "float16", "learning_rate": 1e-3}),
    "dpo": (DPOConfig, {}),
    "dpo-lora": (DPOConfig, {"lora_rank": 4}),
    "dpo-nll": (DPOConfig, {"length_normalise": True, "nll_coef": 0.3}),
    "simpo": (DPOConfig, {"loss": "simpo"}),
    "orpo-lora": (DPOConfig, {"loss": "orpo", "lora_rank": 4}),
    "kto": (KTOConfig, {}),
    "kto-lora": (KTOConfig, {"lora_rank": 4}),
    "shared": (PPOConfig, UPDATES),
    "separate": (PPOConfig, {**UPDATES, "critic": "separate"}),
    "sao": (
        PPOConfig,
        {"policy_loss": "sao", "kl_coef": 0.0, "critic": "separate", "value_epochs": 3, "minibatch_size": 4}
        | {"ppo_epochs": 1, "value_freeze": ("attn",), "gae_lambda_alpha": 1.5, "positive_coef": 0.1},
    ),
    "warm-up": (PPOConfig, {**UPDATES, "critic_warmup_steps": 3, "warmup_steps": 2}),
    "lora": (PPOConfig, {**UPDATES, "lora_rank": 4}),
    "adaptive-kl": (PPOConfig, {**UPDATES, "kl_target": 1.0, "kl_horizon": 40}),
    "average": (PPOConfig, {**UPDATES, "ema_decay": 0.9}),
    "sampled-norm": (PPOConfig, {**UPDATES, "score_norm_samples": 8}),
    "ptx": (PPOConfig, {**UPDATES, "ptx_coef": 0.5}),
    "a2c": (A2CConfig, {"minibatch_size": 8}),
    "grpo": (GRPOConfig, UPDATES),
    "entropy": (PPOConfig, {**UPDATES, "target_entropy": 5.56}),
    "dynamic-sampling": (GRPOConfig, {**UPDATES, "dynamic_sampling_rounds": 2, "score_clip": 5.0}),
    "importance": (GRPOConfig, {**UPDATES, "top_p": 0.8, "importance": "sequence-truncate"}),
    "reinforce++": (PPOConfig, {**UPDATES, "advantage": "reinforce++"}),
    "online-dpo": (OnlineDPOConfig, {"minibatch_size": 4}),
    "sft-bfloat16-weights": (SFTConfig, {"dtype": "bfloat16", "weights_dtype": "bfloat16"}),
    "bfloat16-weights": (
        PPOConfig,
        {**UPDATES, "critic": "separate", "dtype": "bfloat16", "weights_dtype": "bfloat16"},
    ),
    "everything": (PPOConfig, EVERYTHING),
}
WEIGHTS = ("model", "policy", "critic", "average")


@pytest.fixture
def started(config, offline, tiny, demonstrations, length):
    """``started(kind)``: a learner before its first step, and a function that does a step and returns its metrics."""

    def make(kind):
        config_class, changes = KINDS[kind]
        steps, ptx = BEFORE + AFTER + 1, {"ptx_data": demonstrations} if "ptx_coef" in changes else {}
        for name in MODULES:
            if config_class is CONFIGS[name]:
                settings = offline(name, max_steps=steps, lr_schedule="linear", sample_every=50, **changes)
                return begin(settings, with_samples=True)
        online = {"model": tiny("qwen3"), "learning_rate": 1e-2, "steps": steps, "max_new_tokens": 6}
        learner = start(config(config_class, **(online | ptx | changes)), [length]).learner
        return learner, lambda: step_online(learner)[0]

    return make


def go_on(learner, step, steps):
    """Metrics of the next steps but for times, and the state after them."""
    metrics = [timeless(step()) for _ in range(steps)]
    return {"metrics": metrics, **copy.deepcopy(learner.state_dict())}


def differing(a, b, path=""):
    """Where two trees of tensors and plain values are not equal, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{path}.{key}" for key in a.keys() ^ b.keys()]
        return missing + [x for key in a.keys() & b.keys() for x in differing(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [x for i, (p, q) in enumerate(zip(a, b, strict=True)) for x in differing(p, q, f"{path}.{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    is_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return [] if is_nan or (type(a) is type(b) and a == b) else [path]


def disturb():
    """Other random numbers have been drawn since, as in another process."""
    torch.manual_seed(99)
    torch.rand(7)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_bit_for_bit(started, kind):
    learner, step = started(kind)
    at_start = copy.deepcopy(learner.state_dict())
    for _ in range(BEFORE):
        step()
    state = copy.deepcopy(learner.state_dict())
    assert differing(at_start, state), "the steps change something"
    expected = go_on(learner, step, AFTER)
    again, its_step = started(kind)
    disturb()
    again.load_state_dict(copy.deepcopy(state))
    assert differing(again.state_dict(), state) == []
    assert differing(go_on(again, its_step, AFTER), expected) == []


MUTANTS = [
    *(
        ("sft-dropout", key)
        for key in ("model", "optimizer", "schedule", "batches", "random.torch", "random.generator")
    ),
    *(("reward", key) for key in ("model", "optimizer", "schedule", "batches")),
    ("reward-float16", "grad_scaler"),
    *((name, key) for name in ("dpo", "simpo", "kto") for key in ("model", "optimizer", "schedule", "batches")),
    *((name, "random.generator") for name in ("dpo", "kto")),
    *(
        ("everything", key)
        for key in ("policy", "critic", "optimizer", "schedule", "kl", "score_norm", "average", "ptx", "prompts")
    ),
    ("everything", "random.generator"),
    ("warm-up", "schedule"),
    ("entropy", "entropy"),
    *(("dynamic-sampling", key) for key in ("prompts", "random.generator")),
    ("sampled-norm", "score_norm"),
    ("grpo", "prompts"),
    *(("online-dpo", key) for key in ("policy", "optimizer", "prompts", "random.generator")),
]


@pytest.mark.parametrize(("kind", "key"), MUTANTS)
@pytest.mark.exhaustive
def test_without_any_part_of_the_state_the_run_would_go_on_otherwise(started, kind, key):
    """In its weights or metrics, not only in what was left out. So the test above can fail."""
    learner, step = started(kind)
    for _ in range(BEFORE):
        step()
    state = copy.deepcopy(learner.state_dict())
    expected = go_on(learner, step, AFTER)
    again, its_step = started(kind)
    if key == "score_norm":  # as if it had measured nothing yet
        again.score_norm = type(again.score_norm)()
    fresh = copy.deepcopy(again.state_dict())
    *parents, last = key.split(".")
    target, source = state, fresh
    for parent in parents:
        target, source = target[parent], source[parent]
    target[last] = source[last]
    again.load_state_dict(state)
    found = go_on(again, its_step, AFTER)
    outcome = [{k: run[k] for k in ("metrics", *WEIGHTS) if k in run} for run in (found, expected)]
    assert differing(*outcome), f"{key} makes no difference"


def without_tensors(state):
    if isinstance(state, dict):
        return {k: without_tensors(v) for k, v in state.items() if not isinstance(v, torch.Tensor)}
    return state


@pytest.mark.parametrize("kind", often(["sft", "shared", "everything"], ["everything"]))
def test_a_state_stays_as_it_is_while_training_goes_on(started, kind):
    """Its numbers do, and its tensors are the learner's own, as torch's are. A learner that resumes from it changes none.
    What is frozen is not part of it."""
    learner, step = started(kind)
    step()
    live = learner.state_dict()
    if kind == "everything":
        assert all(".lora_" in name for name in live["policy"])
        assert all(".lora_" in name or name.startswith("value_head") for name in live["critic"])
    state = copy.deepcopy(live)
    before = copy.deepcopy(live)
    step()
    assert differing(live, before)
    assert differing(without_tensors(live), without_tensors(before)) == []
    assert differing(learner.state_dict(), before)
    again, its_step = started(kind)
    again.load_state_dict(state)
    its_step()
    assert differing(state, before) == []


def test_weights_of_another_model_are_refused():
    small, large = torch.nn.Linear(2, 1), torch.nn.Sequential(torch.nn.Linear(2, 1))
    with pytest.raises(KeyError, match="the state has other weights"):
        load_trained_weights(large, trained_weights(small))
