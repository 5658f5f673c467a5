"""Exponential moving average (EMA) of weights in training."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from heedful.distributed.sharded_files import as_held
from heedful.distributed.sharding import exchange, is_divided


class WeightAverage:
    """``average <- decay * average + (1 - decay) * weights`` after every optimizer step, starting from the initial
    weights.

    Ouyang et al. 2022 (appendix C.4, decay 0.992). Weights that do not require grad are not averaged.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._average = [parameter.detach().clone() for parameter in self._weights]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {str(i): average.detach() for i, average in enumerate(self._average)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        for i, average in enumerate(self._average):
            average.copy_(as_held(state[str(i)], average))

    @torch.no_grad()
    def update(self) -> None:
        """Call after each optimizer step."""
        for average, weight in zip(self._average, self._weights, strict=True):
            average.lerp_(weight, 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the average as the module's weights in this context; restores its own weights bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for average, weight in zip(self._average, self._weights, strict=True):
            if is_divided(weight):
                exchange(average, weight)
            else:
                average.data, weight.data = weight.data, average.data


@contextlib.contextmanager
def averaged(average: WeightAverage | None) -> Iterator[None]:
    """`WeightAverage.in_place`, or nothing if there is no average."""
    with contextlib.nullcontext() if average is None else average.in_place():
        yield
