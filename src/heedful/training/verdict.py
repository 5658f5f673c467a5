"""Whether a run made its model better: the difference of its last evaluation from its first, over the same prompts."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from heedful.core.intervals import mean_interval
from heedful.display import counted

FEWEST = 10
"""Prompts. The interval of a mean of fewer is too short: it takes their deviation for known."""
Shares = Sequence[tuple[float, float]]
"""What each record adds to a mean: a sum, and the number of what is averaged (tokens, pairs, responses)."""


@dataclass(frozen=True)
class Yardstick:
    """The metric of evaluations by which a run is judged: ``sum of sums / sum of counts`` over held-out records."""

    metric: str
    higher_is_better: bool
    prompts: Sequence[str]
    """The prompt of each record. Records of one prompt are not independent."""

    @property
    def identity(self) -> str:
        """A hash of the prompts, for checkpoints."""
        return hashlib.sha256("\0".join(self.prompts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Verdict(NamedTuple):
    """What a run did to its model on held-out data."""

    metric: str
    first: float
    """Of the model that the run started from."""
    last: float
    """Of the model that it left."""
    interval: tuple[float, float] | None
    """95 % confidence interval of ``last - first``, paired by record; None for fewer than `FEWEST` prompts."""
    prompts: int
    """Number of held-out prompts that both were measured on."""
    verdict: str
    """better, worse, noise (the interval has 0 inside), or unknown (without an interval)."""

    def __str__(self) -> str:
        values = f"{self.metric} {self.first:.4g} -> {self.last:.4g} on {counted(self.prompts, 'held-out prompt')}"
        if self.interval is None:
            return (
                f"better or worse is not known: {values}, too few to tell; hold out 30 or more (--eval-fraction, "
                "--eval-data)"
            )
        word = "no better and no worse beyond noise" if self.verdict == "noise" else self.verdict
        low, high = self.interval
        return f"{word}: {values}; change {self.last - self.first:+.3g}, 95 % interval {low:+.3g} to {high:+.3g}"

    @classmethod
    def read(cls, summary: dict[str, Any]) -> "Verdict | None":
        """The verdict in a run's summary; None if it has none."""
        found = summary.get("verdict")
        if not isinstance(found, dict) or set(found) != set(cls._fields):
            return None
        return cls(**found | {"interval": None if found["interval"] is None else tuple(found["interval"])})


def judge(yardstick: Yardstick, first: Shares, last: Shares) -> Verdict | None:
    """Compare two evaluations on the records that both measured.

        m = sum_i (b_i - a_i) / sum_i n_i

    ``a_i`` and ``b_i`` are a record's sums in both, ``n_i`` its count. The interval is that of the mean of
    ``m + (b_i - a_i - m n_i) N / sum n`` over the N records, which linearises the ratio (Cochran 1977, section 2.11),
    grouped by prompt (`mean_interval`).

    None if no record was measured in both.
    """
    both = [
        (prompt, a, b, count)
        for prompt, (a, number), (b, count) in zip(yardstick.prompts, first, last, strict=True)
        if number == count > 0 and math.isfinite(a) and math.isfinite(b)
    ]
    if not both:
        return None
    total = math.fsum(count for _, _, _, count in both)
    before, after = math.fsum(a for _, a, _, _ in both) / total, math.fsum(b for _, _, b, _ in both) / total
    change = math.fsum(b - a for _, a, b, _ in both) / total
    groups: dict[str, list[float]] = {}
    for prompt, a, b, count in both:
        groups.setdefault(prompt, []).append(change + (b - a - change * count) * len(both) / total)
    interval = mean_interval(list(groups.values())) if len(groups) >= FEWEST else None
    verdict = "unknown"
    if interval is not None:
        rises, falls = interval[0] > 0, interval[1] < 0
        verdict = "noise" if not (rises or falls) else "better" if rises == yardstick.higher_is_better else "worse"
    return Verdict(yardstick.metric, before, after, interval, len(groups), verdict)
