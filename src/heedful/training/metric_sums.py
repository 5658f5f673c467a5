"""Sums of metrics over the micro-batches of a step."""

import itertools
from collections import defaultdict

import torch
from torch import Tensor

from heedful.core.policy_losses import Metrics
from heedful.distributed import ranks


class MetricSums:
    """Sums metrics of micro-batches (shares of a step) and averages over steps. Metrics named ``*_max`` keep their
    maximum."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        """Sums over all ranks; on the CPU if there are several."""
        self._mine: dict[str, Tensor] = {}
        """Sums of this rank, not yet in ``totals``; empty in a single process."""

    def add(self, metrics: Metrics) -> None:
        """Add metrics of this rank's micro-batch; with several ranks they enter the totals in `add_ranks`."""
        _add(self.totals if ranks.size() == 1 else self._mine, metrics)

    def add_whole(self, metrics: Metrics) -> None:
        """Add metrics that are already equal on all ranks."""
        _add(self.totals, metrics if ranks.size() == 1 else {name: value.cpu() for name, value in metrics.items()})

    def add_ranks(self) -> "MetricSums":
        """Sum the ranks' metrics since the last call into the totals. Collective. Returns itself."""
        if ranks.size() == 1:
            return self
        ranks.raise_peer_errors()
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
        """Restore earlier totals."""
        self.totals, self._mine = dict(totals), {}

    def are_finite(self, *conditions: Tensor) -> bool:
        """True if every sum is finite, and each of some further conditions holds. Synchronises with a GPU, once."""
        every = [torch.stack([*self.totals.values()]).isfinite().all()] if self.totals else []
        return not every or bool(torch.stack([*every, *conditions]).all())

    def means(self, steps: int) -> dict[str, float]:
        """Sums divided by the number of optimizer steps; maxima unchanged."""
        totals = read(self.totals)
        return {name: total / (1 if name.endswith("_max") else steps) for name, total in totals.items()}


def read(metrics: Metrics) -> dict[str, float]:
    """Numbers of 0-dim tensors. Synchronises with a GPU, once for each dtype."""
    alike = defaultdict[tuple[torch.device, torch.dtype], list[str]](list)
    for name, value in metrics.items():
        alike[value.device, value.dtype].append(name)
    numbers = dict[str, float]()
    for names in alike.values():
        numbers |= zip(names, map(float, torch.stack([metrics[name] for name in names]).tolist()), strict=True)
    return {name: numbers[name] for name in metrics}


def _add(totals: dict[str, Tensor], metrics: Metrics) -> None:
    for name, value in metrics.items():
        so_far = totals[name] if name in totals else torch.zeros((), device=value.device)
        totals[name] = torch.maximum(so_far, value) if name.endswith("_max") else so_far + value
