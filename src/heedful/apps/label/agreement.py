"""Agreement between people: shares with intervals, Cohen's and Fleiss' kappa, Krippendorff's alpha. Standard library only.

A *unit* is one thing that several people judged: a pair of answers, or an answer that is rated. Its values are their
judgements: categories (any hashable value) or, for the ordinal and interval alpha, numbers. A person who did not judge a unit
has no value in it. An undefined measure (no unit with two values, or all values equal) is None, never NaN.

docs/labelling-statistics.md explains each measure with numbers.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeVar

V = TypeVar("V", bound=Hashable)
Level = Literal["nominal", "ordinal", "interval"]

Z = 1.96
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True)
class AgreementShare:
    """A share of values, with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int
    """Number of values."""
    groups: int
    """Number of independent groups (items)."""


def share(groups: Sequence[Sequence[float]]) -> AgreementShare | None:
    """Return the mean of values in [0, 1] with its 95 % interval; None if there are no values.

        (p + z^2 / 2n' +- z sqrt(p (1 - p) / n' + z^2 / 4n'^2)) / (1 + z^2 / n')        n' = n / max(1, design effect)
        design effect = V / (s^2 / n)        V = G / (G - 1) / n^2 sum_g (sum_{i in g} (x_i - p))^2

    Wilson's interval for the effective number of values, clustered by group: the same as `heedful.core.share_interval`,
    written again because this room never loads torch. If the design effect is undefined (all values equal, or one group),
    n' is the number of groups.

    Args:
        groups: the values of each group (item). Groups are independent of each other; values within a group need not be.
            Empty groups are ignored.
    """
    groups = [group for group in groups if group]
    n = sum(map(len, groups))
    if n == 0:
        return None
    p = math.fsum(x for group in groups for x in group) / n
    squares = math.fsum((x - p) ** 2 for group in groups for x in group)
    effective: float = len(groups)
    if len(groups) > 1 and squares > 0:
        clustered = math.fsum(math.fsum(x - p for x in group) ** 2 for group in groups)
        variance = len(groups) / (len(groups) - 1) / n**2 * clustered
        effective = n / max(1.0, variance / (squares / (n - 1) / n))
    middle = p + Z**2 / (2 * effective)
    half = Z * math.sqrt(p * (1 - p) / effective + Z**2 / (4 * effective**2))
    scale = 1 + Z**2 / effective
    return AgreementShare(p, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale), n, len(groups))


def agreements(values: Sequence[V]) -> list[float]:
    """Return 1.0 or 0.0 for every two values of a unit: whether they are equal. Empty for fewer than two values."""
    return [float(one == other) for one, other in combinations(values, 2)]


def majority(values: Sequence[V]) -> V | None:
    """Return the most frequent value; None if there are no values or the first place is a tie."""
    first = Counter(values).most_common(2)
    return first[0][0] if first and (len(first) == 1 or first[0][1] > first[1][1]) else None


def cohen_kappa(pairs: Sequence[tuple[V, V]]) -> float | None:
    """Return Cohen's kappa of two people (Cohen 1960, equation 1).

        kappa = (p_o - p_e) / (1 - p_e)        p_e = sum_c p_1(c) p_2(c)

    p_o is the share of units on which they agree, p_i(c) the share of units that person i puts into category c.

    Args:
        pairs: the two values of each unit that both judged.

    None if there are no units, or if both always name the same single category (p_e = 1).
    """
    n = len(pairs)
    first, second = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
    by_chance = sum(first[c] * second[c] for c in first)  # n^2 p_e, exact
    if by_chance == n * n:
        return None
    return (n * sum(one == other for one, other in pairs) - by_chance) / (n * n - by_chance)


def fleiss_kappa(units: Sequence[Sequence[V]]) -> float | None:
    """Return Fleiss' kappa (Fleiss 1971, equations 1 to 7); people may differ between units.

        kappa = (mean_u P_u - P_e) / (1 - P_e)        P_u: share of the pairs of values of unit u that are equal
                                                      P_e = sum_c (mean_u share of u's values that are c)^2

    Units may have different numbers of values; those with fewer than two are ignored. For equal numbers this is Fleiss' own
    formula.

    Args:
        units: the values of each unit.

    None if no unit has two values, or if all values are the same category (P_e = 1).
    """
    counts = _counts(units)
    if len({category for count in counts for category in count}) < 2:
        return None
    sizes = [count.total() for count in counts]
    agree = [sum(k * (k - 1) for k in c.values()) / (n * (n - 1)) for c, n in zip(counts, sizes, strict=True)]
    shares: Counter[V] = Counter()
    for count, n in zip(counts, sizes, strict=True):
        for category, k in count.items():
            shares[category] += k / n / len(counts)  # type: ignore[assignment]  # a Counter may hold floats
    by_chance = math.fsum(p * p for p in shares.values())
    return (math.fsum(agree) / len(agree) - by_chance) / (1 - by_chance)


def krippendorff_alpha(units: Sequence[Sequence[V]], level: Level = "nominal") -> float | None:
    """Return Krippendorff's alpha (Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability", section C to E).

        alpha = 1 - D_o / D_e
        D_o = sum_u 1 / (n_u - 1) sum_{i != j in u} d(v_i, v_j)        D_e = 1 / (n - 1) sum_{c, k} n_c n_k d(c, k)

    n_c is how often the value c occurs, n = sum_c n_c. The squared difference d of two different values is 1 (nominal),
    (c - k)^2 (interval), or (sum of n_g over g from c to k - (n_c + n_k) / 2)^2 (ordinal). 1 is perfect agreement, 0 is
    chance. Units with fewer than two values are ignored.

    Args:
        units: the values of each unit; numbers unless the level is nominal.
        level: the distance of values. nominal: equal or not; ordinal: by their order; interval: by their difference.

    None if no unit has two values, or if all values are equal (D_e = 0).
    """
    counts = _counts(units)
    totals: Counter[V] = Counter()
    for count in counts:
        totals.update(count)
    if len(totals) < 2:
        return None
    values = list(totals) if level == "nominal" else sorted(totals)  # type: ignore[type-var]  # numbers, by contract
    apart = _differences(values, totals, level)
    observed = math.fsum(
        2 * k * m * apart[one, other] / (count.total() - 1)
        for count in counts
        for (one, k), (other, m) in combinations(sorted(count.items(), key=lambda pair: values.index(pair[0])), 2)
    )
    expected = math.fsum(2 * totals[c] * totals[k] * d for (c, k), d in apart.items()) / (totals.total() - 1)
    return 1 - observed / expected


def _counts(units: Sequence[Sequence[V]]) -> list[Counter[V]]:
    """Counts of values in each unit with at least two."""
    return [Counter(values) for values in units if len(values) > 1]


def _differences(values: Sequence[V], totals: Mapping[V, int], level: Level) -> dict[tuple[V, V], float]:
    """Squared differences of every two values, in the order of ``values``."""
    if level == "nominal":
        return dict.fromkeys(combinations(values, 2), 1.0)
    if level == "interval":
        return {(c, k): float(k - c) ** 2 for c, k in combinations(values, 2)}  # type: ignore[operator]  # numbers
    below = {c: sum(totals[g] for g in values[:i]) + totals[c] / 2 for i, c in enumerate(values)}
    return {(c, k): (below[k] - below[c]) ** 2 for c, k in combinations(values, 2)}
