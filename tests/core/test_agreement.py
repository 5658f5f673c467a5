"""Accuracy, calibration and correlation with length, against numbers derived by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import agreement, calibration_error, correlation, ordered_pairs


def logit(p):
    return math.log(p / (1 - p))


def close(expected):
    return pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_golden_calibration_error():
    """Confidences .62, .64, .92, .97 fall into the bins from .6, .6, .9 and .95; the second pair is in the wrong order.

    Gaps: |1/2 - .63|, |1 - .92|, |1 - .97|, weighed 2, 1, 1 of 4.
    """
    margins = [logit(0.62), -logit(0.64), logit(0.92), logit(0.97)]
    assert calibration_error(margins) == close((2 * 0.13 + 0.08 + 0.03) / 4)


def test_calibration_error_has_bins_of_a_twentieth():
    """In one bin an error of confidence on one side makes up for one on the other; in two it does not."""
    right, wrong = logit(0.76), -logit(0.79)
    assert calibration_error([right, wrong]) == close(abs(1 / 2 - 0.775))
    assert calibration_error([right, -logit(0.81)]) == close((0.24 + 0.81) / 2)


@pytest.mark.parametrize(("margin", "expected"), [(50.0, 0.0), (-50.0, 1.0), (1e6, 0.0), (-1e6, 1.0), (0.0, 0.0)])
def test_calibration_error_at_the_ends(margin, expected):
    """Sure and right, sure and wrong, and a tie, which claims nothing."""
    assert calibration_error([margin]) == close(expected)


@given(st.lists(st.floats(-30, 30), min_size=1))
def test_calibration_error_of_swapped_labels_and_order(margins):
    """It lies in [0, 1], and the order of the pairs does not matter."""
    assert 0 <= calibration_error(margins) <= 1
    assert calibration_error(margins[::-1]) == pytest.approx(calibration_error(margins), abs=1e-12)


def test_identity_a_calibrated_model_has_no_error():
    """Of 100 pairs with confidence p, 100 p are in the right order, in bins all over the range."""
    margins = [m for p in (0.52, 0.63, 0.71, 0.87, 0.98) for m in [logit(p)] * round(100 * p)]
    margins += [-logit(p) for p in (0.52, 0.63, 0.71, 0.87, 0.98) for _ in range(100 - round(100 * p))]
    assert calibration_error(margins) == close(0)
    assert calibration_error([2 * m for m in margins]) > 0.05


def test_golden_correlation():
    assert correlation([1.0, 2.0, 4.0], [1, 3, 2]) == close(1 / math.sqrt(14 / 3 * 2))
    assert correlation([1.0, 2.0, 3.0], [10, 8, 6]) == close(-1)


@pytest.mark.parametrize(
    ("x", "y"), [([0.1, 0.1, 0.1], [1, 2, 3]), ([1.0, 2.0, 3.0], [7, 7, 7]), ([1.0], [2]), ([], [])]
)
def test_a_correlation_with_a_constant_is_not_defined(x, y):
    """Nor is it 0: 0.1 three times has a mean that is not 0.1, and so a variance that is not 0."""
    assert correlation(x, y) is None


def test_pairs_of_a_ranking():
    assert ordered_pairs((0, 1, 1, 2), [4.0, 3.0, 2.0, 1.0]) == [(4, 3), (4, 2), (4, 1), (3, 1), (2, 1)]
    assert ordered_pairs((1, 0), [4.0, 3.0]) == [(3, 4)]


def test_agreement_counts_every_pair_alike():
    """Three of the first ranking's five pairs and the one of the second are right; lengths are 4, 5, 4, 2, 9 and 8."""
    scores = [[2.0, 1.0, 0.5, 1.0], [0.3, 0.1]]
    result = agreement([[0, 1, 1, 2], [0, 1]], scores, [[4, 5, 4, 2], [9, 8]])
    # The pairs (A, D) of lengths 4 and 2, (B, D) of 5 and 2, (C, D) of 4 and 2 are not of similar length.
    margins = [1.0, 1.5, 1.0, 0.0, -0.5, 0.3 - 0.1]
    assert result == {
        "accuracy": close(4 / 6),
        "pairs": 6,
        "accuracy_similar_length": close(1.0),
        "pairs_similar_length": 3,
        "ece": close(calibration_error(margins)),
        "length_correlation": close(correlation([2.0, 1.0, 0.5, 1.0, 0.3, 0.1], [4, 5, 4, 2, 9, 8])),
    }


@pytest.mark.parametrize(("longer", "similar"), [(4, 1), (5, 0)])
def test_lengths_are_similar_within_a_quarter_of_the_longer(longer, similar):
    for lengths in ([3, longer], [longer, 3]):
        result = agreement([[0, 1]], [[1.0, 0.0]], [lengths])
        assert result["pairs_similar_length"] == similar
        assert ("accuracy_similar_length" in result) == bool(similar)


def test_what_is_not_defined_is_absent():
    result = agreement([[0, 1]], [[0.1, 0.1]], [[1, 4]])
    assert result == {"accuracy": 0.0, "pairs": 1, "pairs_similar_length": 0, "ece": 0.0}


def test_no_pairs_are_refused():
    with pytest.raises(ValueError, match="no pairs"):
        calibration_error([])
