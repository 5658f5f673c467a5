"""The best of n responses: the choice, what to expect of every k, and the KL of choosing, by hand and over all subsets."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import best_row, expected_best, kl_bound, n_of_kl, pass_at_k


def test_kl_bound_by_hand():
    """log n - (n - 1) / n: nothing is chosen among one; log 2 - 1/2; log 4 - 3/4."""
    assert kl_bound(1) == 0.0
    assert kl_bound(2) == pytest.approx(0.19314718055994531, abs=1e-15)
    assert kl_bound(4) == pytest.approx(0.6362943611198906, abs=1e-15)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_kl_bound_is_the_kl_where_no_two_score_the_same(n):
    """Over u in [0, 1], the quantile of a score, best-of-n has the density n u^(n-1): KL = integral of p log p."""
    middles = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    p = n * middles ** (n - 1)
    assert kl_bound(n) == pytest.approx(float((p * p.log()).mean()), abs=1e-8)


def test_the_best_is_the_first_of_the_highest():
    assert [best_row(scores) for scores in ([3.0], [1.0, 3.0, 2.0], [0.0, 2.0, 2.0], [-1.0, -1.0])] == [0, 1, 1, 0]


def test_expected_best_by_hand():
    """Scores 1, 3, 2. Of two: pairs (1, 3), (1, 2), (3, 2) have the best 3, 2, 3. A judge gives those 10, 30, 50."""
    assert expected_best([1.0, 3.0, 2.0], [1.0, 3.0, 2.0]) == pytest.approx([2.0, 8 / 3, 3.0], abs=1e-12)
    assert expected_best([1.0, 3.0, 2.0], [10.0, 30.0, 50.0]) == pytest.approx([30.0, 110 / 3, 30.0], abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 3).map(float), st.integers(-9, 9).map(float)), min_size=1, max_size=7))
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


def test_pass_at_k_by_hand():
    """Two of four are correct: of the six pairs only one has none. Three of ten: 21 of the 252 fives have none."""
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6, abs=1e-15)
    assert pass_at_k(10, 3, 5) == pytest.approx(11 / 12, abs=1e-15)
    assert pass_at_k(10, 3, 1) == 0.3
    assert pass_at_k(3, 1, 3) == 1.0
    assert pass_at_k(3, 0, 3) == 0.0


@pytest.mark.parametrize(("n", "correct", "k"), [(200, 13, 100), (200, 1, 10), (100, 99, 1), (100, 99, 2), (5, 5, 5)])
def test_pass_at_k_is_the_product_of_the_paper(n, correct, k):
    """Chen et al. 2021, figure 3: 1 - prod over i from n - c + 1 to n of (1 - k / i), and 1 if fewer than k are wrong."""
    product = math.prod(1 - k / i for i in range(n - correct + 1, n + 1))
    assert pass_at_k(n, correct, k) == pytest.approx(1.0 if n - correct < k else 1 - product, abs=1e-12)


def test_pass_at_k_of_many_responses_neither_overflows_nor_cancels():
    """One of 100,000 is correct: k in 100,000, to the last digit. C(10,000, 5,000) has thousands of digits."""
    assert pass_at_k(100_000, 1, 7) == 7e-5
    assert pass_at_k(100_000, 99_999, 1) == 0.99999
    assert pass_at_k(10_000, 1, 5_000) == 0.5


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 2, 5), (4, 2, 0), (4, 2, -1), (4, 5, 2), (4, -1, 2), (0, 0, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(n, correct, k):
    with pytest.raises(ValueError, match=r"pass_at_k: .* must be between"):
        pass_at_k(n, correct, k)


def test_expected_best_of_some_sizes():
    every = expected_best([1.0, 3.0, 2.0, 0.5], [10.0, 30.0, 50.0, 7.0])
    assert expected_best([1.0, 3.0, 2.0, 0.5], [10.0, 30.0, 50.0, 7.0], sizes=[4, 2]) == [every[3], every[1]]
    with pytest.raises(ValueError, match=r"expected_best: sizes must be from 1 to the 4 responses, got \[0, 5\]"):
        expected_best([1.0, 3.0, 2.0, 0.5], [10.0, 30.0, 50.0, 7.0], sizes=[0, 5])


def test_n_of_kl_by_hand():
    assert n_of_kl(0.0) == 1.0
    assert n_of_kl(0.19314718055994531) == pytest.approx(2.0, rel=1e-14)
    assert n_of_kl(0.6362943611198906) == pytest.approx(4.0, rel=1e-14)
    assert n_of_kl(709.0) == math.inf
    with pytest.raises(ValueError, match="n_of_kl: the KL must be at least 0, got -1"):
        n_of_kl(-1.0)


@given(st.floats(1e-12, 700))
def test_n_of_kl_is_the_inverse_of_kl_bound(kl):
    n = n_of_kl(kl)
    assert math.log(n) + math.expm1(-math.log(n)) == pytest.approx(kl, rel=1e-9, abs=1e-12)
