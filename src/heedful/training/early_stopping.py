"""Early stopping: the best evaluation so far, and the number since."""

import math
from collections.abc import Iterable, Mapping
from typing import Any


class EarlyStopping:
    """Stops after ``patience`` evaluations in a row without improvement; 0 never stops."""

    def __init__(self, patience: int, *, higher_is_better: bool) -> None:
        self.patience = patience
        self.sign = 1.0 if higher_is_better else -1.0
        self.best: float | None = None
        self.best_step = 0
        self.without_improvement = 0

    def update(self, value: float, step: int) -> bool:
        """Record an evaluation. True if ``value`` is the best so far."""
        if self.would_improve([value]):
            self.best, self.best_step, self.without_improvement = value, step, 0
            return True
        self.without_improvement += 1
        return False

    def would_improve(self, values: Iterable[float]) -> bool:
        """True if any of the values is better than the best so far; non-finite values never are."""
        finite = (value for value in values if math.isfinite(value))
        return any(self.best is None or self.sign * value > self.sign * self.best for value in finite)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "without_improvement": self.without_improvement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step = state["best"], state["best_step"]
        self.without_improvement = state["without_improvement"]

    @property
    def exhausted(self) -> bool:
        return self.patience > 0 and self.without_improvement >= self.patience
