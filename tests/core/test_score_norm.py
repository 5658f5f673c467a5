"""From scores to rewards, the pure part: running normalisation, clipping, and places of dense scores."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import RunningScoreNorm, ScoreNorm, clip_scores, gae, kl_shaped_rewards, spread_scores
from heedful.files import to_json

# Running normalisation ------------------------------------------------------------------------------------------------


def test_golden_running_norm():
    """Two batches by hand; the batch itself is part of what it is normalised by."""
    norm = RunningScoreNorm()
    assert norm.including([1.0, 3.0]) == ScoreNorm(mean=2.0, std=1.0)
    second = norm.including([8.0])
    assert second.mean == pytest.approx((1 + 3 + 8) / 3)
    assert second.std == pytest.approx((((1 - 4) ** 2 + (3 - 4) ** 2 + (8 - 4) ** 2) / 3) ** 0.5)


@given(batches=st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9), min_size=1, max_size=6))
def test_identity_running_norm_is_that_of_all_scores_at_once(batches):
    """However they are cut into batches, and when saved and loaded in the middle."""
    norm = RunningScoreNorm()
    for batch in batches:
        last = norm.including(batch)
        state = json.loads(to_json(norm.state_dict()))
        norm = RunningScoreNorm()
        norm.load_state_dict(state)
    scores = torch.tensor([s for batch in batches for s in batch], dtype=torch.float64)
    std = float(scores.std(correction=0))
    assert norm.count == len(scores)
    assert last.mean == pytest.approx(float(scores.mean()), rel=1e-9, abs=1e-9)
    assert last.std == pytest.approx(std, rel=1e-9, abs=1e-6) or (std < 1e-6 and last.std == 1.0)


def test_scores_far_from_0_lose_no_digits():
    """The textbook sum of squares minus square of sums would give 0, or less, for the second batch."""
    norm = RunningScoreNorm()
    norm.including([1e9 + 1, 1e9 + 3])
    assert norm.including([1e9 + 5]).std == pytest.approx((8 / 3) ** 0.5, rel=1e-9)


def test_equal_scores_become_0_until_others_come():
    norm = RunningScoreNorm()
    assert norm.including([5.0, 5.0]) == ScoreNorm(mean=5.0, std=1.0)
    assert norm.including([5.0]) == ScoreNorm(mean=5.0, std=1.0)
    assert norm.including([9.0]) == ScoreNorm(mean=6.0, std=(12 / 4) ** 0.5)


def test_a_fixed_norm_stays():
    norm = ScoreNorm(3.0, 2.0)
    assert norm.including([100.0]) is norm


# Clipping -------------------------------------------------------------------------------------------------------------


def test_golden_clip():
    scores = torch.tensor([-3.0, -1.0, 0.5, 2.0])
    assert clip_scores(scores, 1.0).tolist() == [-1.0, -1.0, 0.5, 1.0]
    assert clip_scores(scores, None) is scores


# Dense scores ---------------------------------------------------------------------------------------------------------

MASK = torch.tensor([[True, True, True, False], [True, True, False, False], [True, False, False, False]])


def test_golden_spread_scores():
    """Two tokens and the one that ended the response; a response cut after two tokens; an empty one."""
    shaped = torch.tensor([6.0, -1.0, 2.0], dtype=torch.float64)
    placed = spread_scores(shaped, [[1.0, 2.0], [4.0, 4.0], []], MASK, std=2.0)
    expected = [[0.5, 1.0, 6 - 1.5, 0], [2.0, 2.0 + (-1 - 4), 0, 0], [2.0, 0, 0, 0]]
    torch.testing.assert_close(placed, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    assert spread_scores(shaped, None, MASK, std=2.0) is shaped


def test_identity_the_first_tokens_return_is_that_of_the_sum():
    """With gamma 1, lambda 1 and no values, a return is the sum of what is still to come: equal first, different later."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(n, generator=generator, dtype=torch.float64).tolist() for n in (2, 2, 0)]
    shaped = torch.tensor([sum(row) for row in tokens], dtype=torch.float64)
    logprobs, ref_logprobs = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    zeros = torch.zeros(3, 4, dtype=torch.float64)

    def returns(scores):
        rewards = kl_shaped_rewards(scores, logprobs, ref_logprobs, MASK, kl_coef=0.1)
        return gae(rewards, zeros, MASK, gamma=1.0, gae_lambda=1.0)[1]

    dense, summed = returns(spread_scores(shaped, tokens, MASK)), returns(shaped)
    torch.testing.assert_close(dense[:, 0], summed[:, 0], rtol=0, atol=1e-12)
    for t in (0, 1):
        torch.testing.assert_close(
            dense[0, t] - dense[0, t + 1], torch.tensor(tokens[0][t]) - 0.1 * (logprobs - ref_logprobs)[0, t]
        )
    assert float((dense[:2, 1] - summed[:2, 1]).abs().min()) > 1e-3
