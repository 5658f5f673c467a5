"""`heedful.compat.trl`'s step beside the formulas of TRL 0.11, which tests/helpers/old_ppo.py has written again.

benchmarks/old_ppo/same_steps.py compares with TRL itself.
"""

import copy
import warnings

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

import heedful
from heedful.compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from old_ppo import OldPPO

ROWS, STEPS = 4, 2
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("compat") / "gpt2"
    heedful.make_tiny_model("gpt2", path, hidden_size=16, num_layers=2, initializer_range=0.3, max_length=64)
    return str(path)


def make_policy(folder, **kwargs):
    """In float64, so that the tolerance is about formulas and not about rounding."""
    torch.manual_seed(1)
    return AutoModelForCausalLMWithValueHead.from_pretrained(folder, v_head_init_strategy="normal", **kwargs).double()


def make_reference(policy):
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return reference


def batches():
    draw = np.random.RandomState(2)
    for _ in range(STEPS):
        queries = [torch.tensor(draw.randint(10, 250, draw.randint(2, 5))) for _ in range(ROWS)]
        responses = [torch.tensor(draw.randint(10, 250, draw.randint(4, 7))) for _ in range(ROWS)]
        scores = [torch.tensor(score) for score in 2 * draw.randn(ROWS) + 1]
        masks = [torch.ones_like(response) for response in responses]
        for mask in masks:
            mask[draw.randint(0, 2) : draw.randint(2, 4)] = 0
        masks[0][-1] = 0
        yield queries, responses, scores, masks


SMALL = {"mini_batch_size": 2, "ppo_epochs": 2}
STOPPED = {"early_stopping": True, "target_kl": 1e-6, "ppo_epochs": 4}
CASES = {
    "adaptive": {"target": 0.6, "horizon": 40.0},
    "fixed": {"adap_kl_ctrl": False, "init_kl_coef": 0.5},
    "scaled scores": {"use_score_scaling": True},
    "normalised, clipped scores": {"use_score_scaling": True, "use_score_norm": True, "score_clip": 0.4},
    "whitened rewards": {"whiten_rewards": True},
    "stopped early": STOPPED,
    "abs": {"kl_penalty": "abs"},
    "mse": {"kl_penalty": "mse"},
    "full": {"kl_penalty": "full"},
    "discount and clips": {"gamma": 0.9, "lam": 0.7, "cliprange": 0.01, "cliprange_value": 0.02, "vf_coef": 0.7},
    "accumulation": {"mini_batch_size": 1, "gradient_accumulation_steps": 2, "ppo_epochs": 4},
    "ratio above its threshold": {"ratio_threshold": 1.0},
    "clipped gradients": {"max_grad_norm": 0.5},
}


