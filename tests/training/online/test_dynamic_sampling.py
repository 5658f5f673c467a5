"""Groups whose scores all tie get other prompts, in bounds; what could not be replaced is counted and said once."""

import inspect
import math

import pytest
import torch

from cases import often
from heedful import ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, RewardError, train_grpo, train_online_dpo
from heedful.algorithms.online.rollout import refill_ties, sample_and_score
from heedful.algorithms.online.start import start
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


@pytest.fixture
def begin(config):
    """``begin(reward, **changes)``: a learner of GRPO on ten prompts, three of which make a batch."""
    return lambda reward, kind=GRPOConfig, **changes: start(config(kind, **(ROUNDS | changes)), [reward]).learner


def test_tied_groups_are_replaced_and_the_others_stay(begin):
    """In their places; the responses to prompts that stay are those that would have been sampled without."""
    reward = only_for(0, 1, 2, 3, 4, 5)
    plain = begin(reward, dynamic_sampling_rounds=0)
    learner = begin(reward, dynamic_sampling_rounds=30)
    seen = 0
    for _ in range(4):
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
    drawn = refill_ties(learner, sample_and_score(learner, next(learner.prompts)))
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
    calls = []

    def one(completions):
        calls.append(len(completions))
        return [1.0] * len(completions)

    settings = config(GRPOConfig, **ROUNDS, steps=3)
    train_grpo(settings, rewards=[one])
    assert calls[1:] == [12, 12, 12, 12] * 3, "the first call is the trial"
    lines = read_metrics(settings.output)
    assert [line["rollout/unfilled_frac"] for line in lines] == [1.0] * 3
    assert [line["rollout/refilled_frac"] for line in lines] == [0.0] * 3
    assert [line["rollout/sampled_responses"] for line in lines] == [48.0] * 3
    assert [line["reward/tied_frac"] for line in lines] == [1.0] * 3
    said = capsys.readouterr().err
    assert said.count("dynamic sampling could not replace all prompts") == 1


def test_places_are_filled_in_part(begin):
    """One round of three new prompts for three places: those that do not tie are taken, the other places keep theirs."""
    reward = only_for(0, 1)
    learner = begin(reward, dynamic_sampling_rounds=1)
    found = [refill_ties(learner, sample_and_score(learner, next(learner.prompts))) for _ in range(6)]
    for drawn in found:
        ties = sum(len(set(drawn.reward_scores.totals[i : i + 4])) == 1 for i in (0, 4, 8))
        assert drawn.metrics["rollout/unfilled_frac"] == pytest.approx(ties / 3)
    assert len({drawn.metrics["rollout/unfilled_frac"] for drawn in found}) > 1


def test_shaped_scores_are_what_ties(begin):
    """Raw scores differ, clipped ones do not; and a penalty of length tells equal scores apart."""
    clipped = begin(lambda completions: [5.0 + len(c) for c in completions], score_clip=1.0)
    assert refill_ties(clipped, sample_and_score(clipped, next(clipped.prompts))).metrics["rollout/unfilled_frac"] == 1
    penalised = begin(lambda completions: [1.0] * len(completions), overlong_buffer=6, dynamic_sampling_rounds=30)
    object.__setattr__(penalised.sampler, "stop_ids", tuple(range(0, 256, 6)))
    assert (
        refill_ties(penalised, sample_and_score(penalised, next(penalised.prompts))).metrics["rollout/unfilled_frac"]
        == 0
    )


def test_a_reward_that_fails_on_new_prompts_costs_only_their_place(begin):
    """All of the first new responses fail, far more than may fail of a batch: the round is lost, the next one is not."""
    calls = []

    def fails(completions):
        calls.append(len(completions))
        by_call = {2: [1.0] * len(completions), 3: [math.nan] * len(completions)}
        return by_call.get(len(calls), [float(i) for i in range(len(completions))])

    learner = begin(fails)
    assert learner.rewards.max_failed == 0.1
    drawn = refill_ties(learner, sample_and_score(learner, next(learner.prompts)))
    assert calls[1:] == [12, 12, 12]
    assert drawn.reward_scores.failed == ()
    assert drawn.metrics["rollout/refilled_frac"] == 1


STAY, BOUNDED = (
    test_tied_groups_are_replaced_and_the_others_stay,
    test_what_cannot_be_refilled_is_bounded_counted_and_said_once,
)
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


@pytest.mark.parametrize(
    "name",
    often(MISTAKES, ["what ties takes a place", "another place is filled", "one round more", "a failure ends the run"]),
)
def test_a_mistake_in_refilling_is_noticed(name, mistake, request):
    killer, old, new = MISTAKES[name]
    fixtures = {one: request.getfixturevalue(one) for one in inspect.signature(killer).parameters}
    mistake(refill_ties, old, new)
    with pytest.raises((AssertionError, RewardError)):
        killer(**fixtures)


def test_a_batch_of_which_too_much_fails_ends_the_run(begin):
    """Before anything is refilled, as without dynamic sampling."""
    calls = []

    def fails(completions):
        calls.append(len(completions))
        return [math.nan if len(calls) > 1 else 1.0] * len(completions)

    learner = begin(fails)
    with pytest.raises(RewardError, match=r"12 of 12 responses have no score, more than --max-failed-rewards 0\.1"):
        refill_ties(learner, sample_and_score(learner, next(learner.prompts)))
    assert len(calls) == 2


def test_dense_scores_and_failed_rows_stay_with_their_responses(begin):
    """Only rows that failed are marked; dense numbers are one for each token."""

    def dense(completion_ids, number):
        return [
            None if n == 2 and sum(ids) % 11 == 0 else [float(i % 7) * (n == 2) for i in ids]
            for ids, n in zip(completion_ids, number, strict=True)
        ]

    learner = begin(dense, dynamic_sampling_rounds=90, max_failed_rewards=0.9)
    drawn = refill_ties(learner, sample_and_score(learner, next(learner.prompts)))
    assert set(numbers_of(drawn)) == {2}
    for row, completion in enumerate(drawn.completions):
        is_failed = sum(completion.ids) % 11 == 0
        assert (row in drawn.reward_scores.failed) == is_failed
        if not is_failed:
            assert drawn.reward_scores.tokens[row] == [float(i % 7) for i in completion.ids]


def test_pairs_come_from_refilled_groups_too(config):
    settings = config(OnlineDPOConfig, **ROUNDS | {"dynamic_sampling_rounds": 30}, steps=2)
    train_online_dpo(settings, rewards=[only_for(3, 4)])
    lines = read_metrics(settings.output)
    assert [line["reward/tied_frac"] for line in lines] == [0.0, 0.0]
    assert all(line["rollout/refilled_frac"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("kind", "changes"), [(PPOConfig, {}), (GRPOConfig, {"advantage": "reinforce", "kl_coef": 0.0})]
)
def test_it_is_refused_where_no_group_is_compared(config, kind, changes):
    with pytest.raises(ConfigError, match=r"--dynamic-sampling-rounds 2 .* does not compare"):
        config(kind, dynamic_sampling_rounds=2, **changes)
