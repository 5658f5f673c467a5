"""`HEALTHY`: between which values a metric stays in a run that learns; torch- and matplotlib-free."""

from collections.abc import Mapping
from typing import NamedTuple


class Band(NamedTuple):
    """The healthy values of a metric. They are a rule of thumb: leaving them is a reason to look, not an error."""

    low: float | None
    """None: no lower limit."""
    high: float | None
    """None: no upper limit."""
    source: str
    """Where the limits come from."""


HEALTHY: Mapping[str, Band] = {
    "policy/approx_kl": Band(None, 0.05, "docs/metrics.md"),
    "policy/clip_frac": Band(None, 0.3, "docs/metrics.md"),
    "policy/ratio_max": Band(None, 3.0, "docs/metrics.md"),
    "value/explained_variance": Band(0.0, 1.0, "docs/metrics.md"),
    "rollout/eos_frac": Band(0.9, 1.0, "docs/metrics.md"),
    "reference/kl": Band(None, 20.0, "docs/metrics.md"),
}
"""By the name of the metric; docs/metrics.md has the same table with reasons."""
