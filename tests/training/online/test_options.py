"""Every option in every preset: it has an effect, or it is refused with a reason. docs/options.md is this table.

`python tests/training/online/test_options.py` writes the page again; the tests hold each of its cells against the code.
"""

import dataclasses
import re
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from cases import pairs_often
from heedful import A2CConfig, ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, RewardError, make_tiny_model
from heedful.algorithms.online.start import start
from heedful.configs.settings import answering_command
from jsonl import timeless, write_jsonl
from trainers import step_online

PAGE = Path(__file__).resolve().parents[3] / "docs" / "options.md"

PRESETS = {
    "PPO": (PPOConfig, {}),
    "response-level PPO": (PPOConfig, {"importance_level": "sequence"}),
    "A2C": (A2CConfig, {}),
    "REINFORCE++": (PPOConfig, {"advantage": "reinforce++"}),
    "GRPO": (GRPOConfig, {}),
    "Dr. GRPO": (GRPOConfig, {"advantage": "dr_grpo", "loss_reduction": "fixed"}),
    "DAPO": (GRPOConfig, {"loss_reduction": "token", "clip_range_high": 0.28, "kl_coef": 0.0}),
    "CISPO": (GRPOConfig, {"policy_loss": "cispo", "loss_reduction": "token", "clip_range": 1.0, "kl_coef": 0.0}),
    "GSPO": (
        GRPOConfig,
        {"importance_level": "sequence-mean", "clip_range": 3e-4, "clip_range_high": 4e-4, "kl_coef": 0.0},
    ),
    "RLOO": (GRPOConfig, {"advantage": "rloo", "importance_level": "sequence", "kl_in": "reward"}),
    "REINFORCE": (GRPOConfig, {"advantage": "reinforce", "kl_in": "reward", "samples_per_prompt": 1}),
    "online DPO": (OnlineDPOConfig, {}),
}
COMMANDS = {PPOConfig: "ppo", A2CConfig: "a2c", GRPOConfig: "grpo", OnlineDPOConfig: "online-dpo"}


@dataclasses.dataclass(frozen=True)
class Option:
    """A setting to try in each preset."""

    settings: dict
    beside: dict = dataclasses.field(default_factory=dict)
    """What the option needs to mean anything; the comparison is with a run that has this too."""
    reward: str = "length"


KL = {"kl_coef": 0.5}
FILTERED = {"top_p": 0.5, "temperature": 0.5}
MOVED = {"ppo_epochs": 6, "minibatch_size": 1}
"""Ratios of bad responses rise only while others are learned from."""
OPTIONS = {
    "gamma": Option({"gamma": 0.7}),
    "action": Option({"action": "turn"}),
    "gae-lambda": Option({"gae_lambda": 0.5}),
    "gae-lambda-alpha": Option({"gae_lambda_alpha": 0.5}),
    "value-lambda": Option({"value_lambda": 0.5}),
    "whiten-rewards": Option({"whiten_rewards": True}),
    "whiten-advantages": Option({"whiten_advantages": ...}),
    "a reward per token": Option({}, reward="dense"),
    "loss-reduction": Option({"loss_reduction": ...}, {"max_new_tokens": 40}),
    "importance-level": Option({"importance_level": ...}),
    "clip-range": Option({"clip_range": 1e-5}),
    "clip-range-high": Option({"clip_range_high": 1e-5}),
    "dual-clip": Option({"dual_clip": 1.00001}, MOVED | {"ppo_epochs": 16, "seed": 4}),
    "positive-coef": Option({"positive_coef": 0.5, "correct_from": 8.0}),
    "entropy-coef": Option({"entropy_coef": 0.5}),
    "target-entropy": Option({"target_entropy": 9.0}),
    "importance": Option({"importance": ...}, FILTERED),
    "importance-low": Option({"importance_low": 0.55}, FILTERED | {"importance": ...}),
    "importance-high": Option({"importance_high": 0.016}, FILTERED | {"importance": ...}),
    "importance-normalise": Option({"importance_normalise": True}, FILTERED | {"importance": ...}),
    "approx-kl-limit": Option({"approx_kl_limit": 1e-12}),
    "ppo-epochs": Option({"ppo_epochs": 3}),
    "kl-coef": Option({"kl_coef": 0.7}),
    "kl-in": Option({"kl_in": ..., "kl_kind": "k2"}, KL | {"kl_kind": "k2"}),
    "kl-kind": Option({"kl_kind": "k2"}, KL),
    "kl-target": Option({"kl_target": 0.01, "kl_horizon": 20}, KL),
    "critic separate": Option({"critic": "separate"}),
    "value-freeze": Option({"value_freeze": ("attn",)}, {"critic": "separate"}),
    "value-coef": Option({"value_coef": 0.9}),
    "value-epochs": Option({"value_epochs": 3}),
    "value-clip-range": Option({"value_clip_range": 1e-6}),
    "value-learning-rate": Option({"value_learning_rate": 0.1}),
    "critic-warmup-steps": Option({"critic_warmup_steps": 1}),
    "score-norm-samples": Option({"score_norm_samples": 6}),
    "score-clip": Option({"score_clip": 4.5}),
    "missing-eos-penalty": Option({"missing_eos_penalty": 3.0}),
    "overlong-buffer": Option({"overlong_buffer": 5}, {"response_length": "stop"}),
    "overlong-penalty": Option({"overlong_penalty": 3.0}, {"response_length": "stop", "overlong_buffer": 5}),
    "mask-truncated": Option({"mask_truncated": True}, {"response_length": "stop"}),
    "dynamic-sampling-rounds": Option({"dynamic_sampling_rounds": 2}, reward="ties"),
    "ptx-data": Option({"ptx_data": ..., "ptx_coef": 1.0}),
    "ema-decay": Option({"ema_decay": 0.5}),
    "reference": Option({"reference": ...}, KL),
    "max-prompt-tokens": Option({"max_prompt_tokens": 4, "too_long": "truncate"}),
    "beta": Option({"beta": 0.9}),
    "loss": Option({"loss": "ipo"}),
}


