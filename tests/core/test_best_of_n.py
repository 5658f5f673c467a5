"""The best of n responses: the choice, what to expect of every k, and the KL of choosing, by hand and over all subsets."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import best_row, expected_best, kl_bound


def test_kl_bound_by_hand():
    """log n - (n - 1) / n: nothing is chosen among one; log 2 - 1/2; log 4 - 3/4."""
    assert kl_bound(1) == 0.0
    assert kl_bound(2) == pytest.approx(0.19314718055994531, abs=1e-15)
    assert kl_bound(4) == pytest.approx(0.6362943611198906, abs=1e-15)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_kl_bound_is_the_kl_where_no_two_score_the_same(n):
    """Over u in [0, 1], the quantile of a score, best-of-n has the density n u^(n-1): KL = integral of p log p."""
    steps = 200_000
    middles = ((i + 0.5) / steps for i in range(steps))
    integral = sum((p := n * u ** (n - 1)) * math.log(p) for u in middles if u > 1e-12) / steps
    assert kl_bound(n) == pytest.approx(integral, abs=1e-8)


def test_the_best_is_the_first_of_the_highest():
    assert [best_row(scores) for scores in ([3.0], [1.0, 3.0, 2.0], [0.0, 2.0, 2.0], [-1.0, -1.0])] == [0, 1, 1, 0]


def test_expected_best_by_hand():
    """Scores 1, 3, 2. Of two: pairs (1, 3), (1, 2), (3, 2) have the best 3, 2, 3. A judge gives those 10, 30, 50."""
    assert expected_best([1.0, 3.0, 2.0], [1.0, 3.0, 2.0]) == pytest.approx([2.0, 8 / 3, 3.0], abs=1e-12)
    assert expected_best([1.0, 3.0, 2.0], [10.0, 30.0, 50.0]) == pytest.approx([30.0, 110 / 3, 30.0], abs=1e-12)


@given(
    st.lists(st.tuples(st.integers(0, 3).map(float), st.integers(-9, 9).map(float)), min_size=1, max_size=7),
)
def test_expected_best_is_the_mean_over_all_subsets(pairs):
    """Few different scores, so that ties are frequent: of equal ones the first is taken, in every subset."""
    scores, values = zip(*pairs, strict=True)
    by_hand = []
    for k in range(1, len(pairs) + 1):
        subsets = list(itertools.combinations(range(len(pairs)), k))
        best = [rows[best_row([scores[row] for row in rows])] for rows in subsets]
        by_hand.append(sum(values[row] for row in best) / len(subsets))
    assert expected_best(scores, values) == pytest.approx(by_hand, abs=1e-12)
    assert expected_best(scores, values)[-1] == values[best_row(scores)]
