"""Groups whose scores all tie get other prompts, in bounds; what could not be replaced is counted and said once."""

import inspect
import math

import pytest
import torch

from cases import often
from heedful import ConfigError, GRPOConfig, PPOConfig, Reward, RewardError, train_grpo
from heedful.algorithms.online.rollout import refill_ties, sample_and_score
from heedful.algorithms.online.start import start
from heedful.rewards.results import Measured, Share
from jsonl import read_metrics

ROUNDS = {"dynamic_sampling_rounds": 3, "eval_fraction": 0.0, "samples_per_prompt": 4, "rollout_batch_size": 12}
ROUNDS |= {"minibatch_size": 12, "max_new_tokens": 6}


def only_for(*numbers):
    """A reward that tells responses apart only for prompts with these numbers (`prompts` has ten)."""

    def reward(completion_ids, number):
        return [float(sum(ids) % 13) if n in numbers else 1.0 for ids, n in zip(completion_ids, number, strict=True)]

    return reward


def numbers_of(drawn):
    return [completion.prompt.columns["number"] for completion in drawn.completions]


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


@pytest.fixture
def begin(config):
    """``begin(*rewards, **changes)``: a learner of GRPO on ten prompts, three of which make a batch."""
    return lambda *rewards, **changes: start(config(GRPOConfig, **(ROUNDS | changes)), list(rewards)).learner


def first_batch(learner):
    """What its first step draws."""
    return refill_ties(learner, sample_and_score(learner, next(learner.prompts)))


def test_tied_groups_are_replaced_and_the_others_stay(begin):
    """In their places; the responses to prompts that stay are those that would have been sampled without."""
    reward = only_for(0, 1, 2, 3, 4, 5)
    plain = begin(reward, dynamic_sampling_rounds=0)
    learner = begin(reward, dynamic_sampling_rounds=30)
    seen = 0
    for _ in range(3):
        state = learner.state_dict()
        plain.load_state_dict(state)
        prompts = next(learner.prompts)
        first = sample_and_score(plain, next(plain.prompts))
        drawn = refill_ties(learner, sample_and_score(learner, prompts))
        tied = [n for n in numbers_of(first)[::4] if n > 5]
        if not tied:
            continue
        seen += 1
        assert all(n <= 5 for n in numbers_of(drawn))
        assert [len(set(drawn.reward_scores.totals[i : i + 4])) > 1 for i in (0, 4, 8)] == [True] * 3
        for row in range(12):
            if numbers_of(first)[row] <= 5:
                assert drawn.completions[row] == first.completions[row]
                assert drawn.reward_scores.totals[row] == first.reward_scores.totals[row]
        assert drawn.metrics["rollout/refilled_frac"] == pytest.approx(len(tied) / 3)
        assert drawn.metrics["rollout/unfilled_frac"] == 0
        assert drawn.metrics["rollout/sampled_responses"] >= 12 + 4 * len(tied)
    assert seen >= 2


