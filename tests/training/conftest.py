"""Small data sets, rewards, and for online training: settings, a learner of tiny models, its experience and gradient."""

import inspect
import os
import shutil
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from gradients import flat_gradient
from heedful import GRPOConfig, Message, PPOConfig, Prompt, Reward, SFTConfig, faults, make_tiny_model, train_sft
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.prompts import Prompts
from heedful.algorithms.online.recorder import Recorder
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import entropy_control, kl_control
from heedful.algorithms.online.values import backward_critic
from heedful.algorithms.ppo import backward_minibatch, make_experience
from heedful.core import ScoreNorm
from heedful.data import BatchOrder
from heedful.data.chat import Renderer
from heedful.data.loading import EncodedPrompt
from heedful.engines.sampler import make_sampler
from heedful.models import (
    Policy,
    freeze,
    load_causal_lm,
    load_policy,
    load_reward_model,
    load_tokenizer,
    load_value_model,
    save_reward_model,
)
from heedful.models.heads import disable_dropout
from heedful.training.optimization import Schedule, make_optimizer
from jsonl import read_metrics, timeless, write_jsonl
from trainers import CONFIGS

FACTS = {"你好": "您好！", "2+2?": "4", "hello": "hi there", "name a colour": "blue", "bye": "see you"}
PROMPTS = [
    Prompt("say ab", "p:1"),
    Prompt("一只猫", "p:2"),
    Prompt((Message("user", "hello there, how are you?"),), "p:3"),
    Prompt("x", "p:4"),
]
A2C = {"policy_loss": "a2c", "ppo_epochs": 1}
TWICE = {"ppo_epochs": 2}
"""So that old log-probs are kept: with one update its own pass gives them."""
VARIANTS = {
    "ppo": (PPOConfig, {"entropy_coef": 0.01}),
    "separate": (PPOConfig, {"critic": "separate", "entropy_coef": 0.01}),
    "response": (PPOConfig, {"importance_level": "sequence"}),
    "a2c": (PPOConfig, A2C),
    "a2c-response": (PPOConfig, {**A2C, "importance_level": "sequence"}),
    "bounds": (PPOConfig, {"clip_range_high": 0.05, "dual_clip": 1.1}),
    "response-bounds": (PPOConfig, {"importance_level": "sequence", "clip_range_high": 0.05, "dual_clip": 1.1}),
    "k2-in-loss": (PPOConfig, {"kl_in": "loss", "kl_kind": "k2"}),
    "k3-in-loss": (PPOConfig, {"kl_in": "loss", "kl_kind": "k3", "importance_level": "sequence", "entropy_coef": 0.02}),
    "separate-response": (PPOConfig, {"importance_level": "sequence", "critic": "separate"}),
    "cispo": (PPOConfig, {"policy_loss": "cispo", "clip_range_high": 0.05}),
    "reinforce++": (PPOConfig, {"advantage": "reinforce++"}),
    "sao": (PPOConfig, {"policy_loss": "sao", "clip_range": 0.2, "clip_range_high": 0.1, "gae_lambda_alpha": 1.5}),
    "vapo": (PPOConfig, {"critic": "separate", "value_lambda": 1.0, "positive_coef": 0.5, "correct_from": 11.0}),
    "grpo": (GRPOConfig, TWICE),
    "dr-grpo": (GRPOConfig, {**TWICE, "advantage": "dr_grpo", "loss_reduction": "fixed"}),
    "dapo": (GRPOConfig, {**TWICE, "loss_reduction": "token", "clip_range_high": 0.28, "kl_coef": 0.0}),
    "rloo": (GRPOConfig, {"advantage": "rloo", "importance_level": "sequence", "kl_in": "reward"}),
    "gspo": (GRPOConfig, {**TWICE, "importance_level": "sequence-mean", "clip_range": 0.02, "kl_coef": 0.0}),
    "reinforce": (GRPOConfig, {"advantage": "reinforce", "importance_level": "sequence", "kl_in": "reward"}),
}
"""Every advantage, surrogate, average and place of the KL penalty, and both kinds of critic."""
COMBINED = {"a2c-response", "response-bounds", "k2-in-loss", "separate-response", "dr-grpo", "reinforce"}
COMBINED |= {"response", "dapo"}
"""Those of `VARIANTS` whose parts are each in another one; they are tried by the exhaustive tests."""


