"""What ends an online run, or is reported of it, besides numbers that are not finite: KL beyond a limit or near 0, jumps."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from heedful.display import say
from heedful.errors import TrainingError

KL_STEPS = 3
"""A run ends once its KL has been above ``max_kl`` in so many steps in a row: that of one step is a noisy estimate."""
JUMP, SETTLED = 10.0, 5
"""Scores jump if their root mean square is this many times the largest so far, after so many steps."""
CUT = 0.1
"""The share of responses cut by their length from which on a run says so."""
STILL, STILL_STEPS = 0.01, 10
"""A policy has hardly moved if its mean KL over the last so many steps is below this, in nats per response."""


@dataclass
class Health:
    """What earlier steps were like; part of a run's state."""

    kl_above: int = 0
    """Steps in a row with a KL above the limit."""
    largest_scores: float = 0.0
    """The largest root mean square of a step's scores."""
    has_told_cut: bool = False
    """Whether the run has said that responses are cut by their length."""
    recent_kl: list[float] = field(default_factory=list)
    """The KL of the last `STILL_STEPS` steps that measured one."""

    def watch(
        self, step: int, metrics: Mapping[str, float], *, max_kl: float | None, longest: int | None = None
    ) -> None:
        """Look at a step's metrics. Raises TrainingError if KL has been above ``max_kl`` in `KL_STEPS` steps in a row.

        A step that measured no KL neither counts nor ends the row. ``longest`` is the length at which responses are cut, None
        if all have the same.
        """
        cut = 1 - metrics.get("rollout/eos_frac", 1.0)
        if longest is not None and cut >= CUT and not self.has_told_cut:
            self.has_told_cut = True
            say(
                f"step {step}: {cut:.0%} of the responses were cut at --max-new-tokens {longest}, before their end, and are "
                "scored as unfinished texts; raise it if they should come to an end"
            )
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
            self.recent_kl = [*self.recent_kl, kl][-STILL_STEPS:]
            self.kl_above = self.kl_above + 1 if is_above else 0
        if is_above and self.kl_above >= KL_STEPS:
            raise TrainingError(
                f"reference/kl, {kl:.4g} nats per response at step {step}, has been above --max-kl {max_kl:g} in {KL_STEPS} "
                "steps in a row: the policy is too far from its reference. Raise --kl-coef or lower --learning-rate; "
                "--max-kl sets the limit"
            )

    def tell_end(self, learning_rate: float) -> None:
        """Report at the end of a run if the policy has hardly changed, and the setting to raise."""
        kl = sum(self.recent_kl) / STILL_STEPS
        if len(self.recent_kl) == STILL_STEPS and abs(kl) < STILL:
            say(
                f"reference/kl is still near 0 at the end ({kl:.1g} nats per response in the last {STILL_STEPS} steps): "
                "the policy has hardly moved, so it has learned next to nothing. Raise --learning-rate (it was "
                f"{learning_rate:g}; try {10 * learning_rate:g}) or --steps"
            )

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kl_above, self.largest_scores = int(state["kl_above"]), state["largest_scores"]
        self.recent_kl = list(state.get("recent_kl", []))  # no earlier version kept these
        self.has_told_cut = state.get("has_told_cut", False)
