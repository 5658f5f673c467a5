"""What ends an online run or is said about it: KL beyond a limit, scores that jump. And what a state must have."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from cases import often
from heedful import (
    CheckpointError,
    ConfigError,
    GRPOConfig,
    OnlineDPOConfig,
    PPOConfig,
    TrainingError,
    make_tiny_model,
    train_ppo,
)
from heedful.algorithms.online.health import JUMP, KL_STEPS, SETTLED, STILL, STILL_STEPS, Health
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.algorithms.ppo import learn, make_experience
from jsonl import read_metrics
from trainers import ONLINE


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A policy and a reference that are far from each other."""
    root = tmp_path_factory.mktemp("远")
    for name, seed in (("policy", 0), ("reference", 1)):
        make_tiny_model(
            "gpt2", root / name, hidden_size=16, num_layers=1, max_length=64, initializer_range=0.5, seed=seed
        )
    return {name: str(root / name) for name in ("policy", "reference")}


@pytest.mark.parametrize("kind", often(ONLINE, [PPOConfig, OnlineDPOConfig]))
def test_a_policy_that_left_its_reference_behind_ends_the_run(config, apart, length, kind, capsys):
    """After the third step in a row, which is logged; with status 4, and what was learned is kept."""
    far = {"model": apart["policy"], "reference": apart["reference"], "eval_fraction": 0.0, "steps": 6}
    settings = config(kind, **far, max_kl=1.0, learning_rate=1e-6)
    with pytest.raises(
        TrainingError, match=r"reference/kl, .* at step 3, has been above --max-kl 1 in 3 steps"
    ) as caught:
        ONLINE[kind](settings, rewards=[length])
    assert caught.value.status == 4
    lines = read_metrics(settings.output)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert min(line["reference/kl"] for line in lines) > 1
    assert (settings.output / "checkpoints" / "step-000003").is_dir()
    above = max(line["reference/kl"] for line in lines) * 2
    quiet = config(kind, **far, max_kl=above, learning_rate=1e-6, output=settings.output.with_name("quiet"))
    assert ONLINE[kind](quiet, rewards=[length])["steps"] == 6


def metrics(kl=0.0, mean=1.0, std=0.0):
    return {"reference/kl": kl, "reward/score_mean": mean, "reward/score_std": std}


def test_one_high_estimate_is_noise_and_the_count_is_part_of_the_state():
    health = Health()
    for step, kl in enumerate([9.0, 9.0, 1.0, 9.0, 9.0], start=1):
        health.watch(step, metrics(kl), max_kl=5.0)
    again = Health()
    again.load_state_dict(json.loads(json.dumps(health.state_dict())))
    with pytest.raises(TrainingError, match="at step 6"):
        again.watch(6, metrics(9.0), max_kl=5.0)
    free = Health()
    for step in range(1, 2 * KL_STEPS):
        free.watch(step, metrics(1e9), max_kl=None)


def test_a_step_that_measured_no_kl_does_not_end_the_row():
    """Its only update was left out, say. Nor does it count; NaN is no measurement either."""
    health = Health()
    nothing = {"reward/score_mean": 1.0, "reward/score_std": 0.0}
    for step, seen in enumerate([metrics(9.0), nothing, metrics(9.0), metrics(math.nan), nothing], start=1):
        health.watch(step, seen, max_kl=5.0)
    with pytest.raises(TrainingError, match="at step 6"):
        health.watch(6, metrics(9.0), max_kl=5.0)
    health.watch(7, nothing, max_kl=5.0)
    health.watch(8, metrics(1.0), max_kl=5.0)
    assert health.kl_above == 0


def test_a_limit_of_what_is_not_measured_is_refused(config):
    with pytest.raises(ConfigError, match=r"--max-kl 5\.0 limits the KL to the reference, which is not measured"):
        config(kl_coef=0.0, max_kl=5.0)


def test_scores_that_jump_are_told(capsys):
    """Ten times the largest root mean square so far, once the first steps are over; what only grows is not."""
    health = Health()
    for step in range(1, SETTLED + 1):
        health.watch(step, metrics(mean=0.0, std=2.0 * step), max_kl=None)
    largest = 2.0 * SETTLED
    health.watch(SETTLED + 1, metrics(mean=0.6 * JUMP * largest, std=0.79 * JUMP * largest), max_kl=None)
    assert capsys.readouterr().err == "", "the root mean square is just below ten times"
    health = Health(largest_scores=largest)
    health.watch(SETTLED, metrics(mean=-JUMP * largest * 1.1), max_kl=None)
    assert capsys.readouterr().err == "", "too early"
    health = Health(largest_scores=largest)
    health.watch(SETTLED + 1, metrics(mean=0.6 * JUMP * largest, std=0.81 * JUMP * largest), max_kl=None)
    assert f"step {SETTLED + 1}: the scores are 10.1 times as large as in any step before" in capsys.readouterr().err
    health.watch(SETTLED + 2, metrics(mean=JUMP * largest), max_kl=None)
    assert capsys.readouterr().err == "", "told once"
    nothing_yet = Health()
    nothing_yet.watch(SETTLED + 1, metrics(mean=0.0), max_kl=None)
    nothing_yet.watch(SETTLED + 2, metrics(mean=1.0), max_kl=None)
    assert capsys.readouterr().err == "", "the first success of a sparse reward"


