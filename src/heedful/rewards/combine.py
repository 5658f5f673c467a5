"""Combine several scores of one response: their weighted sum, mean, minimum, or mean minus standard deviations."""

import math
from collections.abc import Sequence

from heedful.configs.scoring import Combination


def combine_scores(scores: Sequence[float], how: Combination, *, std_coef: float = 1.0) -> float:
    """Combine the weighted scores of the rewards that apply to a response into one score.

        sum       s_1 + ... + s_n
        mean      (s_1 + ... + s_n) / n
        min       the smallest
        mean-std  mean - std_coef * sqrt(mean of (s_i - mean)^2)      population standard deviation

    The last two are conservative: a response must please every member of an ensemble (Coste et al. 2024, section 3, where min
    is worst-case optimisation). They subtract the variance from the mean; heedful subtracts the standard deviation, which has
    the unit of the scores.

    Args:
        scores: one weighted score per reward that applies.
        how: sum, mean, min or mean-std.
        std_coef: how many standard deviations mean-std subtracts.
    """
    if how == "sum":
        return sum(scores)
    if how == "min":
        return min(scores)
    mean = sum(scores) / len(scores)
    if how == "mean":
        return mean
    return mean - std_coef * math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))


def shares(scores: Sequence[float], how: Combination) -> list[float]:
    """Return the factor by which each reward's scores per token enter the combined ones.

    ``min`` takes only those of the reward with the smallest score; the means give each reward the same part.
    """
    if how == "sum":
        return [1.0] * len(scores)
    if how == "min":
        smallest = scores.index(min(scores))
        return [float(i == smallest) for i in range(len(scores))]
    return [1.0 / len(scores)] * len(scores)
