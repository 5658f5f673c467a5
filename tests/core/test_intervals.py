"""Intervals of values in groups: by hand, against Wilson's own equation, and how often they hold the truth."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import crossed_interval, design_effect, mean_interval, share_interval

GROUPED = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=1, max_size=8)


def close(expected):
    return pytest.approx(expected, rel=1e-12, abs=1e-12)


def singles(values):
    return [[value] for value in values]


def flat(groups):
    return singles(itertools.chain.from_iterable(groups))


def half_width(interval):
    return (interval[1] - interval[0]) / 2


def wilson(p, n):
    """The two shares x at which p is 1.96 standard errors of x away: (p - x)^2 = 1.96^2 x (1 - x) / n."""
    a, b, c = 1 + 3.8416 / n, -2 * p - 3.8416 / n, p * p
    root = math.sqrt(max(0.0, b * b - 4 * a * c))
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def test_golden_mean_interval_of_single_values():
    """Values 1, 2, 3, 6: mean 3, sample variance 14 / 3, half-width 1.96 sqrt(14 / 12)."""
    half = 1.96 * math.sqrt(14 / 12)
    assert mean_interval(singles([1.0, 2.0, 3.0, 6.0])) == close((3 - half, 3 + half))


def test_golden_mean_interval_of_pairs():
    """Means 1, 3, 8: mean 4, sample variance 13, half-width 1.96 sqrt(13 / 3), more than of six loose values."""
    groups = [[0.0, 2.0], [3.0, 3.0], [9.0, 7.0]]
    assert mean_interval(groups) == close((4 - 1.96 * math.sqrt(13 / 3), 4 + 1.96 * math.sqrt(13 / 3)))
    assert half_width(mean_interval(flat(groups))) < 1.96 * math.sqrt(13 / 3)


def test_golden_mean_interval_of_unequal_groups():
    """Every value weighs the same: mean 3/4, sums of deviations 3/4 and -3/4, V = 2 / 16 * 2 * 9/16 = (3/8)^2."""
    assert mean_interval([[1.0, 1.0, 1.0], [0.0]]) == close((0.75 - 0.735, 0.75 + 0.735))


def test_golden_crossed_interval():
    """Rows 0, 2, 7 and 2, 4, 3: their means 3 and 3, so a = 0. Means of columns 1, 3, 5: b = 4 / 3, f = 2."""
    half = 4.303 * math.sqrt(4 / 3)
    assert crossed_interval([[0.0, 2.0, 7.0], [2.0, 4.0, 3.0]]) == close((3 - half, 3 + half))


def test_golden_crossed_interval_of_both():
    """Rows 0, 4 and 2, 6 with nothing left: a = 2 / 2, b = 8 / 2, V = 5, f = 25 / (1 + 16) = 25 / 17."""
    half = (4.303 + (12.706 - 4.303) * (17 / 25 - 1 / 2) / (1 / 2)) * math.sqrt(5)
    assert crossed_interval([[0.0, 4.0], [2.0, 6.0]]) == close((3 - half, 3 + half))


def test_golden_crossed_interval_of_chance():
    """Rows 0, 0, 3 and 0, 3, 0 and 0, 0, 0: a = b = 1 / 9; what is left is 10 in 4 degrees of freedom, c = 10 / 36, more than
    both. So V = 1 / 9 and f = 1; turned on its side it is the same."""
    rows = [[0.0, 0.0, 3.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]]
    assert half_width(crossed_interval(rows)) == close(12.706 / 3)
    assert crossed_interval(list(zip(*rows, strict=True))) == close(crossed_interval(rows))


def test_golden_crossed_interval_of_all_three():
    """Rows 0, 1 and 2, 5: a = 9 / 4, b = 1, what is left is four times 1 / 4, c = 1 / 4: V = 3, 1 / f = (81 / 16 + 1) / 9."""
    half = (4.303 + (12.706 - 4.303) * ((81 / 16 + 1) / 9 - 1 / 2) / (1 / 2)) * math.sqrt(3)
    assert crossed_interval([[0.0, 1.0], [2.0, 5.0]]) == close((2 - half, 2 + half))


def test_golden_crossed_interval_of_many_columns():
    """As the columns' number grows, the quantile becomes the normal one; equal values have no width."""
    many = [float(i % 2) for i in range(100)]
    assert half_width(crossed_interval([many, many])) == close(
        (2.042 + (1.96 - 2.042) * (1 - 30 / 99)) * math.sqrt(0.25 / 99)
    )
    assert crossed_interval([[2.0, 2.0], [2.0, 2.0]]) == (2.0, 2.0)


def test_one_group_has_no_interval_of_its_mean():
    assert mean_interval([[1.0, 2.0]]) is None
    assert mean_interval(singles([0.5, 0.5])) == (0.5, 0.5)


