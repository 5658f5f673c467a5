"""Whole runs of the online engine: they repeat bit for bit, write down what they did, and refuse what cannot work."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import often
from heedful import A2CConfig, ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, RewardError, train_grpo, train_ppo
from heedful.algorithms.online.start import start
from heedful.devices import CAPABILITIES
from heedful.engines import generate
from heedful.models import Policy, RewardModel
from heedful.training import memory_preflight
from jsonl import read_jsonl, timeless
from trainers import TRAIN

NEARLY_ALL = {
    "importance_level": "sequence", "critic": "separate", "clip_range_high": 0.3, "dual_clip": 3.0, "kl_in": "loss",
    "kl_kind": "k3", "kl_target": 3.0, "approx_kl_limit": 1.0, "critic_warmup_steps": 1, "ptx_coef": 0.5,
    "ema_decay": 0.9, "missing_eos_penalty": 1.0, "score_norm_samples": 8, "whiten_rewards": True,
    "entropy_coef": 0.01, "minibatch_size": 4, "ppo_epochs": 2,
}  # fmt: skip
"""Options that are independent of each other."""
SAME_SEED = {
    "everything at once": (PPOConfig, NEARLY_ALL),
    "shared": (PPOConfig, {}),
    "separate": (PPOConfig, {"critic": "separate"}),
    "grpo": (GRPOConfig, {}),
    "a2c": (A2CConfig, {}),
    "online-dpo": (OnlineDPOConfig, {}),
}


@pytest.mark.parametrize("name", often(SAME_SEED, ["everything at once"]))
def test_same_seed_same_run_bit_for_bit(config, length, numbers, demonstrations, tmp_path, name):
    kind, changes = SAME_SEED[name]
    ptx = {"ptx_data": demonstrations} if "ptx_coef" in changes else {}
    for run, seed in (("a", 1), ("b", 1), ("c", 2)):
        settings = config(kind, output=tmp_path / run, seed=seed, learning_rate=1e-3, **changes, **ptx)
        summary = TRAIN[kind](settings, rewards=[length])
    a, b, c = (tmp_path / run for run in "abc")
    weights = [(run / "final" / "model.safetensors").read_bytes() for run in (a, b, c)]
    assert weights[0] == weights[1] != weights[2]
    assert numbers(a) == numbers(b) != numbers(c)
    algorithm = "ppo" if kind is PPOConfig else name
    assert summary["algorithm"] == algorithm
    assert json.loads((a / "environment.json").read_text(encoding="utf-8"))["command"] == f"heedful {algorithm}"
    assert all(abs(value) < 1e6 for value in timeless(summary["last_step"]).values())
    assert all(value >= 0 for name, value in summary["last_step"].items() if name.startswith(("time/", "perf/")))
    if changes is NEARLY_ALL:
        expected = {"loss/kl", "loss/ptx", "loss/policy", "loss/value", "policy/update_frac", "reference/kl_coef"}
        assert expected <= set(summary["last_step"])


def test_adaptive_kl_moves_the_coefficient_towards_the_target(config, length, numbers, tmp_path):
    """Below the target the coefficient falls by n/horizon * 0.2 a step at most: KL starts at 0, so exactly that at first."""
    settings = config(kl_target=6.0, kl_horizon=40, kl_coef=0.1, eval_fraction=0.0)
    train_ppo(settings, rewards=[length])
    coefs = [line["reference/kl_coef"] for line in numbers(tmp_path / "run")]
    assert coefs == [0.1, pytest.approx(0.1 * (1 - 0.2 * 8 / 40))]


def test_what_no_run_can_begin_with_is_refused_before_anything_is_written(config, tiny, length, tmp_path):
    """No reward, scores that cannot be normalised, a reference or critic of another vocabulary (KL between unrelated ids
    would be a number all the same), or one that reads too little."""
    with pytest.raises(ConfigError, match="--rewards is missing"):
        train_ppo(config())
    with pytest.raises(RewardError, match="scores cannot be normalised"):
        train_ppo(config(score_norm_samples=6), rewards=[lambda completions: [1.0] * len(completions)])
    with pytest.raises(ConfigError, match=r"--reference .* reads 16 tokens, but prompts and responses need"):
        train_ppo(config(reference=tiny("gpt2", max_length=16)), rewards=[length])
    with pytest.raises(ConfigError, match=r"--kl-in reward does not go with --advantage grpo.*dr_grpo, or .* rloo"):
        config(GRPOConfig, kl_in="reward")
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


def test_columns_reach_the_reward_and_samples_are_written(config, prompts, tmp_path):
    """Each prompt's own column arrives with its responses, repeated for every sample of it."""
    seen = []

    def reward(prompts, completions, number):
        seen.extend(zip(prompts, number, strict=True))
        return [0.1 * len(c) for c in completions]

    summary = train_ppo(config(sample_every=1, steps=1), rewards=[reward])
    known = [(row["prompt"], row["number"]) for row in read_jsonl(Path(prompts))]
    assert set() < set(seen) <= set(known)
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert samples[0].keys() == {"step", "prompt", "response", "score", "kl"}
    assert len({s["prompt"] for s in samples}) == len(samples) == 4
    assert summary["first_evaluation"]["eval/kl"] == pytest.approx(0, abs=1e-5)


