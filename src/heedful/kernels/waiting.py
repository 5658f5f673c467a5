"""A frozen model that waits in main memory, and is on its device only while it is read."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from heedful.devices import capabilities, synchronize


class _Waiting(NamedTuple):
    """Where a waiting model is read, and its weights in main memory."""

    device: torch.device
    weights: list[Tensor]


_WAITING: WeakKeyDictionary[nn.Module, _Waiting] = WeakKeyDictionary()


def wait_on_host(model: nn.Module, device: torch.device) -> None:
    """Move a frozen model's weights to main memory, in place, until it is read (`on_device`). Buffers stay on ``device``.

    From CUDA torch copies without waiting into pinned memory, which the device later reads at full speed.
    """
    weights = [weight.detach().to("cpu", non_blocking=True) for weight in model.parameters()]
    synchronize(device)
    _WAITING[model] = _Waiting(device, weights)
    _put(model, weights)


@contextlib.contextmanager
def on_device(model: nn.Module) -> Iterator[None]:
    """In this context, a model that waits in main memory is on its device. No effect on other models.

    Its weights are copied to the device as a whole, once for all passes in the context. Afterwards these copies are dropped:
    the weights in main memory are still there, so nothing is copied back.
    """
    waiting = _WAITING.get(model)
    if waiting is None:
        yield
        return
    try:
        waits = not capabilities(waiting.device).stages_copies
        _put(model, [weight.to(waiting.device, non_blocking=not waits) for weight in waiting.weights])
        yield
    finally:
        _put(model, waiting.weights)


def _put(model: nn.Module, weights: list[Tensor]) -> None:
    """Let the parameters of a model have these numbers, on any device; a tied one stays tied."""
    new = {id(parameter): weight for parameter, weight in zip(model.parameters(), weights, strict=True)}
    model._apply(lambda tensor: new.get(id(tensor), tensor))