def test_golden_design_effect():
    """Two groups of three equal values: V = 2 / 36 * 2 * (3/2)^2 = 1/4, s^2 / n = (3/10) / 6 = 1/20."""
    assert design_effect([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]) == close(5.0)
    assert design_effect([[1.0, 0.0], [0.0, 1.0]]) == close(0.0)
    assert design_effect([[1.0, 0.0, 1.0]]) is None
    assert design_effect(singles([0.5, 0.5])) is None


def test_golden_share_interval_of_single_values():
    """3 of 4: (3/4 + z^2 / 8 +- z sqrt(3/64 + z^2 / 64)) / (1 + z^2 / 4) with z^2 = 3.8416."""
    half = 1.96 * math.sqrt(3 / 64 + 3.8416 / 64)
    low, high = share_interval(singles([1.0, 1.0, 0.0, 1.0]))
    assert (low, high) == close(((0.75 + 0.4802 - half) / 1.9604, (0.75 + 0.4802 + half) / 1.9604))
    assert (round(low, 3), round(high, 3)) == (0.301, 0.954), "as in tables of Wilson's interval"


@pytest.mark.parametrize(("size", "groups"), [(1, 10), (100, 10), (7, 1)])
def test_golden_share_interval_at_the_borders(size, groups):
    """All right: from 1 / (1 + z^2 / G) to 1, however much each group repeats it; all wrong is the mirror image."""
    bound = 1 / (1 + 3.8416 / groups)
    assert share_interval([[1.0] * size] * groups) == close((bound, 1.0))
    assert share_interval([[0.0] * size] * groups) == close((0.0, 1 - bound))


def test_golden_share_interval_of_groups():
    """Three right and three wrong in two groups of one opinion each: effect 5, so Wilson for 6/5 values."""
    assert share_interval([[1.0] * 3, [0.0] * 3]) == close(wilson(0.5, 1.2))


def test_values_that_even_out_within_their_group_do_not_narrow_it():
    """An effect below 1 is luck more often than not."""
    assert share_interval([[1.0, 0.0]] * 3) == close(wilson(0.5, 6))


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=30))
def test_identity_single_values_have_wilsons_interval(values):
    """Groups of one value are the unclustered case, for shares and for means."""
    p, n = sum(values) / len(values), len(values)
    assert share_interval(singles(values)) == pytest.approx(wilson(p, n), abs=1e-9)
    if 0 < p < 1:
        assert design_effect(singles(values)) == close(1.0)
        half = 1.96 * math.sqrt(p * (1 - p) / (n - 1))
        assert mean_interval(singles(values)) == close((p - half, p + half))


@given(GROUPED)
def test_invariance_of_a_share(groups):
    """It lies in [0, 1] around the share, has a width, ignores all order, and mirrors with the values."""
    values = list(itertools.chain.from_iterable(groups))
    low, high = share_interval(groups)
    p = sum(values) / len(values)
    assert 0 <= low <= p + 1e-12
    assert p - 1e-12 <= high <= 1
    assert high - low > 1e-3
    assert share_interval([group[::-1] for group in groups[::-1]]) == close((low, high))
    assert share_interval([[1 - value for value in group] for group in groups]) == close((1 - high, 1 - low))
    assert half_width((low, high)) >= half_width(share_interval(flat(groups))) - 1e-12


@given(GROUPED.filter(lambda groups: len(groups) > 1), st.integers(2, 5))
def test_invariance_repeating_what_a_group_said_teaches_nothing(groups, times):
    """The interval of the mean stays; that of the share, corrected for few groups, never narrows."""
    repeated = [group * times for group in groups]
    assert mean_interval(repeated) == pytest.approx(mean_interval(groups), abs=1e-9)
    single = [group[:1] for group in groups]
    again = [group * times for group in single]
    assert half_width(share_interval(again)) >= half_width(share_interval(single)) - 1e-12


@pytest.mark.parametrize(("share", "at_least"), [pytest.param(0.5, 0.93, marks=pytest.mark.exhaustive), (0.9, 0.91)])
def test_coverage(share, at_least):
    """40 prompts with 5 pairs each, correlated 0.5 within a prompt (shares drawn from a beta distribution).

    95 % intervals hold the true share in 93 to 97 % of 600 data sets (91 near a border, where the variance of a few
    wrong prompts says little); as if all pairs were independent, in fewer than 82 %.
    """
    draw = random.Random(7)
    held = loose = 0
    for _ in range(600):
        shares = [draw.betavariate(share, 1 - share) for _ in range(40)]
        groups = [[float(draw.random() < own) for _ in range(5)] for own in shares]
        low, high = share_interval(groups)
        held += low <= share <= high
        low, high = share_interval(flat(groups))
        loose += low <= share <= high
    assert at_least <= held / 600 <= 0.97
    assert loose / 600 <= 0.82
