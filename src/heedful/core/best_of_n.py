"""Best-of-n sampling: of n responses, keep the one with the highest score.

It needs no optimisation, so it is a baseline for everything that optimises.
"""

import functools
import math
from collections.abc import Sequence

__all__ = ["best_row", "expected_best", "kl_bound"]


def best_row(scores: Sequence[float]) -> int:
    """Index of the highest score; the first of equal ones."""
    return max(range(len(scores)), key=lambda row: (scores[row], -row))


def expected_best(scores: Sequence[float], values: Sequence[float]) -> list[float]:
    """Expected value of the best of k responses, for k = 1 to n, estimated without bias from n responses.

        E_k = 1 / C(n, k) sum_i C(i - 1, k - 1) values[i]        rows in order of ascending score, i from 1

    This is the mean, over all subsets of k rows, of the value of the row that `best_row` picks (Nakano et al. 2021,
    "WebGPT", appendix I).

    Args:
        scores: what the response is chosen by.
        values: what the chosen response is worth: the scores themselves, or the scores of a judge.

    The first result (k = 1) is the mean of all values, the last (k = n) the value of the best response.
    """
    n = len(scores)
    ascending = [values[row] for row in sorted(range(n), key=lambda row: (scores[row], -row))]
    return [
        sum(share * value for share, value in zip(_shares_of_subsets(n, k), ascending, strict=True))
        for k in range(1, n + 1)
    ]


def kl_bound(n: int) -> float:
    """Upper bound of the KL of best-of-n to the sampled model, in nats per response: ``log n - (n - 1) / n``.

    Stiennon et al. 2020 and Gao et al. 2023 give it as the KL itself. It is the KL if no response is sampled twice and
    no two score the same; otherwise the KL is smaller (Beirami et al. 2024).
    """
    return math.log(n) - (n - 1) / n


@functools.cache
def _shares_of_subsets(n: int, k: int) -> tuple[float, ...]:
    """For each of n rows in ascending order, the share of all subsets of k rows in which it is the highest."""
    return tuple(math.comb(below, k - 1) / math.comb(n, k) for below in range(n))
