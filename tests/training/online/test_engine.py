"""Whole runs of the online engine: they repeat bit for bit, write down what they did, and refuse what cannot work."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from cases import often
from heedful import (
    A2CConfig,
    ConfigError,
    GRPOConfig,
    PPOConfig,
    RewardError,
    core,
    make_tiny_model,
    train_grpo,
    train_ppo,
)
from heedful.algorithms.online.start import kl_control
from heedful.engines import generate
from heedful.models import Policy, load_causal_lm
from jsonl import read_jsonl

SAME_SEED = {
    "shared": (PPOConfig, {}),
    "separate": (PPOConfig, {"critic": "separate"}),
    "grpo": (GRPOConfig, {}),
}


@pytest.mark.parametrize("name", often(SAME_SEED, ["shared", "grpo"]))
def test_same_seed_same_run_bit_for_bit(config, length, numbers, tmp_path, name):
    kind, changes = SAME_SEED[name]
    for run, seed in (("a", 1), ("b", 1), ("c", 2)):
        train_ppo(config(kind, output=tmp_path / run, seed=seed, learning_rate=1e-3, **changes), rewards=[length])
    a, b, c = (tmp_path / run for run in "abc")
    weights = [(run / "final" / "model.safetensors").read_bytes() for run in (a, b, c)]
    assert weights[0] == weights[1] != weights[2]
    assert numbers(a) == numbers(b) != numbers(c)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(PPOConfig, "ppo"), pytest.param(A2CConfig, "a2c", marks=pytest.mark.exhaustive), (GRPOConfig, "grpo")],
)
def test_a_preset_is_its_own_algorithm(config, length, kind, name):
    settings = config(kind, minibatch_size=8, steps=1)
    assert train_ppo(settings, rewards=[length])["algorithm"] == name
    environment = json.loads((settings.output / "environment.json").read_text(encoding="utf-8"))
    assert environment["command"] == f"heedful {name}"


def test_adaptive_kl_moves_the_coefficient_towards_the_target(config, length, numbers, tmp_path):
    """Below the target the coefficient falls by n/horizon * 0.2 a step at most: KL starts at 0, so exactly that at first."""
    settings = config(kl_target=6.0, kl_horizon=40, kl_coef=0.1, steps=3)
    train_ppo(settings, rewards=[length])
    coefs = [line["reference/kl_coef"] for line in numbers(tmp_path / "run") if "reference/kl_coef" in line]
    assert coefs[0] == 0.1
    assert coefs[1] == pytest.approx(0.1 * (1 - 0.2 * 8 / 40))


def test_kl_control_is_fixed_without_a_target(config):
    assert isinstance(kl_control(config()), core.FixedKL)
    control = kl_control(config(kl_target=6.0, kl_horizon=1000, kl_coef=0.2))
    assert isinstance(control, core.AdaptiveKL)
    assert (control.coef, control.target, control.horizon) == (0.2, 6.0, 1000)


@pytest.mark.parametrize("kind", [PPOConfig, GRPOConfig])
def test_a_reward_is_required(config, kind):
    with pytest.raises(ConfigError, match="--rewards is missing"):
        train_ppo(config(kind))
    assert not config().output.exists()


def test_equal_reference_scores_cannot_be_normalised(config, tmp_path):
    with pytest.raises(RewardError, match="scores cannot be normalised"):
        train_ppo(config(score_norm_samples=6), rewards=[lambda completions: [1.0] * len(completions)])
    assert not (tmp_path / "run").exists()


def test_columns_reach_the_reward_and_samples_are_written(config, tmp_path):
    """Each prompt's own column arrives with its responses, repeated for every sample of it."""
    seen = []

    def reward(prompts, completions, number):
        seen.extend(zip(prompts, number, strict=True))
        return [0.1 * len(c) for c in completions]

    train_ppo(config(sample_every=1, steps=1), rewards=[reward])
    known = {f"say {w}": i for i, w in enumerate(["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "苹果", "梨"])}
    assert seen
    assert all(known[prompt] == number for prompt, number in seen)
    lines = (tmp_path / "run" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    assert samples[0].keys() == {"step", "prompt", "response", "score", "kl"}
    assert len({s["prompt"] for s in samples}) == len(samples) == 4


@pytest.mark.parametrize("kind", often([PPOConfig, GRPOConfig], [GRPOConfig]))
def test_without_a_price_on_kl_the_samples_have_none(config, length, kind):
    """No KL is made up in the table of samples or at evaluations."""
    settings = config(kind, kl_coef=0.0, num_samples=1, sample_every=1, eval_every=1)
    summary = train_ppo(settings, rewards=[length])
    assert "eval/kl" not in summary["last_evaluation"]
    assert "reference/kl" not in summary["last_step"]
    assert "reference/kl_coef" not in summary["last_step"]
    rows = read_jsonl(settings.output / "samples.jsonl")
    assert rows
    assert all("kl" not in row for row in rows)


def test_a_reference_of_another_vocabulary_is_refused_before_anything_is_written(config, tiny, length, tmp_path):
    """KL between unrelated ids would be a number all the same."""
    other = tmp_path / "other"
    shutil.copytree(tiny("gpt2"), other)
    tokenizer = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(
        tokenizer.replace('"a":', '"@@":').replace('"b":', '"a":').replace('"@@":', '"b":'), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"--reference .*another vocabulary"):
        train_ppo(config(reference=str(other)), rewards=[length])
    with pytest.raises(ConfigError, match=r"--value-model .*another vocabulary"):
        train_ppo(config(value_model=str(other), critic="separate"), rewards=[length])
    assert not (tmp_path / "run").exists()


def test_a_reference_that_reads_too_little_is_refused(config, tiny, length):
    with pytest.raises(ConfigError, match=r"--reference .* reads 16 tokens, but prompts and responses need"):
        train_ppo(config(reference=tiny("gpt2", max_length=16)), rewards=[length])


def test_another_reference_is_what_the_kl_is_measured_against(config, length, tmp_path):
    other = tmp_path / "参考"
    make_tiny_model("gpt2", other, hidden_size=32, num_layers=2, max_length=128, seed=5)
    own, theirs = (
        train_grpo(config(GRPOConfig, reference=reference, steps=1, output=tmp_path / name), rewards=[length])
        for name, reference in (("own", None), ("theirs", str(other)))
    )
    assert own["first_evaluation"]["eval/kl"] == pytest.approx(0, abs=1e-5)
    assert abs(theirs["first_evaluation"]["eval/kl"]) > 1e-3


def test_the_sampler_takes_so_many_rows_at_a_time(config, length, monkeypatch):
    """rollout_micro_batch_size bounds the rows in the key-value cache."""
    rows = []
    right = generate.decode

    def counted(policy, prompts, *arguments, **options):
        rows.append(min(len(prompts), options["at_a_time"]))
        return right(policy, prompts, *arguments, **options)

    monkeypatch.setattr(generate, "decode", counted)
    train_ppo(config(rollout_micro_batch_size=3, steps=1), rewards=[length])
    assert max(rows) == 3


@pytest.mark.parametrize(("tokens", "most"), [(None, 3), (40, 2)])
def test_as_many_rows_are_read_without_gradients_as_are_sampled(config, length, monkeypatch, tokens, most):
    """micro_batch_size bounds what is learned from at a time, whose activations are all kept; tokens bound both."""
    rows = {True: [], False: []}
    right = Policy.forward

    def counted(policy, ids, *arguments, **options):
        rows[torch.is_grad_enabled()].append(len(ids))
        assert tokens is None or ids.numel() <= tokens
        return right(policy, ids, *arguments, **options)

    monkeypatch.setattr(Policy, "forward", counted)
    limits = {"rollout_micro_batch_size": 3, "micro_batch_size": 1, "micro_batch_tokens": tokens, "max_new_tokens": 8}
    train_ppo(config(steps=1, **limits), rewards=[length])
    assert (max(rows[False]), max(rows[True])) == (most, 1)


def test_rewards_of_all_kinds_are_written_down(config, length, tmp_path):
    """String rewards handed in go into the config, so that it repeats the run; functions are named in the summary."""
    summary = train_ppo(config(steps=1, rewards=("rule:digits",)), rewards=["rule:digits", length])
    assert summary["rewards"] == ["rule:digits", "rule:digits#2", "length"]
    written = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert written.count("- rule:digits") == 2


def test_constant_returns_have_no_explained_variance(config, numbers, tmp_path):
    train_ppo(config(steps=1, kl_coef=0.0), rewards=[lambda completions: [0.0] * len(completions)])
    assert all("value/explained_variance" not in line for line in numbers(tmp_path / "run"))


def test_groups_of_equal_scores_teach_nothing(config, numbers, capsys):
    """Advantages are exactly 0, numbers finite, and without a penalty the weights stay bit for bit. It is said once."""
    settings = config(GRPOConfig, kl_coef=0.0, learning_rate=1e-2, steps=3)
    train_grpo(settings, rewards=[lambda completions, **_: [1.0] * len(completions)])
    lines = numbers(settings.output)
    assert [line["reward/tied_frac"] for line in lines if "reward/tied_frac" in line] == [1.0, 1.0, 1.0]
    before, after = (load_causal_lm(str(f)).state_dict() for f in (settings.model, settings.output / "final"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert capsys.readouterr().err.count("all responses to each prompt scored equally") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_prompt": 1}, "--samples-per-prompt is 1, but responses are compared .* at least 2"),
        (
            {"importance_level": "sequence", "loss_reduction": "token", "kl_coef": 0.0},
            "--loss-reduction token averages tokens",
        ),
        (
            {"kl_in": "reward"},
            "--kl-in reward does not go with --advantage grpo.*--advantage dr_grpo, or --advantage rloo",
        ),
        ({"clip_range_high": 0.0}, "--clip-range-high must be greater than 0"),
        ({"rollout_batch_size": 9, "minibatch_size": 3}, "--rollout-batch-size 9 is not a multiple of --samples-per"),
    ],
)
def test_settings_that_make_no_sense_are_named(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(GRPOConfig, **changes)


def test_everything_at_once(config, length, demonstrations, tmp_path):
    """Options that are independent of each other work together: a run with nearly all of them is finite throughout."""
    settings = config(
        importance_level="sequence",
        critic="separate",
        clip_range_high=0.3,
        dual_clip=3.0,
        kl_in="loss",
        kl_kind="k3",
        kl_target=3.0,
        approx_kl_limit=1.0,
        critic_warmup_steps=1,
        ptx_data=demonstrations,
        ptx_coef=0.5,
        ema_decay=0.9,
        missing_eos_penalty=1.0,
        score_norm_samples=8,
        whiten_rewards=True,
        entropy_coef=0.01,
        minibatch_size=4,
        steps=3,
    )
    summary = train_ppo(settings, rewards=[length])
    expected = {"loss/kl", "loss/ptx", "loss/policy", "loss/value", "policy/update_frac", "reference/kl_coef"}
    assert expected <= set(summary["last_step"])
    assert all(abs(value) < 1e6 for value in summary["last_step"].values())
    again = tmp_path / "再来"
    assert train_ppo(replace(settings, output=again), rewards=[length])["steps"] == 3
    models = [(run / "final" / "model.safetensors").read_bytes() for run in (settings.output, again)]
    assert models[0] == models[1], "the same seed, the same run"
