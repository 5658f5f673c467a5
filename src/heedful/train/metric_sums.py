"""Sums of metrics over the micro-batches of a step."""

import torch
from torch import Tensor

from heedful.core.policy_losses import Metrics


class MetricSums:
    """Adds up metrics of micro-batches, which are shares of a step, and averages over steps. Of one whose name ends in
    ``_max`` it keeps the largest."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def add(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            so_far = self.totals.get(name, torch.zeros((), device=value.device))
            self.totals[name] = torch.maximum(so_far, value) if name.endswith("_max") else so_far + value

    def are_finite(self) -> bool:
        """True if every sum is a finite number. This reads them once, so it waits for a GPU."""
        return not self.totals or bool(torch.stack([total.isfinite() for total in self.totals.values()]).all())

    def means(self, steps: int) -> dict[str, float]:
        """Sums divided by the number of optimizer steps they were taken over; maxima as they are."""
        return {name: float(total) / (1 if name.endswith("_max") else steps) for name, total in self.totals.items()}