def run(trainer, model, *, holes=False):
    """Stats of each step, and how far each trained weight moved."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    before = {name: weight.detach().clone() for name, weight in trained.items()}
    np.random.seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a mean ratio is above its threshold
        stats = [trainer.step(*batch, masks if holes else None) for *batch, masks in batches()]
    return stats, {name: weight.detach() - before[name] for name, weight in trained.items()}


def compare(folder, settings, *, optimizer=torch.optim.SGD, holes=False, left=False, lora=None):
    """Returns our stats, after all were compared."""
    policy = make_policy(folder, peft_config=lora)
    reference = None if lora else make_reference(policy)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left" if left else "right"
    config = PPOConfig(batch_size=ROWS, **SMALL | settings)
    again = copy.deepcopy(policy)

    def ref_logits(ids, positions):
        if reference is not None:
            return reference.pretrained_model(input_ids=ids, position_ids=positions, use_cache=False).logits
        with again.pretrained_model.disable_adapter():
            return again.pretrained_model(input_ids=ids, position_ids=positions, use_cache=False).logits

    def make_optimizer(model):
        return optimizer([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)

    trainer = PPOTrainer(config, policy, reference, tokenizer, optimizer=make_optimizer(policy))
    formulas = OldPPO(again, ref_logits, config, make_optimizer(again), left=left)
    ours, moved = run(trainer, policy, holes=holes)
    expected, should = run(formulas, again, holes=holes)
    assert trainer.kl_ctl.value == pytest.approx(formulas.coef, rel=TOLERANCE)
    for step, wanted in enumerate(expected):
        for name, value in wanted.items():
            np.testing.assert_allclose(
                ours[step][name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{step} {name}"
            )
    assert moved.keys() == should.keys()
    away = sum((moved[name] - should[name]).square().sum() for name in moved).sqrt()
    size = sum(one.square().sum() for one in should.values()).sqrt()
    assert size > 1e-3
    assert away < TOLERANCE * size
    return ours


@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_stats_and_displacement_are_those_of_the_formulas(folder, settings, holes):
    compare(folder, settings, holes=holes)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_with_adam_and_padding_on_either_side(folder, left):
    """Adam's epsilon is large, as GPT-2's key biases have no gradient but rounding, which Adam would make steps of."""

    def adam(weights, lr):
        return torch.optim.Adam(weights, lr=lr, eps=1e-5)

    compare(folder, {}, optimizer=adam, holes=True, left=left)


def test_with_an_adapter_the_reference_is_the_policy_without_it(folder):
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, lora_dropout=0.5)
    stats = compare(folder, {}, lora=lora)
    assert abs(stats[0]["objective/kl"]) > 1e-3


def test_the_cases_have_what_they_are_for(folder):
    """An epoch is left out, ratios and values are clipped, a loss is 0: otherwise the comparison would say nothing."""
    epochs, once = (len(one_step(folder, **case)["ppo/policy/ratio"]) for case in (STOPPED, {"ppo_epochs": 1}))
    assert once <= epochs < 4 * once
    clipped = one_step(folder, **CASES["discount and clips"], learning_rate=1e-2)
    assert clipped["ppo/policy/clipfrac"] > 0
    assert clipped["ppo/val/clipfrac"] > 0
    with pytest.warns(UserWarning, match="above ratio_threshold 0.50: its loss is set to 0"):
        zero = one_step(folder, ratio_threshold=0.5)
    assert zero["ppo/loss/total"] == 0


def one_step(folder, **settings):
    """One step by the defaults: Adam, a frozen copy as the reference."""
    config = PPOConfig(batch_size=ROWS, **SMALL | settings)
    trainer = PPOTrainer(config, make_policy(folder), tokenizer=AutoTokenizer.from_pretrained(folder))
    *batch, _ = next(batches())
    return trainer.step(*batch)


def test_stats_have_the_types_that_scripts_rely_on(folder):
    """Numbers are Python's, so that they are JSON; numbers per response or token are arrays."""
    stats = one_step(folder)
    arrays = {name for name, value in stats.items() if isinstance(value, np.ndarray)}
    assert arrays == {
        *(
            "objective/kl_dist",
            "objective/logprobs",
            "objective/ref_logprobs",
            "ppo/policy/advantages",
            "ppo/policy/ratio",
        ),
        *("tokens/queries_dist", "tokens/responses_dist"),
    }
    assert {type(value) for name, value in stats.items() if name not in arrays} == {float}
    assert stats["objective/logprobs"].shape == stats["objective/ref_logprobs"].shape
    assert stats["objective/kl"] == 0.0
    assert stats["ppo/learning_rate"] == PPOConfig.learning_rate


def test_gradient_checkpointing_changes_no_number(folder):
    """It works in training mode only, where dropout would be live."""
    plain, checkpointed = (one_step(folder, learning_rate=1e-2, gradient_checkpointing=flag) for flag in (False, True))
    for name in ("ppo/loss/total", "ppo/val/vpred", "ppo/policy/approxkl"):
        assert checkpointed[name] == pytest.approx(plain[name], rel=1e-9)


def test_gradients_are_accumulated_in_the_last_batch_of_the_dataloader_too(folder):
    """accelerate would step after every minibatch there, as it does in TRL."""
    texts = Dataset.from_dict({"query": ["今天天气很好"] * ROWS, "unused": list(range(ROWS))})
    config = PPOConfig(batch_size=ROWS, mini_batch_size=1, gradient_accumulation_steps=2, ppo_epochs=1)
    trainer = PPOTrainer(
        config, make_policy(folder), tokenizer=AutoTokenizer.from_pretrained(folder), dataset=texts, data_collator=list
    )
    steps = []
    trainer.optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    *batch, _ = next(batches())
    for _ in trainer.dataloader:
        trainer.step(*batch)
    assert len(steps) == 2