def length(completions, **_):
    return [float(len(completion)) for completion in completions]


def dense(completion_ids, **_):
    """Each token's place among a response's counts for it; sums as in `length` would not tell places apart."""
    return [[float(i % 3) for i, _ in enumerate(ids)] for ids in completion_ids]


def ties(completions, **_):
    return [float(len(completion) > 4) for completion in completions]


def sums(completion_ids, **_):
    return [float(sum(row)) for row in dense(completion_ids)]


REWARDS = {"length": length, "dense": dense, "ties": ties, "sums": sums}


TEMPORARY = tempfile.TemporaryDirectory()


@cache
def folder():
    """A tiny policy, a reference that differs from it, prompts and demonstrations."""
    root = Path(TEMPORARY.name)
    for name, seed in (("policy", 0), ("reference", 1)):
        sizes = {"hidden_size": 16, "num_layers": 1, "max_length": 64, "initializer_range": 0.2}
        make_tiny_model("gpt2", root / name, **sizes, seed=seed)
    write_jsonl(root / "prompts.jsonl", [{"prompt": f"say {w}"} for w in ("ab", "cd", "ef", "gh", "苹果", "梨")])
    write_jsonl(root / "demonstrations.jsonl", [{"prompt": f"q{i}", "completion": f"answer {i}"} for i in range(8)])
    return root


def make(preset, settings):
    """The preset's configuration with settings; ``...`` is whatever the preset does not have."""
    config_class, own = PRESETS[preset]
    fields = {field.name for field in dataclasses.fields(config_class)}
    unknown = [name for name in settings if name not in fields]
    if unknown:
        raise ConfigError(f"heedful {COMMANDS[config_class]} has no --{unknown[0].replace('_', '-')}")
    files = {
        "model": str(folder() / "policy"),
        "data": str(folder() / "prompts.jsonl"),
        "output": folder() / "unwritten",
    }
    common = {"steps": 2, "eval_fraction": 0.0, "rollout_batch_size": 6, "minibatch_size": 6, "max_new_tokens": 6}
    common |= files | {"learning_rate": 0.02, "lr_schedule": "constant", "dtype": "float32", "device": "cpu"}
    if config_class is not A2CConfig:
        common["ppo_epochs"] = 2
    if own.get("samples_per_prompt", 2) > 1 and config_class is not PPOConfig:
        common["samples_per_prompt"] = 3
    chosen = common | own
    default = {f.name: f.default for f in dataclasses.fields(config_class)} | chosen
    level = default.get("importance_level")
    others = {
        "importance_level": "sequence-mean" if level == "sequence" else "sequence",
        "whiten_advantages": not default.get("whiten_advantages"),
        "loss_reduction": "sequence" if default.get("loss_reduction") != "sequence" else "token",
        "importance": "sequence-mask" if level in ("sequence", "sequence-mean") else "token-mask",
        "kl_in": "loss" if default.get("kl_in") == "reward" else "reward",
        "ptx_data": str(folder() / "demonstrations.jsonl"),
        "reference": str(folder() / "reference"),
    }
    return config_class(**chosen | {name: others[name] if value is ... else value for name, value in settings.items()})


def trace(config, reward):
    """Everything that two steps leave: metrics, without seconds, and state."""
    learner = start(config, [REWARDS[reward]]).learner
    left = [timeless(step_online(learner)[0]) for _ in range(config.steps)]
    state = learner.state_dict()
    tensors = [*state["policy"].values(), *(state["critic"] or {}).values(), *(state["average"] or {}).values()]
    return left, torch.cat([tensor.flatten() for tensor in tensors])