@pytest.fixture
def one_thread():
    """Threads may round differently from one time to the next."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def passes():
    """Rows and tokens (rows times the longest) of every pass through a policy, a value model or a reward model."""

    def watch(model):
        seen = []

        def note(_, args):
            is_reward_model = len(args) == 1
            lengths = [len(row["input_ids"]) for row in args[0]] if is_reward_model else args[1].sum(dim=1).tolist()
            seen.append((len(lengths), len(lengths) * max(lengths)))

        model.register_forward_pre_hook(note)
        return seen

    return watch


@pytest.fixture
def mistake():
    """``mistake(function, old, new)``: put another text into a function for the rest of a test."""
    real = []

    def plant(function, old, new):
        source = inspect.getsource(function)
        assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {function.__name__}"
        namespace = dict(vars(sys.modules[function.__module__]))
        exec(compile("from __future__ import annotations\n" + source.replace(old, new), "mistake", "exec"), namespace)
        real.append((function, function.__code__))
        function.__code__ = namespace[function.__name__].__code__

    yield plant
    for function, code in reversed(real):
        function.__code__ = code


@pytest.fixture(scope="session")
def demonstrations(tmp_path_factory):
    """Five pairs of a conversation's question and answer. Read-only."""
    return write_jsonl(
        tmp_path_factory.mktemp("示范") / "demonstrations.jsonl",
        [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in FACTS.items()
        ],
    )


@pytest.fixture
def pairs(written):
    """Seven pairs of a good and a bad response."""
    return written("pairs.jsonl", [{"prompt": f"第{i}问", "chosen": f"好{i}", "rejected": "不"} for i in range(7)])


@pytest.fixture
def offline(tiny, demonstrations, pairs, tmp_path):
    """``offline("sft", **changes)``: settings of five steps of three records, of a trainer that learns from data."""

    def make(name, **changes):
        data = demonstrations if name == "sft" else pairs
        settings = {"model": tiny("qwen3"), "data": data, "output": tmp_path / "run", "batch_size": 3, "max_steps": 5}
        settings |= {"eval_fraction": 0.0, "lr_schedule": "constant", "learning_rate": 1e-2, "dtype": "float32"}
        return CONFIGS[name](**(settings | {"sample_every": 0} | changes))

    return make


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """Ten raw-text prompts with their number, Chinese among them. Read-only."""
    words = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "苹果", "梨"]
    rows = [{"prompt": f"say {word}", "number": i} for i, word in enumerate(words)]
    return write_jsonl(tmp_path_factory.mktemp("题目") / "prompts.jsonl", rows)


@pytest.fixture
def length():
    """A reward: characters. A completion is a string, or a list with the assistant's message."""

    def length(completions, **_):
        return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]

    return length


@pytest.fixture
def share_of_a():
    """A reward that can be learned in a few steps."""

    def share_of_a(completions, **_):
        return [completion.count("a") / max(1, len(completion)) for completion in completions]

    return share_of_a


@pytest.fixture
def numbers():
    """``numbers(run folder)``: the lines of metrics.jsonl, but for times."""
    return lambda run: [timeless(line) for line in read_metrics(run)]