def test_a_run_tells_of_scores_that_jump(config, capsys):
    calls = []

    def drifts(completions):
        calls.append(1)
        return [1e8 * len(c) if len(calls) == 8 else float(len(c)) for c in completions]

    train_ppo(config(eval_fraction=0.0, steps=8), rewards=[drifts])
    said = capsys.readouterr().err
    assert said.count("times as large as in any step before") == 1
    assert "step 7: the scores are" in said


@pytest.mark.parametrize("kind", [GRPOConfig, OnlineDPOConfig])
def test_a_run_whose_policy_has_hardly_moved_says_which_setting_to_raise(config, length, kind, capsys):
    quiet = config(kind, eval_fraction=0.0, steps=STILL_STEPS, learning_rate=1e-9)
    ONLINE[kind](quiet, rewards=[length])
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the policy has hardly moved, so it has learned next to nothing") == 1
    assert "Raise --learning-rate (it was 1e-09; try 1e-08) or --steps" in said


def test_responses_that_are_cut_are_reported_once_with_their_share(capsys):
    health = Health()
    for step, ended in enumerate([1.0, 0.95, 0.7, 0.2], start=1):
        health.watch(step, metrics() | {"rollout/eos_frac": ended}, max_kl=None, longest=64)
        again = Health()
        again.load_state_dict(json.loads(json.dumps(health.state_dict())))
        health = again
    said = capsys.readouterr().err
    assert "step 3: 30% of the responses were cut at --max-new-tokens 64, before their end" in " ".join(said.split())
    assert said.count("were cut") == 1


@pytest.mark.parametrize(("response_length", "times"), [("stop", 1), ("fixed", 0)])
def test_a_run_reports_responses_that_are_cut(config, capsys, length, response_length, times):
    train_ppo(config(eval_fraction=0.0, steps=2, response_length=response_length), rewards=[length])
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("of the responses were cut at --max-new-tokens") == times


def test_a_policy_that_moves_or_ran_for_few_steps_is_not_said_to_be_still(capsys):
    moved, few = Health(), Health()
    for step in range(1, 2 * STILL_STEPS):
        moved.watch(step, metrics(0.0 if step <= STILL_STEPS else 2.1 * STILL), max_kl=None)
        again = Health()
        again.load_state_dict(json.loads(json.dumps(moved.state_dict())))
        moved = again
        if step < STILL_STEPS:
            few.watch(step, metrics(0.0), max_kl=None)
    moved.tell_end(1e-6)
    few.tell_end(1e-6)
    Health().tell_end(1e-6)
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------------------------------- records and the state


def test_a_minibatch_that_is_discarded_uses_up_no_records(config, demonstrations, length):
    """Those of --ptx-data come in their order, each learned from: with approx_kl_limit reached at the second minibatch."""
    ptx = {"ptx_data": demonstrations, "ptx_coef": 0.5, "minibatch_size": 4, "eval_fraction": 0.0}
    settings = config(learning_rate=0.1, ppo_epochs=4, **ptx)
    found = {}
    for limit in (None, 1e-9):
        learner = start(replace(settings, approx_kl_limit=limit), [length]).learner
        done = learn(learner, make_experience(learner, rollout(learner, next(learner.prompts)))).metrics
        state = learner.ptx.order.state_dict()
        found[limit] = 5 * state["epoch"] + state["cursor"]
        made = 8 * done.get("policy/update_frac", 1)
        assert found[limit] == 4 * made, "four records for each update that was made"
    assert found[1e-9] == 4
    assert found[None] == 32


PARTS = {
    "critic": {"critic": "separate"},
    "average": {"ema_decay": 0.5},
    "ptx": {"ptx_coef": 0.5},
}


@pytest.mark.parametrize("name", PARTS)
def test_a_state_with_another_set_of_parts_is_refused_and_nothing_is_loaded(config, demonstrations, length, name):
    ptx = {"ptx_data": demonstrations, "minibatch_size": 4} if name == "ptx" else {}
    learners = [
        start(config(eval_fraction=0.0, seed=seed, **changes), [length]).learner
        for seed, changes in ((0, PARTS[name] | ptx), (1, {}))
    ]
    for one, other, has in ((*learners, "the saved state"), (*reversed(learners), "this run")):
        state = copy.deepcopy(one.state_dict())
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(CheckpointError, match=rf"{has} has a {name} \(--.* resume with the same settings"):
            other.load_state_dict(state)
        after = other.state_dict()
        assert torch.equal(after["random"]["generator"], before["random"]["generator"])
        assert all(torch.equal(after["policy"][key], before["policy"][key]) for key in before["policy"])
