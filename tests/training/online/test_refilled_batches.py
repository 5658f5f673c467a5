"""What dynamic sampling puts together from several rounds: bounds, means, shares, notes and counts are those of all of it."""

import math

import pytest

from heedful import GRPOConfig, Reward, train_grpo
from heedful.algorithms.online.rollout import refill_ties, sample_and_score
from heedful.algorithms.online.start import start
from heedful.rewards.results import Measured, Share
from jsonl import read_metrics

SIZES = {"samples_per_prompt": 4, "rollout_batch_size": 12, "minibatch_size": 12, "max_new_tokens": 6}
SIZES |= {"eval_fraction": 0.0, "dynamic_sampling_rounds": 1}


class ByCall(Measured):
    """A reward that gives what is named for each of its calls, from 0; the first two are the trial of the rewards."""

    __name__ = "by_call"

    def __init__(self, *calls, measured=()):
        super().__init__()
        self.calls, self.of_calls, self.count = calls, measured, -1

    def __call__(self, completions):
        self.count += 1
        if self.count == 0:
            return [1.0] * len(completions)
        self.measured = dict(self.of_calls[self.count - 1]) if self.of_calls else {}
        pattern = self.calls[self.count - 1]
        return [pattern[i % len(pattern)] for i in range(len(completions))]


TIED, DIFFERENT = (1.0,), (0.0, 1.0, 2.0, 3.0)
HALF_FAILED = (math.nan, math.nan, 2.0, 3.0)


def one_step(config, *rewards, **changes):
    """The learner of a run, and what its first step draws."""
    learner = start(config(GRPOConfig, **SIZES | changes), list(rewards)).learner
    return learner, refill_ties(learner, sample_and_score(learner, next(learner.prompts)))


def test_a_group_with_a_response_that_failed_takes_no_place(config):
    """And gives up its own, however few of the batch may fail; the other groups of its round are taken."""
    mixed = (*HALF_FAILED, *DIFFERENT, *DIFFERENT)
    _, drawn = one_step(config, ByCall(TIED, mixed), max_failed_rewards=0.9)
    assert drawn.metrics["rollout/refilled_frac"] == pytest.approx(2 / 3)
    assert drawn.reward_scores.failed == ()
    _, drawn = one_step(config, ByCall(mixed, DIFFERENT), max_failed_rewards=0.9)
    assert drawn.metrics["rollout/refilled_frac"] == pytest.approx(1 / 3)
    assert drawn.reward_scores.failed == ()
    _, drawn = one_step(config, ByCall(mixed, HALF_FAILED), max_failed_rewards=0.9)
    assert drawn.metrics["rollout/unfilled_frac"] == pytest.approx(1 / 3)
    assert drawn.reward_scores.failed == (0, 1)


def test_what_rounds_cost_is_counted_though_they_filled_no_place(config, capsys):
    """Their requests are in the step's metrics, and a failure of theirs is said."""
    fails = (math.nan, 1.0, 1.0, 1.0)
    requests = [{"judge/requests": 3.0}, {"judge/requests": 5.0}]
    reward = ByCall(TIED, fails, measured=requests)
    settings = config(GRPOConfig, **SIZES | {"steps": 1, "max_failed_rewards": 0.5})
    train_grpo(settings, [reward])
    (metrics,) = read_metrics(settings.output)
    assert metrics["rollout/refilled_frac"] == 0
    assert metrics["judge/requests"] == 8.0
    assert (
        capsys.readouterr().err.count("3 of 12 responses have no score and are left out; reward by_call returned nan")
        == 1
    )


def test_what_was_said_in_each_round_is_said(config):
    """The first batch fails in one way, the round in another, and both are told."""

    def ways(completions):
        ways.count += 1
        if ways.count == 0:
            return [1.0] * len(completions)
        return [
            (math.nan if ways.count == 1 else None),
            *(1.0 + ways.count * (i % 2) for i in range(1, len(completions))),
        ]

    ways.count = -1
    learner = start(config(GRPOConfig, **SIZES | {"score_clip": 1.0}), [ways]).learner
    note = refill_ties(learner, sample_and_score(learner, next(learner.prompts))).reward_scores.note
    assert "returned nan" in note
    assert "in place of ties: " in note
    assert "no reward applies" in note.partition("in place of ties: ")[2]


def test_means_are_over_the_responses_that_a_reward_applies_to(config):
    """10 for one response in the first batch, 0 for eleven and then for twelve: 10 over 13, not the mean of two means."""
    first = (10.0, *[None] * 11)

    def all_one(completions):
        return [1.0] * len(completions)

    _, drawn = one_step(config, Reward("some", ByCall(first, (0.0,)), weight=0.0), Reward("every", all_one))
    assert drawn.reward_scores.means == {"some": pytest.approx(10 / 13), "every": 1.0}


def test_shares_are_of_all_that_they_are_of(config):
    """0 of 64 and 2 of 2 are 2 of 66; counts are summed, of times the slowest is kept."""
    measured = [
        {"judge/unusable_frac": Share(0, 64), "judge/requests": 64.0, "time/judge_slowest": 2.0},
        {"judge/unusable_frac": Share(2, 2), "judge/requests": 2.0, "time/judge_slowest": 1.0},
    ]
    for second in (TIED, DIFFERENT):
        _, drawn = one_step(config, ByCall(TIED, second, measured=measured))
        assert drawn.reward_scores.measured == {
            "judge/unusable_frac": 2 / 66,
            "judge/requests": 66.0,
            "time/judge_slowest": 2.0,
        }


def test_the_speed_of_sampling_is_that_of_all_that_was_sampled(config):
    """Three rounds that are dropped, and responses that are cut and so not learned from, are sampled all the same."""
    settings = config(
        GRPOConfig, **SIZES | {"steps": 1, "dynamic_sampling_rounds": 3, "mask_truncated": True, "max_new_tokens": 1}
    )
    train_grpo(settings, [lambda completions: [1.0] * len(completions)])
    (metrics,) = read_metrics(settings.output)
    tokens = metrics["perf/rollout_tokens_per_second"] * metrics["time/rollout"]
    assert tokens == pytest.approx(48)
    learned = metrics["perf/update_tokens_per_second"] * metrics["time/update"]
    assert learned == pytest.approx(12 * (1 - metrics["rollout/masked_frac"]))