def test_a_batch_of_several_rounds_is_one_batch(begin):
    """Tensors, texts and scores of a row belong together, whatever round it is from."""
    learner = begin(only_for(2, 7), dynamic_sampling_rounds=30)
    drawn = first_batch(learner)
    rollouts, renderer = drawn.responses, learner.sampler.renderer
    assert set(numbers_of(drawn)) == {2, 7}
    assert rollouts.batch.response_mask.any(dim=0).all(), "no column is only padding"
    assert rollouts.batch.attention_mask.any(dim=0).all()
    responses = rollouts.own_ids()
    for row, completion in enumerate(drawn.completions):
        prompt = renderer.prompt_ids(completion.prompt.prompt)
        length = rollouts.batch.ids.shape[1] - rollouts.batch.response_mask.shape[1]
        inside = rollouts.batch.attention_mask[row, :length]
        assert rollouts.batch.ids[row, :length][inside].tolist() == prompt
        assert responses[row][: len(completion.ids)] == list(completion.ids)
        assert len(responses[row]) == len(completion.ids) + (not completion.truncated)
        assert int(rollouts.batch.response_mask[row].sum()) == int(rollouts.lengths[row])
        assert bool(rollouts.truncated[row]) == completion.truncated
        assert drawn.reward_scores.totals[row] == float(sum(completion.ids) % 13)
    forced = learner.policy(rollouts.batch.ids, rollouts.batch.attention_mask, rollouts.batch.response_mask)
    torch.testing.assert_close(rollouts.logprobs, forced.logprobs.detach(), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_refilled_is_bounded_counted_and_said_once(config, capsys):
    """Every score is 1: three rounds of three prompts, then the step goes on with what there is."""
    settings, reward = config(GRPOConfig, **ROUNDS, steps=2), ByCall(*[TIED] * 8)
    train_grpo(settings, rewards=[reward])
    assert reward.count == 8
    expected = {"rollout/unfilled_frac": 1.0, "rollout/refilled_frac": 0.0, "rollout/sampled_responses": 48.0}
    for line in read_metrics(settings.output):
        assert line.items() >= (expected | {"reward/tied_frac": 1.0}).items()
    assert capsys.readouterr().err.count("dynamic sampling could not replace all prompts") == 1


def test_shaped_scores_are_what_ties(begin):
    """Raw scores differ, clipped ones do not; and a penalty of length tells equal scores apart."""
    clipped = begin(lambda completions: [5.0 + len(c) for c in completions], score_clip=1.0)
    assert first_batch(clipped).metrics["rollout/unfilled_frac"] == 1
    penalised = begin(lambda completions: [1.0] * len(completions), overlong_buffer=6, dynamic_sampling_rounds=30)
    object.__setattr__(penalised.sampler, "stop_ids", tuple(range(0, 256, 6)))
    assert first_batch(penalised).metrics["rollout/unfilled_frac"] == 0


def test_a_reward_that_fails_on_new_prompts_costs_only_their_place(begin):
    """All of the first new responses fail, far more than may fail of a batch: the round is lost, the next one is not."""
    reward = ByCall(TIED, (math.nan,), DIFFERENT)
    learner = begin(reward)
    assert learner.rewards.max_failed == 0.1
    drawn = first_batch(learner)
    assert reward.count == 3
    assert drawn.reward_scores.failed == ()
    assert drawn.metrics["rollout/refilled_frac"] == 1


STAY = test_tied_groups_are_replaced_and_the_others_stay
BOUNDED = test_what_cannot_be_refilled_is_bounded_counted_and_said_once
FAILS = test_a_reward_that_fails_on_new_prompts_costs_only_their_place
MISTAKES = {
    "what ties takes a place": (STAY, "(_tied(learner, rounds[-1])) if not is_tied]", "(_tied(learner, rounds[-1]))]"),
    "what does not tie is replaced": (STAY, "enumerate(tied) if is_tied]", "enumerate(tied)]"),
    "another place is filled": (STAY, "place[at] = new", "place[at - 1] = new"),
    "a place stays open": (STAY, "open_places[len(found) :]", "open_places"),
    "one round more": (BOUNDED, "range(config.dynamic_sampling_rounds)", "range(config.dynamic_sampling_rounds + 1)"),
    "all places count as filled": (BOUNDED, "(len(places) - len(open_places))", "len(places)"),
    "the first round alone counts": (BOUNDED, "for part in rounds)),", "for part in rounds[:1])),"),
    "a failure ends the run": (FAILS, "take(len(open_places)), rewards)", "take(len(open_places)))"),
}
"""In `refill_ties`: the test that notices, a text, and what takes its place."""


OFTEN = ["what ties takes a place", "another place is filled", "one round more", "a failure ends the run"]


@pytest.mark.parametrize("name", often(MISTAKES, OFTEN))
def test_a_mistake_in_refilling_is_noticed(name, mistake, request):
    killer, old, new = MISTAKES[name]
    fixtures = {one: request.getfixturevalue(one) for one in inspect.signature(killer).parameters}
    mistake(refill_ties, old, new)
    with pytest.raises((AssertionError, RewardError)):
        killer(**fixtures)


def test_dense_scores_and_failed_rows_stay_with_their_responses(begin):
    """Only rows that failed are marked; dense numbers are one for each token."""

    def dense(completion_ids, number):
        return [
            None if n < 5 and sum(ids) % 11 == 0 else [float(i % 7) * (n < 5) for i in ids]
            for ids, n in zip(completion_ids, number, strict=True)
        ]

    learner = begin(dense, dynamic_sampling_rounds=30, max_failed_rewards=0.9)
    drawn = first_batch(learner)
    assert max(numbers_of(drawn)) < 5
    for row, completion in enumerate(drawn.completions):
        is_failed = sum(completion.ids) % 11 == 0
        assert (row in drawn.reward_scores.failed) == is_failed
        if not is_failed:
            assert drawn.reward_scores.tokens[row] == [float(i % 7) for i in completion.ids]


def test_it_is_refused_where_no_group_is_compared(config):
    for kind, changes in ((PPOConfig, {}), (GRPOConfig, {"advantage": "reinforce", "kl_coef": 0.0})):
        with pytest.raises(ConfigError, match=r"--dynamic-sampling-rounds 2 .* does not compare"):
            config(kind, dynamic_sampling_rounds=2, **changes)


def test_a_group_with_a_response_that_failed_takes_no_place(begin):
    """And gives up its own, however few of the batch may fail; the other groups of its round are taken."""
    mixed = (*HALF_FAILED, *DIFFERENT, *DIFFERENT)
    for first, second, refilled, unfilled, failed in (
        (TIED, mixed, 2 / 3, 1 / 3, ()),
        (mixed, DIFFERENT, 1 / 3, 0, ()),
        (mixed, HALF_FAILED, 0, 1 / 3, (0, 1)),
    ):
        drawn = first_batch(begin(ByCall(first, second), dynamic_sampling_rounds=1, max_failed_rewards=0.9))
        assert drawn.metrics["rollout/refilled_frac"] == pytest.approx(refilled)
        assert drawn.metrics["rollout/unfilled_frac"] == pytest.approx(unfilled)
        assert drawn.reward_scores.failed == failed


def test_what_rounds_cost_is_counted_though_they_filled_no_place(config, capsys):
    """Their requests are in the step's metrics, and a failure of theirs is said."""
    fails = (math.nan, 1.0, 1.0, 1.0)
    requests = [{"judge/requests": 3.0}, {"judge/requests": 5.0}]
    reward = ByCall(TIED, fails, measured=requests)
    settings = config(GRPOConfig, **ROUNDS | {"steps": 1, "max_failed_rewards": 0.5, "dynamic_sampling_rounds": 1})
    train_grpo(settings, [reward])
    (metrics,) = read_metrics(settings.output)
    assert metrics["rollout/refilled_frac"] == 0
    assert metrics["judge/requests"] == 8.0
    said = capsys.readouterr().err
    assert said.count("3 of 12 responses have no score and are left out; reward by_call returned nan") == 1


def test_what_was_said_in_each_round_is_said(begin):
    """The first batch fails in one way, the round in another, and both are told."""
    ways = ByCall((math.nan, *[1.0] * 11), (None, *[1.0, 3.0] * 5, 1.0))
    note = first_batch(begin(ways, dynamic_sampling_rounds=1)).reward_scores.note
    assert "returned nan" in note
    assert "no reward applies" in note.partition("in place of ties: ")[2]


def test_means_are_over_the_responses_that_a_reward_applies_to(begin):
    """10 for one response in the first batch, 0 for eleven and then for twelve: 10 over 13, not the mean of two means."""
    first = (10.0, *[None] * 11)

    def all_one(completions):
        return [1.0] * len(completions)

    rewards = Reward("some", ByCall(first, (0.0,)), weight=0.0), Reward("every", all_one)
    drawn = first_batch(begin(*rewards, dynamic_sampling_rounds=1))
    assert drawn.reward_scores.means == {"some": pytest.approx(10 / 13), "every": 1.0}


def test_shares_are_of_all_that_they_are_of(begin):
    """0 of 64 and 2 of 2 are 2 of 66; counts are summed, of times the slowest is kept."""
    measured = [
        {"judge/unusable_frac": Share(0, 64), "judge/requests": 64.0, "time/judge_slowest": 2.0},
        {"judge/unusable_frac": Share(2, 2), "judge/requests": 2.0, "time/judge_slowest": 1.0},
    ]
    for second in (TIED, DIFFERENT):
        drawn = first_batch(begin(ByCall(TIED, second, measured=measured), dynamic_sampling_rounds=1))
        expected = {"judge/unusable_frac": 2 / 66, "judge/requests": 66.0, "time/judge_slowest": 2.0}
        assert drawn.reward_scores.measured == expected


def test_the_speed_of_sampling_is_that_of_all_that_was_sampled(config):
    """Three rounds that are dropped, and responses that are cut and so not learned from, are sampled all the same."""
    settings = config(GRPOConfig, **ROUNDS | {"steps": 1, "mask_truncated": True, "max_new_tokens": 1})
    train_grpo(settings, [lambda completions: [1.0] * len(completions)])
    (metrics,) = read_metrics(settings.output)
    tokens = metrics["perf/rollout_tokens_per_second"] * metrics["time/rollout"]
    assert tokens == pytest.approx(48)
    learned = metrics["perf/update_tokens_per_second"] * metrics["time/update"]
    assert learned == pytest.approx(12 * (1 - metrics["rollout/masked_frac"]))
