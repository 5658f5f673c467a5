"""Means with their 95 % intervals."""

from collections.abc import Sequence


def mean_and_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean of values as ``mean``, and the half-width of its 95 % interval as ``interval_95``.

    The interval uses the normal approximation and the sample variance; a single value has none (None).
    """
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return {"mean": mean, "interval_95": None}
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return {"mean": mean, "interval_95": 1.96 * (variance / n) ** 0.5}


def clustered_interval(groups: Sequence[Sequence[float]]) -> float:
    """Return the half-width of the 95 % interval of the mean over all values of all groups, with equal weights.

        1.96 / n sqrt(sum_g (sum_{i in g} (x_i - mean))^2)

    Groups are independent of each other; values of one group need not be. For groups of one value this is
    ``1.96 sqrt(variance / n)`` with the population variance; for a share p, ``1.96 sqrt(p (1 - p) / n)``.
    """
    n = sum(len(group) for group in groups)
    mean = sum(sum(group) for group in groups) / n
    return 1.96 / n * sum(sum(value - mean for value in group) ** 2 for group in groups) ** 0.5


def prompt_means(values: Sequence[float], samples_per_prompt: int) -> list[float]:
    """Return the mean of each prompt's ``samples_per_prompt`` consecutive values.

    Prompts are independent of each other; responses to one prompt are not. So intervals are computed over these means. For
    prompts with equally many responses this is the standard error clustered by prompt (Miller 2024, "Adding Error Bars to
    Evals").
    """
    assert len(values) % samples_per_prompt == 0
    return [
        sum(values[start : start + samples_per_prompt]) / samples_per_prompt
        for start in range(0, len(values), samples_per_prompt)
    ]
