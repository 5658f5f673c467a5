"""Sums of metrics over the micro-batches of a step."""

import itertools

import torch
from torch import Tensor

from heedful.core.policy_losses import Metrics
from heedful.distributed import ranks


class MetricSums:
    """Adds up metrics of micro-batches, which are shares of a step, and averages over steps. Of one whose name ends in
    ``_max`` it keeps the largest."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        """Of all ranks; with several they are on the CPU."""
        self._mine: dict[str, Tensor] = {}
        """Of this one, not yet in ``totals``; empty in one process."""

    def add(self, metrics: Metrics) -> None:
        """Add metrics of a micro-batch of this rank; with several ranks they count after `add_ranks`."""
        _add(self.totals if ranks.size() == 1 else self._mine, metrics)

    def add_whole(self, metrics: Metrics) -> None:
        """Add metrics that every rank has."""
        _add(self.totals, metrics if ranks.size() == 1 else {name: value.cpu() for name, value in metrics.items()})

    def add_ranks(self) -> "MetricSums":
        """Add up what the ranks have added since the last time; every rank calls it. Returns itself."""
        if ranks.size() == 1:
            return self
        ranks.all_well()
        mine, self._mine = self._mine, {}
        numbers = torch.stack([value.double() for value in mine.values()]).tolist() if mine else []
        shares = [(name, number, mine[name].dtype) for name, number in zip(mine, numbers, strict=True)]
        sums: dict[str, Tensor] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, number, dtype in itertools.chain.from_iterable(ranks.gather(shares)):
            dtypes[name] = dtype
            _add(sums, {name: torch.tensor(number, dtype=torch.float64)})
        _add(self.totals, {name: value.to(dtypes[name]) for name, value in sums.items()})
        return self

    def reset(self, totals: Metrics) -> None:
        """Go back to totals of before."""
        self.totals, self._mine = dict(totals), {}

    def are_finite(self) -> bool:
        """True if every sum is a finite number. This reads them once, so it waits for a GPU."""
        return not self.totals or bool(torch.stack([total.isfinite() for total in self.totals.values()]).all())

    def means(self, steps: int) -> dict[str, float]:
        """Sums divided by the number of optimizer steps they were taken over; maxima as they are."""
        return {name: float(total) / (1 if name.endswith("_max") else steps) for name, total in self.totals.items()}


def _add(totals: dict[str, Tensor], metrics: Metrics) -> None:
    for name, value in metrics.items():
        so_far = totals.get(name, torch.zeros((), device=value.device))
        totals[name] = torch.maximum(so_far, value) if name.endswith("_max") else so_far + value
