"""From scores to rewards, the pure part: clipping, and places of dense scores."""

import pytest
import torch

from heedful.core import ScoreNorm, clip_scores, spread_scores

# Normalisation -------------------------------------------------------------------------------------------------------


def test_golden_norm():
    """Of 1, 3, 3, 5: mean 3, population variance (4 + 0 + 0 + 4) / 4 = 2."""
    scores = torch.tensor([1.0, 3.0, 3.0, 5.0], dtype=torch.float64)
    norm = ScoreNorm.of(scores)
    assert (norm.mean, norm.std) == (3.0, pytest.approx(2**0.5))
    assert norm(scores).tolist() == pytest.approx([-(2**0.5), 0.0, 0.0, 2**0.5])
    assert ScoreNorm()(scores).tolist() == scores.tolist()


def test_equal_scores_have_no_scale():
    with pytest.raises(ValueError, match=r"all 3 scores are 2\.0; they need a spread"):
        ScoreNorm.of(torch.tensor([2.0, 2.0, 2.0 + 1e-9], dtype=torch.float64))


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


def test_golden_spread_scores_skip_the_tokens_of_others():
    """The result of a tool stands between the policy's second and third token."""
    mask = torch.tensor([[True, True, False, False, True, True, False]])
    placed = spread_scores(torch.tensor([10.0]), [[1.0, 2.0, 4.0]], mask)
    assert placed.tolist() == [[1.0, 2.0, 0.0, 0.0, 4.0, 3.0, 0.0]]
