"""95 % confidence intervals of means and shares for grouped values, such as several responses per prompt.

Groups are independent of each other; values within a group need not be.
"""

import itertools
import math
from collections.abc import Sequence

__all__ = ["crossed_interval", "design_effect", "mean_interval", "share_interval"]

Z = 1.96
"""Two-sided 95 % quantile of the normal distribution."""
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 15: 2.131, 30: 2.042}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""


def mean_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Lower and upper end of the 95 % confidence interval of the mean of all values, equally weighted.

        mean +- 1.96 sqrt(V)        V = G / (G - 1) / n^2 sum_g (sum_{i in g} (x_i - mean))^2

    V is the cluster-robust variance (Liang and Zeger 1986; Miller 2024, "Adding Error Bars to Evals", section 2.2) with
    the usual correction for few groups. For groups of one value it is the sample variance divided by n; for groups of
    equal size, that of the groups' means divided by G.

    Args:
        groups: the values x of each of G groups, n in all.

    None for a single group: the variance between groups is unknown.
    """
    if len(groups) < 2:
        return None
    mean, half = _mean(groups), Z * math.sqrt(_clustered_variance(groups))
    return mean - half, mean + half


def crossed_interval(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Lower and upper end of the 95 % confidence interval of the mean of a table whose rows and columns are both samples,
    such as training runs and the prompts that all of them are measured on.

        mean +- t_f sqrt(V)    V = max(a + b - c, a, b)    a = var(means of rows) / R    b = var(means of columns) / C

    c is var(x - row mean - column mean) / (R C): what chance in the single values adds to both a and b. V is the variance of
    the mean with two crossed random effects (Cornfield and Tukey 1956); ``t_f`` is Student's quantile for
    f = V^2 / (a^2 / (R - 1) + b^2 / (C - 1)) degrees of freedom (Satterthwaite 1946), at least 1: few rows widen it.

    Args:
        rows: the values of R rows, at least 2, with the same C columns, at least 2.
    """
    columns = list(zip(*rows, strict=True))
    r, c = len(rows), len(columns)
    mean = _mean(rows)
    above, beside = [_mean([row]) - mean for row in rows], [_mean([column]) - mean for column in columns]
    of_rows = math.fsum(x**2 for x in above) / (r - 1) / r
    of_columns = math.fsum(x**2 for x in beside) / (c - 1) / c
    left = math.fsum((x - mean - above[i] - beside[j]) ** 2 for i, row in enumerate(rows) for j, x in enumerate(row))
    variance = max(of_rows + of_columns - left / ((r - 1) * (c - 1)) / (r * c), of_rows, of_columns)
    if not variance:
        return mean, mean
    freedom = variance**2 / (of_rows**2 / (r - 1) + of_columns**2 / (c - 1))
    half = _student(freedom) * math.sqrt(variance)
    return mean - half, mean + half


def share_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Lower and upper end of the 95 % confidence interval of a share p, the mean of values in [0, 1]; a tie may count
    1/2.

        (p + z^2 / 2n' +- z sqrt(p (1 - p) / n' + z^2 / 4n'^2)) / (1 + z^2 / n')        n' = n / max(1, design effect)

    This is Wilson's interval (1927) for the effective number of values n' (Kish 1965, section 8.2), as in Franco et al. 2019,
    "Comparative Study of Confidence Intervals for Proportions in Complex Sample Surveys". It stays within [0, 1] and
    has a width above 0 even if p is 0 or 1. If the design effect is undefined (all values equal, or one group), n' is
    the number of groups, as for full correlation within groups.

    Args:
        groups: the values of each group.
    """
    effect, p = design_effect(groups), _mean(groups)
    n = len(groups) if effect is None else _count(groups) / max(1.0, effect)
    middle = p + Z**2 / (2 * n)
    half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def design_effect(groups: Sequence[Sequence[float]]) -> float | None:
    """Variance of the mean relative to independent values (Kish 1965, section 8.2).

        V / (s^2 / n)        V as in `mean_interval`, s^2 the sample variance of all values

    1 for groups of one value; about k for groups of k equal values.

    Args:
        groups: the values of each group.

    None if undefined: there is one group, or all values are equal.
    """
    mean, n = _mean(groups), _count(groups)
    squares = math.fsum((value - mean) ** 2 for group in groups for value in group)
    if len(groups) < 2 or squares == 0:
        return None
    return _clustered_variance(groups) / (squares / (n - 1) / n)


def _clustered_variance(groups: Sequence[Sequence[float]]) -> float:
    mean, g = _mean(groups), len(groups)
    return g / (g - 1) / _count(groups) ** 2 * math.fsum(math.fsum(x - mean for x in group) ** 2 for group in groups)


def _student(freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t: `STUDENT`, along a line in 1 / f between its entries."""
    known = [*STUDENT.items(), (math.inf, Z)]
    for (below, larger), (above, smaller) in itertools.pairwise(known):
        if freedom <= above:
            return larger + (smaller - larger) * (1 / below - 1 / max(freedom, below)) / (1 / below - 1 / above)
    return Z


def _mean(groups: Sequence[Sequence[float]]) -> float:
    return math.fsum(value for group in groups for value in group) / _count(groups)


def _count(groups: Sequence[Sequence[float]]) -> int:
    return sum(len(group) for group in groups)
