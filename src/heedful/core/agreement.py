"""How well scores agree with rankings: accuracy, calibration, and how much they are about length."""

import math
import statistics
from collections.abc import Sequence
from typing import TypeVar

N = TypeVar("N", int, float)

SIMILAR = 0.75
"""Two lengths are similar where the shorter is at least this share of the longer."""
BINS = 10


def agreement(
    ranks: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Numbers over all pairs of all rankings, each pair alike; equal ranks make no pair.

    Args:
        ranks: for each ranking the ranks of its responses; a lower rank is better.
        scores: for each ranking the finite scores of its responses, in the same order.
        lengths: for each ranking the lengths of its responses, in characters.

    Keys: ``accuracy`` (share of pairs whose better response scores strictly higher) and ``pairs`` (their number);
    ``accuracy_similar_length`` and ``pairs_similar_length``, the same over pairs whose lengths are within 25 % of the longer
    one (the first is absent if there are none); ``ece`` (`calibration_error`); ``length_correlation`` (`correlation` of
    score and length over all responses), absent if all scores or all lengths are equal.
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
    """The values of (better, worse) for every two responses of a ranking whose ranks differ."""
    return [(values[i], values[j]) for i, better in enumerate(ranks) for j, worse in enumerate(ranks) if better < worse]


def calibration_error(margins: Sequence[float]) -> float:
    """Expected calibration error of pairs, in [0, 1] (Guo et al. 2017, eq. 3); ``margins`` are better minus worse scores.

        p = sigmoid(margin), confidence = max(p, 1 - p), correct = margin > 0
        ECE = sum_b |B_b| / n |mean of correct in B_b - mean of confidence in B_b|

    over ten bins of equal width from 0.5 to 1, each with its lower edge. The model's answer is the response that scores
    higher, so the error is that of its own confidence. A tie says "either" and is half correct: with all scores equal the
    error is 0. Raises ValueError for no pairs.
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
    """Pearson's correlation in [-1, 1]; None where it is not defined: all of one equal, or fewer than two."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return statistics.correlation(x, y)


def _share_above_zero(margins: Sequence[float]) -> float:
    return sum(margin > 0 for margin in margins) / len(margins)