@pytest.fixture
def config(tiny, prompts, tmp_path):
    """``config(Config, **changes)``: two steps of PPO, or of another online algorithm, on a tiny gpt2."""

    def make(kind=PPOConfig, **changes):
        settings = {"model": tiny("gpt2"), "data": prompts, "output": tmp_path / "run", "dtype": "float32"}
        settings |= {"steps": 2, "rollout_batch_size": 8, "minibatch_size": 8, "max_new_tokens": 12}
        settings |= {"samples_per_prompt": 4 if issubclass(kind, GRPOConfig) else 2}
        settings |= {"eval_fraction": 0.3, "eval_every": 0, "sample_every": 0}
        return kind(**(settings | changes))

    return make


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.exhaustive if name in COMBINED else ()) for name in VARIANTS]
)
def variant_name(request):
    """The name of one of `VARIANTS`."""
    return request.param


@pytest.fixture
def variant(variant_name, config):
    """``variant(**changes)``: the settings of one of `VARIANTS`."""
    kind, settings = VARIANTS[variant_name]
    return lambda **changes: config(kind, **(settings | changes))


@pytest.fixture
def reading_first():
    """``reading_first(GRPOConfig)``: settings with which the rollout batch is read before its update, whatever they say."""
    return lambda kind: dataclass(frozen=True, kw_only=True)(type(kind.__name__, (kind,), {"needs_old_pass": True}))


def make_policy(folder, dtype=torch.float64, *, noise=0.0, with_value_head=False):
    """A model without dropout, ``noise`` away from the checkpoint."""
    policy = Policy(load_causal_lm(folder).to(dtype), with_value_head=with_value_head)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    disable_dropout(policy)
    return policy


@pytest.fixture
def gpt2(tiny):
    """A policy in float32, in evaluation mode, and its renderer."""
    name = tiny("gpt2", max_length=256)
    policy = load_policy(name, device=torch.device("cpu"), compute_dtype=torch.float32).eval()
    return policy, Renderer(load_tokenizer(name))


@pytest.fixture
def another(tmp_path):
    """The folder of a tiny gpt2 with other weights."""
    make_tiny_model("gpt2", tmp_path / "另一个", hidden_size=32, num_layers=2, max_length=256, seed=5)
    return str(tmp_path / "另一个")


@pytest.fixture
def other_gpt2(another):
    """A policy of the same shape with other weights."""
    return load_policy(another, device=torch.device("cpu"), compute_dtype=torch.float32).eval()


