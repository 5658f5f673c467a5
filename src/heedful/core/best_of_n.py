"""Best-of-n sampling: of n responses the one with the highest score is taken. No optimisation, so a baseline for it."""

import functools
import math
from collections.abc import Sequence

__all__ = ["best_row", "expected_best", "kl_bound"]


def best_row(scores: Sequence[float]) -> int:
    """Where the highest score stands; of equal ones the first."""
    return max(range(len(scores)), key=lambda row: (scores[row], -row))


def expected_best(scores: Sequence[float], values: Sequence[float]) -> list[float]:
    """For k = 1 to n, the expected value of the response with the highest score among k, without bias from n responses.

    ``1 / C(n, k) sum_i C(i - 1, k - 1) values[i]`` over the rows in order of ascending score, i from 1: the mean, over all
    subsets of k rows, of the value of the row that `best_row` takes (Nakano et al. 2021, "WebGPT", appendix I). Where
    ``values`` are the scores it is the expected best score; where they are a judge's, what the choice is worth to that judge.
    k = 1 gives the mean, k = n the value of the best.
    """
    n = len(scores)
    ascending = [values[row] for row in sorted(range(n), key=lambda row: (scores[row], -row))]
    return [
        sum(share * value for share, value in zip(_shares_of_subsets(n, k), ascending, strict=True))
        for k in range(1, n + 1)
    ]


def kl_bound(n: int) -> float:
    """Upper bound of the KL of best-of-n to the model that it samples, ``log n - (n - 1) / n``, in nats a response.

    Stiennon et al. 2020 and Gao et al. 2023 give it as the KL itself, which it is where no response is sampled twice and
    no two score the same; elsewhere the KL is smaller (Beirami et al. 2024).
    """
    return math.log(n) - (n - 1) / n


@functools.cache
def _shares_of_subsets(n: int, k: int) -> tuple[float, ...]:
    """For each of n rows in ascending order, the share of subsets of k rows in which it is the highest."""
    return tuple(math.comb(below, k - 1) / math.comb(n, k) for below in range(n))
