"""One score a token: what a reward may return, and how it joins others."""

import numpy as np
import pytest
import torch

from heedful.errors import RewardError
from heedful.rewards import Completion, Ensemble, Reward, score, score_tokens
from heedful.types import Prompt

COMPLETIONS = [
    Completion(Prompt("问", "d:1"), "二个", ids=(7, 8)),
    Completion(Prompt("问", "d:2"), "一个长的", ids=(7, 8, 9)),
    Completion(Prompt("问", "d:3"), ""),
]
DENSE = [[1.0, 2.0], [0.5, -0.5, 3.0], []]


def dense(completion_ids):
    return DENSE


def scalar(completions):
    return [10.0, None, 30.0]


@pytest.mark.parametrize(
    "result",
    [
        DENSE,
        [tuple(row) for row in DENSE],
        [np.array(row) for row in DENSE],
        [torch.tensor(row) for row in DENSE],
        [torch.tensor(row, dtype=torch.bfloat16) for row in DENSE],
        [[np.float32(x) for x in row] for row in DENSE],
        [[torch.tensor(x) for x in row] for row in DENSE],
    ],
    ids=["lists", "tuples", "arrays", "tensors", "bfloat16", "numpy scalars", "tensors of one"],
)
def test_lists_of_every_kind(result):
    scores = score_tokens([Reward("密", lambda completions: result)], COMPLETIONS)
    assert scores.tokens == DENSE
    assert scores.totals == [3.0, 3.0, 0.0]
    assert scores.means == {"密": 2.0}
    assert all(type(x) is float for row in scores.tokens for x in row)


def test_without_a_dense_reward_there_are_no_places():
    assert score_tokens([Reward("s", lambda completions: [1, 2, 3])], COMPLETIONS).tokens is None


@pytest.mark.parametrize(
    ("combine", "totals", "tokens"),
    [
        ("sum", [2 * 3.0 + 10, 6.0, 30.0], [[2.0, 4.0], [1.0, -1.0, 6.0], []]),
        ("mean", [(6.0 + 10) / 2, 6.0, (0 + 30) / 2], [[1.0, 2.0], [1.0, -1.0, 6.0], []]),
        ("min", [6.0, 6.0, 0.0], [[2.0, 4.0], [1.0, -1.0, 6.0], []]),
        ("mean-std", [8.0 - 2.0, 6.0, 15.0 - 15.0], [[1.0, 2.0], [1.0, -1.0, 6.0], []]),
    ],
)
def test_mixed_with_a_scalar(combine, totals, tokens):
    """The scalar has no place, so it is in the total alone; the dense reward's weight is 2."""
    rewards = Ensemble((Reward("密", dense, 2.0), Reward("s", scalar)), combine)
    scores = score_tokens(rewards, COMPLETIONS)
    assert scores.totals == pytest.approx(totals)
    assert scores.tokens == [pytest.approx(row) for row in tokens]
    assert score(rewards, COMPLETIONS) == (scores.totals, scores.means)


def test_the_smallest_scalar_leaves_no_place():
    rewards = Ensemble((Reward("密", dense), Reward("s", lambda completions: [-1.0, 99.0, -1.0])), "min")
    assert score_tokens(rewards, COMPLETIONS).tokens == [[0.0, 0.0], DENSE[1], []]


def test_two_dense_rewards_are_added_token_by_token():
    def other(completions):
        return [[1.0, 1.0], None, []]

    scores = score_tokens([Reward("a", dense), Reward("b", other)], COMPLETIONS)
    assert scores.tokens == [[2.0, 3.0], DENSE[1], []]
    assert scores.totals == [5.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("row", "fragments"),
    [
        ([1.0], ["returned 1 scores for a response of 2 tokens", "completion_ids"]),
        ([1.0, 2.0, 3.0], ["returned 3 scores for a response of 2 tokens", "the token that ended the response is not"]),
        ([], ["returned 0 scores for a response of 2 tokens"]),
        (torch.ones(3), ["returned 3 scores for a response of 2 tokens"]),
        ([1.0, float("nan")], ["nan (float)", "one finite number"]),
        ([1.0, None], ["None (NoneType)"]),
        (["1", "2"], ["'1' (str)"]),
    ],
)
def test_what_does_not_fit_the_tokens(row, fragments):
    with pytest.raises(RewardError) as error:
        score([Reward("密", lambda completions: [row, *DENSE[1:]])], COMPLETIONS)
    for fragment in ("reward 密", "d:1", "二个", *fragments):
        assert fragment in str(error.value)