def test_another_reference_is_what_the_kl_is_measured_against(config, length, another):
    settings = config(GRPOConfig, reference=another, steps=1)
    assert abs(train_grpo(settings, rewards=[length])["first_evaluation"]["eval/kl"]) > 1e-3


@pytest.mark.parametrize("kind", often([PPOConfig, GRPOConfig], [PPOConfig]))
def test_without_a_price_on_kl_there_is_none(config, numbers, kind):
    """None is made up in the table of samples, in metrics or at evaluations. Nor is what returns of 0 do not say."""
    settings = config(kind, kl_coef=0.0, num_samples=1, sample_every=1, eval_every=1, steps=1)
    summary = train_ppo(settings, rewards=[lambda completions: [0.0] * len(completions)])
    assert "eval/kl" not in summary["last_evaluation"]
    made_up = {"reference/kl", "reference/kl_coef", "value/explained_variance"}
    assert all(not made_up & line.keys() for line in numbers(settings.output))
    rows = read_jsonl(settings.output / "samples.jsonl")
    assert rows
    assert all("kl" not in row for row in rows)


@pytest.mark.parametrize(("tokens", "most"), [(None, 3), (40, 2)])
def test_as_many_rows_are_read_without_gradients_as_are_sampled(config, reward_model, monkeypatch, tokens, most):
    """micro_batch_size bounds what is learned from at a time, whose activations are all kept; rollout_micro_batch_size the
    rows in the key-value cache, and those that a reward model reads; tokens bound all but the cache."""
    rows = {True: [], False: [], "sampled": [], "scored": []}
    forward, decode, read = Policy.forward, generate.decode, RewardModel.forward

    def counted(policy, ids, *arguments, **options):
        rows[torch.is_grad_enabled()].append(len(ids))
        assert tokens is None or ids.numel() <= tokens
        return forward(policy, ids, *arguments, **options)

    def sampled(policy, prompts, *arguments, **options):
        rows["sampled"].append(min(len(prompts), options["at_a_time"]))
        return decode(policy, prompts, *arguments, **options)

    monkeypatch.setattr(Policy, "forward", counted)
    monkeypatch.setattr(generate, "decode", sampled)
    monkeypatch.setattr(RewardModel, "forward", lambda model, own: rows["scored"].append(len(own)) or read(model, own))
    limits = {"rollout_micro_batch_size": 3, "micro_batch_size": 1, "micro_batch_tokens": tokens, "max_new_tokens": 8}
    train_ppo(config(steps=1, rewards=(reward_model,), **limits))
    assert (max(rows[False]), max(rows[True]), max(rows["scored"])) == (most, 1, most)
    assert max(rows["sampled"]) == 3


@pytest.mark.parametrize(("free", "has_room"), [(80e9, True), (0.0, False)])
def test_a_run_on_a_device_with_graphs_samples_with_them_if_there_is_room(config, length, monkeypatch, free, has_room):
    """On a CPU that claims to have graphs: one is tried as soon as the run samples, and given up with a warning."""
    monkeypatch.setitem(CAPABILITIES, "cpu", replace(CAPABILITIES["cpu"], graphs=True))
    monkeypatch.setattr(memory_preflight, "free_memory", lambda _: free)
    monkeypatch.setattr(memory_preflight, "planned_as", lambda _: "cuda")
    tried = (
        pytest.warns(UserWarning, match="cannot be captured as a CUDA graph") if has_room else contextlib.nullcontext()
    )
    with tried:
        start(config(memory_check=False), [length])