@pytest.fixture
def reward_model(tiny, tmp_path):
    """The name of a reward that is a tiny reward model."""
    tokenizer, machine = load_tokenizer(tiny("qwen3")), {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    model = load_reward_model(tiny("qwen3"), tokenizer, seed=0, **machine)
    save_reward_model(model, tokenizer, tmp_path / "奖励模型")
    return f"model:{tmp_path / '奖励模型'}"


@pytest.fixture
def make_learner(length):
    """``make_learner(settings, dtype, noise=..., **changes)``, rewarded for length, with fields changed.

    Policy, reference and critic are from one checkpoint. The value head is not zero, the reference ``noise`` away.
    """

    def make(settings, dtype=torch.float64, *, noise=0.0, **changes):
        has_critic, critic = settings.estimator.critic, None
        policy = make_policy(settings.model, dtype, with_value_head=has_critic and settings.critic == "shared")
        if has_critic and settings.critic == "separate":
            critic = load_value_model(settings.model, device=torch.device("cpu"), compute_dtype=torch.float32).to(dtype)
            disable_dropout(critic)
        if has_critic:
            torch.nn.init.normal_((critic or policy).value_head.weight, std=0.3)
        renderer = Renderer(load_tokenizer(settings.model))
        encoded = [EncodedPrompt(prompt, renderer.prompt_ids(prompt.prompt)) for prompt in PROMPTS]
        optimizer = make_optimizer([(module, settings.learning_rate) for module in (policy, critic)], settings)
        learner = Learner(
            config=settings,
            policy=policy,
            reference=freeze(make_policy(settings.model, dtype, noise=noise)),
            critic=critic,
            optimizer=optimizer,
            schedule=Schedule(optimizer, settings.steps, settings),
            kl=kl_control(settings),
            entropy=entropy_control(settings),
            score_norm=ScoreNorm(),
            average=None,
            ptx=None,
            prompts=Prompts(encoded, BatchOrder(len(encoded), len(encoded), seed=0), settings.samples_per_prompt),
            generator=torch.Generator().manual_seed(0),
            rewards=[Reward("length", length)],
            sampler=make_sampler(settings, renderer, policy),
        )
        return replace(learner, **changes)

    return make


@pytest.fixture
def experience_of():
    """``experience_of(learner)``: of samples_per_prompt responses to each of its prompts, in their order, from one seed."""

    def of(learner):
        asked = [p for p in learner.prompts.prompts for _ in range(learner.config.samples_per_prompt)]
        seeded = replace(learner, generator=torch.Generator().manual_seed(0))
        return make_experience(seeded, rollout(seeded, asked))

    return of


@pytest.fixture
def moved():
    """``moved(experience)``: log-probs and values as if the policy had moved since, so that some ratios are clipped."""

    def move(experience):
        generator = torch.Generator().manual_seed(5)
        like = experience.old_logprobs
        noise = 0.3 * torch.randn(like.shape, generator=generator, dtype=like.dtype)
        values = None if experience.old_values is None else experience.old_values + noise
        drawn = experience.drawn_logprobs + noise
        return replace(
            experience, old_logprobs=experience.old_logprobs + noise, old_values=values, drawn_logprobs=drawn
        )

    return move


@pytest.fixture
def gradient():
    """``gradient(learner, experience, **changes)`` of the loss under changed settings; its metrics; approx_kl."""

    def of(learner, experience, **changes):
        for module in learner.trained:
            module.zero_grad()
        changed = replace(learner, config=replace(learner.config, **changes))
        coefs = {name: changes.get(name, getattr(experience, name)) for name in ("kl_coef", "entropy_coef")}
        priced = replace(experience, **coefs)
        recorder = Recorder(changed, priced.kl)
        backward_minibatch(changed, priced, recorder, changed.micro_batch)
        if changed.critic is not None:
            backward_critic(changed, priced, torch.arange(len(priced.rows)), recorder.sums)
        return flat_gradient(*learner.trained), recorder.sums.means(1), float(recorder.approx_kl)

    return of


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    faults.plan("")


@pytest.fixture(scope="session")
def killed():
    """``killed("save.files:kill@2", action)``: an action in a process of its own, which a fault point kills."""

    def run(fault, action):
        child = os.fork()
        if child == 0:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            try:
                faults.plan(fault)
                action()
            finally:
                os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])

    return run


@pytest.fixture(scope="session")
def sft_into(tiny, demonstrations):
    """``sft_into(folder, **changes)``: a run of SFT of three steps."""

    def run(output, **changes):
        settings = {"model": tiny("gpt2"), "data": demonstrations, "output": output, "max_steps": 3}
        settings |= {"eval_fraction": 0.4, "batch_size": 2, "sample_every": 0, "save_every": 1}
        return train_sft(SFTConfig(**(settings | changes)))

    return run


@pytest.fixture
def sft(sft_into, tmp_path):
    """``sft(**changes)``: the same in tmp_path / "run"."""
    return lambda output=tmp_path / "run", **changes: sft_into(output, **changes)


@pytest.fixture(scope="session")
def runs_made_once(sft_into, killed, tmp_path_factory):
    """A run that `sft` finished, and one that was killed in its third step."""
    folder = tmp_path_factory.mktemp("runs")
    sft_into(folder / "finished")
    killed("step.learned:kill@3", lambda: sft_into(folder / "unfinished"))
    return folder


@pytest.fixture
def finished(runs_made_once, tmp_path):
    """A run that ``sft()`` finished, in tmp_path / "run"."""
    return shutil.copytree(runs_made_once / "finished", tmp_path / "run")


@pytest.fixture
def unfinished(runs_made_once, tmp_path):
    """A run of ``sft()`` that was killed in its third step, in tmp_path / "run"."""
    return shutil.copytree(runs_made_once / "unfinished", tmp_path / "run")
