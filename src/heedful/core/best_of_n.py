"""Best-of-n sampling, which keeps the highest-scoring of n responses, and pass@k, the chance that any of k is correct.

Best-of-n needs no training, so it is a baseline for every training algorithm.
"""

import functools
import math
from collections.abc import Sequence

__all__ = ["best_row", "expected_best", "kl_bound", "n_of_kl", "pass_at_k"]


def best_row(scores: Sequence[float]) -> int:
    """Index of the highest score; the first one if several are equal."""
    return max(range(len(scores)), key=lambda row: (scores[row], -row))


def expected_best(
    scores: Sequence[float], values: Sequence[float], *, sizes: Sequence[int] | None = None
) -> list[float]:
    """Expected value of the best of k responses, for k = 1 to n, estimated without bias from n responses.

        E_k = 1 / C(n, k) sum_i C(i - 1, k - 1) values[i]        rows in order of ascending score, i from 1

    This is the mean, over all subsets of k rows, of the value of the row that `best_row` picks (Nakano et al. 2021,
    "WebGPT", appendix I).

    Args:
        scores: select the response.
        values: measure the selected response: the scores themselves, or a judge's scores.
        sizes: the k to estimate; None is 1 to n.

    The first result (k = 1) is the mean of all values, the last (k = n) the value of the best response.

    Raises ValueError if ``scores`` and ``values`` differ in length, or a k is not from 1 to n.
    """
    n = len(scores)
    if len(values) != n:
        raise ValueError(f"expected_best: scores has {n} responses, but values has {len(values)}")
    sizes = range(1, n + 1) if sizes is None else sizes
    if any(not 1 <= k <= n for k in sizes):
        raise ValueError(f"expected_best: sizes must be from 1 to the {n} responses, got {list(sizes)}")
    ascending = [values[row] for row in sorted(range(n), key=lambda row: (scores[row], -row))]
    return [sum(share * value for share, value in zip(_shares_of_subsets(n, k), ascending, strict=True)) for k in sizes]


def kl_bound(n: int) -> float:
    """Upper bound of the KL from best-of-n to the model it samples, in nats per response: ``log n - (n - 1) / n``.

    Stiennon et al. 2020 and Gao et al. 2023 give it as the KL itself. It is the KL if no response is sampled twice and
    no two score the same; otherwise the KL is smaller (Beirami et al. 2024).
    """
    return math.log(n) - (n - 1) / n


def n_of_kl(kl: float) -> float:
    """The n of best-of-n with a KL of `kl_bound`, its inverse: ``log n - (n - 1) / n = kl``; a real number from 1.

        n = -1 / W(-exp(-kl - 1))        W the principal branch of Lambert's function

    found by Newton's method in log n. Infinity where n would exceed the range of floating-point numbers (a KL above 708).

    Raises ValueError if ``kl`` is negative.
    """
    if not kl >= 0:
        raise ValueError(f"n_of_kl: the KL must be at least 0, got {kl}")
    if kl > 708:
        return math.inf
    log_n = kl + 1 if kl > 1 else math.sqrt(2 * kl) + kl  # above the solution, or close to it
    for _ in range(60):
        step = (log_n + math.expm1(-log_n) - kl) / -math.expm1(-log_n) if log_n else 0.0
        log_n -= step
        if abs(step) <= 1e-15 * log_n:
            break
    return math.exp(log_n)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of k responses is correct, estimated without bias from n (Chen et al. 2021, eq. 1).

        1 - C(n - correct, k) / C(n, k)

    This is the share of all k-subsets of the n responses with at least one correct response. ``1 - (1 - correct /
    n)^k`` would be biased downwards. The binomials are exact integers: no overflow, no cancellation.

    Args:
        n: number of responses sampled for a prompt.
        correct: number of correct ones.
        k: number of tries per prompt.

    Raises ValueError if ``k`` is not between 1 and n, or ``correct`` not between 0 and n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass_at_k: k must be between 1 and the {n} responses, got {k}")
    if not 0 <= correct <= n:
        raise ValueError(f"pass_at_k: correct must be between 0 and the {n} responses, got {correct}")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - correct, k)) / subsets


@functools.cache
def _shares_of_subsets(n: int, k: int) -> tuple[float, ...]:
    """For each of n rows in ascending order, the share of all k-subsets in which it is the highest."""
    return tuple(math.comb(below, k - 1) / math.comb(n, k) for below in range(n))
