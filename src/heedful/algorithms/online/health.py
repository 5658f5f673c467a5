"""What ends an online run, or is said about it, besides numbers that are not finite: KL beyond a limit, scores that jump."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from heedful.display import say
from heedful.errors import TrainingError

KL_STEPS = 3
"""A run ends once its KL has been above ``max_kl`` in so many steps in a row: that of one step is a noisy estimate."""
JUMP, SETTLED = 10.0, 5
"""Scores jump if their root mean square is this many times the largest so far, after so many steps."""


@dataclass
class Health:
    """What earlier steps were like; part of a run's state."""

    kl_above: int = 0
    """Steps in a row with a KL above the limit."""
    largest_scores: float = 0.0
    """The largest root mean square of a step's scores."""

    def watch(self, step: int, metrics: Mapping[str, float], *, max_kl: float | None) -> None:
        """Look at a step's metrics. Raises TrainingError if KL has been above ``max_kl`` in `KL_STEPS` steps in a row.

        A step that measured no KL neither counts nor ends the row.
        """
        size = math.hypot(metrics["reward/score_mean"], metrics["reward/score_std"])
        if step > SETTLED and 0 < JUMP * self.largest_scores < size:
            say(
                f"step {step}: the scores are {size / self.largest_scores:.3g} times as large as in any step before "
                f"(root mean square {size:.3g}); if the reward did not change its scale on purpose, look at samples.jsonl"
            )
        self.largest_scores = max(self.largest_scores, size)
        kl = metrics.get("reference/kl", math.nan)  # none in a step whose only update was left out
        is_above = max_kl is not None and kl > max_kl
        if not math.isnan(kl):
            self.kl_above = self.kl_above + 1 if is_above else 0
        if is_above and self.kl_above >= KL_STEPS:
            raise TrainingError(
                f"reference/kl, {kl:.4g} nats per response at step {step}, has been above --max-kl {max_kl:g} in {KL_STEPS} "
                "steps in a row: the policy has left its reference behind. Raise --kl-coef or lower --learning-rate; "
                "--max-kl sets the limit"
            )

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.kl_above, self.largest_scores = int(state["kl_above"]), state["largest_scores"]
