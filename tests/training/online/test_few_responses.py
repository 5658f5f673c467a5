"""Alarms on healthy runs of one response, one prompt, one token or one step: one value says nothing."""

import math

import pytest

from cases import often
from heedful import GRPOConfig, PPOConfig, make_tiny_model, train_ppo
from heedful.configs.online import ALARM_NAMES
from heedful.training.alarm_rules import Limits
from heedful.training.alarms import Alarms
from jsonl import read_metrics

ONE = {"rollout_batch_size": 1, "samples_per_prompt": 1, "minibatch_size": 1, "micro_batch_size": 1}
RUNS = {
    "one response": (PPOConfig, ONE),
    "one response, no critic": (PPOConfig, {**ONE, "advantage": "reinforce++", "whiten_advantages": False}),
    "one prompt": (GRPOConfig, {"rollout_batch_size": 2, "samples_per_prompt": 2, "minibatch_size": 2}),
    "one token": (PPOConfig, {"max_new_tokens": 1}),
    "one token of one response": (PPOConfig, {**ONE, "max_new_tokens": 1}),
    "one step of one response": (PPOConfig, {**ONE, "steps": 1}),
}


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A model that soon samples its end token, so that responses are short but differ."""
    folder = tmp_path_factory.mktemp("少") / "model"
    make_tiny_model("gpt2", folder, hidden_size=16, num_layers=1, max_length=64)
    return str(folder)


def bytes_modulo(completion_ids, **_):
    """A score that differs from one response to the next."""
    return [sum(ids) % 13 / 6 for ids in completion_ids]


@pytest.mark.parametrize("name", often(RUNS, ["one response, no critic", "one prompt", "one step of one response"]))
def test_a_healthy_run_of_one_value_a_step_has_no_alarm(config, untrained, name):
    kind, changes = RUNS[name]
    usual = {"steps": 24, "eval_fraction": 0.0, "max_new_tokens": 6, "learning_rate": 1e-2, "max_kl": 50.0}
    stops = tuple(alarm for alarm in ALARM_NAMES if alarm != "judge-falling")
    if "max_new_tokens" not in changes:  # an untrained model's responses seldom end within six tokens
        changes = {**changes, "response_length": "fixed"}
    done = train_ppo(config(kind, **{"model": untrained, **usual, "stop_on": stops, **changes}), rewards=[bytes_modulo])
    assert done["alarms"] == []
    assert not (done.folder / "alarms.jsonl").exists()
    for line in read_metrics(done.folder):
        assert ("reward/score_std" in line) == ("response" not in name)
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        assert not ("critic" in name and any(metric.startswith(("value/", "loss/value")) for metric in line))


@pytest.mark.parametrize(
    ("limits", "metrics"),
    [
        (Limits(responses=1, max_new_tokens=6), {"rollout/eos_frac": [1.0] * 9 + [0.0]}),
        (Limits(responses=1, max_new_tokens=6), {"rollout/eos_frac": [1.0] * 3 + [0.0] * 3}),
        (Limits(responses=1), {"rollout/response_length": [4.0] * 3 + [40.0] * 5 + [4.0] * 5}),
        (Limits(responses=1), {"rollout/repeated_frac": [0.0] * 3 + [0.9] * 5}),
        (Limits(responses=1), {"policy/entropy": [2.0] * 3 + [0.0] * 5}),
        (Limits(responses=1, max_kl=1.0), {"reference/kl": [0.0] * 3 + [5.0] * 3}),
        (Limits(responses=1), {"rollout/sampler_mismatch": [0.0] + [0.01] * 3}),
        (Limits(responses=1), {"value/explained_variance": [-70.0] * 60, "reward/score_mean": [1.0, 2.0] * 30}),
        (Limits(responses=1), {"value/explained_variance": [0.0] * 60}),
        (Limits(responses=1), {"reward/score_mean": [0.1] * 12 + [2.0] + [0.1] * 12}),
        (Limits(responses=1), {"rollout/masked_frac": [0.0] * 9 + [1.0]}),
        (Limits(responses=1), {"importance/weight_mean": [1.0] * 8 + [0.01] * 2}),
        (Limits(groups=1), {"reward/tied_frac": [0.0] * 3 + [1.0] * 3}),
        (Limits(responses=2), {"reward/score_std": [1.0] * 3 + [0.0] * 3, "reward/score_mean": [1.0, 0.0] * 3}),
    ],
)
def test_what_a_few_single_responses_happen_to_be_is_no_alarm(limits, metrics):
    alarms = Alarms(limits)
    for step, values in enumerate(zip(*metrics.values(), strict=True), start=1):
        alarms.see(step, dict(zip(metrics, values, strict=True)))
    assert alarms.raised == []


def test_what_lasts_is_an_alarm_of_single_responses_too():
    alarms = Alarms(Limits(responses=1, max_new_tokens=6))
    for step in range(1, 81):
        alarms.see(step, {"rollout/eos_frac": float(step <= 40), "reward/score_mean": 0.01 if step < 60 else 5.0})
    said = {one.alarm: one for one in alarms.raised}
    assert set(said) == {"responses-cut", "end-token-lost", "scores-jump"}
    assert "0% of the responses end by themselves; in the first 24 steps it was 100%" in said["end-token-lost"].message
    assert said["responses-cut"].step == 42, "two of the last eight"


@pytest.mark.parametrize(("held_out", "speaks"), [(1, False), (2, True)])
def test_a_judge_of_one_answer_says_nothing(held_out, speaks):
    alarms = Alarms(Limits(held_out=held_out))
    for step, judge in enumerate([1.0, 2.0, 1.9, 1.8, 1.7]):
        alarms.see_evaluation(step, {"eval/judge_mean": judge, "eval/score_mean": float(step)})
    assert [one.alarm for one in alarms.raised] == ["judge-falling"] * speaks
