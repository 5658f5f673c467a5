"""Classes that take the place of a model's own on a CPU, and compute the same in fewer passes over memory."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


class LeanClasses:
    """The classes of one kind of module. Names of parameters, and saved files, stay the same.

    Args:
        make: returns the class that takes a module's place, None if it stays as it is. It is asked once for each class.
    """

    def __init__(self, make: Callable[[nn.Module], type[nn.Module] | None]) -> None:
        self.make = make
        self.made: dict[type[nn.Module], type[nn.Module] | None] = {}

    def use(self, module: nn.Module) -> None:
        """Give a module its class, in place."""
        kind = type(module)
        if kind not in self.made:
            self.made[kind] = lean = self.make(module)
            if lean is not None:
                self.made[lean] = lean
        module.__class__ = self.made[kind] or kind

    def use_in(self, model: M, device: torch.device) -> M:
        """The same for every module of a model, if that is where the model will be: on a CPU."""
        for module in model.modules() if device.type == "cpu" else ():
            self.use(module)
        return model