@cache
def plain(preset, beside, reward):
    return trace(make(preset, dict(beside)), reward)


def outcome(preset, option):
    """ "yes" if the option changes weights or metrics, else why it is refused, else "no effect"."""
    tried = OPTIONS[option]
    try:
        metrics, weights = trace(make(preset, tried.beside | tried.settings), tried.reward)
    except (ConfigError, RewardError) as error:
        return str(error)
    is_dense = tried.reward == "dense"  # against the same sums without their places
    before, old_weights = plain(preset, tuple(tried.beside.items()), "sums" if is_dense else tried.reward)
    if weights.shape != old_weights.shape or not torch.equal(weights, old_weights) or metrics != before:
        return "yes"
    return "as its sum" if is_dense else "no effect"


def table():
    """The page's cells: {option: {preset: "yes" or "refused"}}."""
    matrix = PAGE.read_text(encoding="utf-8").partition("## The matrix")[2].partition("## ")[0]
    lines = [line for line in matrix.splitlines() if line.startswith("| ")]
    presets = [cell.strip() for cell in lines[0].split("|")[2:-1]]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]
    return {row[0].strip("`-"): dict(zip(presets, row[1:], strict=True)) for row in rows}


EFFECTS = {"a reward per token", "target-entropy", "ptx-data", "kl-target"}
"""Those of the other options are measured by tests of their own."""
REFUSED = {
    "PPO": {"beta", "loss", "dynamic-sampling-rounds"},
    "GRPO": {"gamma", "kl-in", "critic separate", "value-coef"},
}
OFTEN = {("PPO", option) for option in EFFECTS} | {("GRPO", "a reward per token")}
OFTEN |= {(preset, option) for preset, options in REFUSED.items() for option in options}
"""All cells are read by the exhaustive tests."""


@pytest.mark.parametrize(
    ("preset", "option"), pairs_often(PRESETS, OPTIONS, OFTEN), ids=lambda name: name.replace(" ", "_")
)
def test_a_cell_of_the_page(preset, option):
    said, found = table()[option][preset], outcome(preset, option)
    if said in ("yes", "as its sum"):
        assert found == said, f"{option} in {preset}: {found}"
    else:
        assert said == "refused"
        assert found not in ("yes", "no effect"), f"{option} in {preset} is not refused: {found}"
        assert "--" in found, "a refusal names a flag"


def test_the_page_has_every_cell():
    cells = table()
    assert list(cells) == list(OPTIONS)
    assert all(list(row) == list(PRESETS) for row in cells.values())


def test_an_option_without_effect_would_be_noticed(monkeypatch):
    """The check can fail: an option that the engine ignores is "no effect"."""
    monkeypatch.setitem(OPTIONS, "num-samples", Option({"num_samples": 3}))
    assert outcome("PPO", "num-samples") == "no effect"


def write():
    """Write the page. Every cell must have an effect or be refused."""

    def flags(settings):
        texts = {name: f"{value:g}" if isinstance(value, float) else value for name, value in settings.items()}
        return "".join(f" --{name.replace('_', '-')} {text}" for name, text in texts.items())

    rows, reasons = [], {}
    for option in OPTIONS:
        cells = []
        for preset in PRESETS:
            found = outcome(preset, option)
            if found == "no effect":
                raise SystemExit(f"{option} in {preset} has no effect and is not refused")
            cells.append(found if found in ("yes", "as its sum") else "refused")
            if cells[-1] == "refused":
                reasons.setdefault(option, {}).setdefault(re.sub(r"^--\S+ \S+ ", "", found), []).append(preset)
        rows.append(f"| {option if ' per ' in option else f'`--{option}`'} | " + " | ".join(cells) + " |")
    presets = [f"| {name} | `heedful {COMMANDS[kind]}{flags(own)}` |" for name, (kind, own) in PRESETS.items()]
    why = [
        f"- `--{option}`: " + " ".join(f"{', '.join(where)}: {reason}." for reason, where in found.items())
        for option, found in reasons.items()
    ]
    head = PAGE.read_text(encoding="utf-8").partition("## The presets")[0]
    page = [f"{head}## The presets\n", "| preset | command |", "|---|---|", *presets, "\n## The matrix\n"]
    page += ["| option | " + " | ".join(PRESETS) + " |", "|---" * (len(PRESETS) + 1) + "|", *rows]
    page += ["\n## Why an option is refused\n", *why, ""]
    PAGE.write_text("\n".join(page), encoding="utf-8")


if __name__ == "__main__":
    with answering_command():  # so that refusals name flags
        write()
