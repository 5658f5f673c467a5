"""`HEALTHY`: the usual range of a metric in a run that learns; torch- and matplotlib-free."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from heedful.training import thresholds

ROUNDING = 1e-6


class Band(NamedTuple):
    """The healthy values of a metric. They are a rule of thumb: a value outside is a reason to look, not an error."""

    low: float | None
    """None: no lower limit."""
    high: float | None
    """None: no upper limit."""
    source: str

    def __str__(self) -> str:
        if self.low is None:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"

    @property
    def limits(self) -> tuple[float, float]:
        """The limits, infinite where there is none."""
        return (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)

    def excess(self, value: float) -> float:
        """How far a value is outside; 0 within rounding, infinite if it is not finite."""
        low, high = self.limits
        distance = max(low - value, value - high, 0.0) if math.isfinite(value) else math.inf
        return distance if distance > ROUNDING else 0.0

    def widened(self, low: float, high: float, room: float) -> tuple[float, float]:
        """The ends of an axis, widened to show ``room`` of the band if all that was drawn is outside it."""
        least, most = self.limits
        return (most - room if low > most else low), (least + room if high < least else high)


HEALTHY: Mapping[str, Band] = {
    "policy/approx_kl": Band(
        None, thresholds.APPROX_KL, 'Spinning Up: a target of "usually small, 0.01 or 0.05"; the demo: at most 0.0017'
    ),
    "policy/clip_frac": Band(
        None, thresholds.CLIPPED, "the example log of Stable-Baselines3's PPO has 0.24; the demo: at most 0.009"
    ),
    "policy/ratio_max": Band(None, thresholds.RATIO, "the demo: at most 2.3"),
    "policy/effective_frac": Band(thresholds.EFFECTIVE, 1.0, "the demo: at least 0.996"),
    "value/explained_variance": Band(
        thresholds.EXPLAINED,
        1.0,
        "OpenAI Baselines: below 0 is worse than predicting zero; the demo rises from 0 to at least 0.53",
    ),
    "rollout/eos_frac": Band(
        1 - thresholds.CUT, 1.0, "a run warns when a tenth of the responses is cut (alarms); the demo: at least 0.996"
    ),
    "reference/kl": Band(
        None,
        thresholds.KL_MOST,
        "the limit of the demo's test in nats per response; eight seeds of the demo end at 0.94 to 1.19 "
        "(results/demo.md)",
    ),
}
"""By the name of the metric; docs/metrics.md has the same table."""
