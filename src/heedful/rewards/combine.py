"""Several scores of one response become one: their weighted sum, mean, minimum, or mean less standard deviations."""

import math
from collections.abc import Sequence

from heedful.configs.scoring import Combination


def combine_scores(scores: Sequence[float], how: Combination, *, std_coef: float = 1.0) -> float:
    """One score from the weighted scores of the rewards that apply to a response.

        sum       s_1 + ... + s_n
        mean      (s_1 + ... + s_n) / n
        min       the smallest
        mean-std  mean - std_coef * sqrt(mean of (s_i - mean)^2)      population standard deviation

    The last two are conservative: a response must please every member of an ensemble (Coste et al. 2024, section 3: min is
    worst-case optimisation; theirs takes the variance off the mean, this the standard deviation, in the scores' own unit).
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
    """What part of each reward's scores per token goes into the combined ones; ``min`` takes those of the smallest."""
    if how == "sum":
        return [1.0] * len(scores)
    if how == "min":
        smallest = scores.index(min(scores))
        return [float(i == smallest) for i in range(len(scores))]
    return [1.0 / len(scores)] * len(scores)
