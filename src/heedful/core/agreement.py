"""Agreement of scores with rankings: accuracy, calibration, and correlation of score and length."""

import math
import statistics
from collections.abc import Sequence
from typing import TypeVar

N = TypeVar("N", int, float)

__all__ = ["agreement", "calibration_error", "correlation", "ordered_pairs"]

SIMILAR = 0.75
"""Two lengths are similar if the shorter is at least this share of the longer."""
BINS = 10
"""Number of bins of `calibration_error`."""


def agreement(
    ranks: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Compare scores with rankings over all pairs of all rankings. Pairs have equal weight; equal ranks form no pair.

    Args:
        ranks: ranks of each ranking's responses; a lower rank is better.
        scores: their scores, finite, in the same order.
        lengths: their lengths in characters, in the same order.

    Returns a dict:
        ``accuracy``: share of pairs whose better response scores strictly higher.
        ``pairs``: number of pairs.
        ``accuracy_similar_length``: accuracy over pairs whose shorter response is at least 75 % as long as the longer;
            absent if there is no such pair.
        ``pairs_similar_length``: number of those pairs.
        ``ece``: `calibration_error` of all pairs.
        ``length_correlation``: `correlation` of score and length over all responses; absent if all scores or all
            lengths are equal.

    Raises ValueError if there are no pairs.
    """
    margins = [
        better - worse for own, given in zip(ranks, scores, strict=True) for better, worse in ordered_pairs(own, given)
    ]
    pairs_of_lengths = [pair for own, given in zip(ranks, lengths, strict=True) for pair in ordered_pairs(own, given)]
    similar = [margin for margin, two in zip(margins, pairs_of_lengths, strict=True) if min(two) >= SIMILAR * max(two)]
    result = {"accuracy": _share_above_zero(margins), "pairs": len(margins), "pairs_similar_length": len(similar)}
    if similar:
        result["accuracy_similar_length"] = _share_above_zero(similar)
    result["ece"] = calibration_error(margins)
    flat_scores, flat_lengths = ([x for own in values for x in own] for values in (scores, lengths))
    length_correlation = correlation(flat_scores, flat_lengths)
    if length_correlation is not None:
        result["length_correlation"] = length_correlation
    return result


def ordered_pairs(ranks: Sequence[int], values: Sequence[N]) -> list[tuple[N, N]]:
    """Values of (better, worse) for all pairs of one ranking with different ranks.

    Raises ValueError if ``ranks`` and ``values`` differ in length.
    """
    if len(ranks) != len(values):
        raise ValueError(f"ordered_pairs: ranks has {len(ranks)} responses, but values has {len(values)}")
    return [(values[i], values[j]) for i, better in enumerate(ranks) for j, worse in enumerate(ranks) if better < worse]


def calibration_error(margins: Sequence[float]) -> float:
    """Expected calibration error over pairs, in [0, 1] (Guo et al. 2017, eq. 3).

        p = sigmoid(margin), confidence = max(p, 1 - p), correct = margin > 0
        ECE = sum_b |B_b| / n |mean of correct in B_b - mean of confidence in B_b|

    Args:
        margins: for each pair, the better response's score minus the worse one's.

    Confidence, from 0.5 to 1, has ten bins of equal width that include their lower edges. It is the predicted
    probability of the response that scores higher. A tie has confidence 1/2 and is half correct, so the error is 0 if
    all scores are equal.

    Raises ValueError if there are no pairs.
    """
    if not margins:
        raise ValueError("calibration_error: there are no pairs")
    gaps = [0.0] * BINS
    for margin in margins:
        certainty = math.tanh(abs(margin) / 2)  # 2 confidence - 1
        correct = 0.5 if margin == 0 else float(margin > 0)
        gaps[min(int(BINS * certainty), BINS - 1)] += correct - (1 + certainty) / 2
    return math.fsum(abs(gap) for gap in gaps) / len(margins)


def correlation(x: Sequence[int | float], y: Sequence[int | float]) -> float | None:
    """Pearson's correlation in [-1, 1].

    None if undefined: all values of one side are equal, or there are fewer than two.
    """
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return statistics.correlation(x, y)


def _share_above_zero(margins: Sequence[float]) -> float:
    return sum(margin > 0 for margin in margins) / len(margins)
