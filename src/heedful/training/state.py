"""The state of a run in memory: trained weights, optimizer and random generators, read and restored bit for bit.

Like torch's ``state_dict`` they are the tensors themselves; ``copy.deepcopy`` makes a copy.
"""

import copy
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from heedful.devices import random_states, set_random_states
from heedful.distributed.sharded_files import as_held
from heedful.training.compact_adamw import CompactAdamW


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Trainable weights by name. Frozen ones never change, so they are not part of a run's state."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_trained_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Restore trainable weights. Raises KeyError if the names differ from this module's."""
    own = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if own.keys() != weights.keys():
        raise KeyError(f"the state has other weights: {sorted(own.keys() ^ weights.keys())[:3]}")
    for name, parameter in own.items():
        parameter.copy_(as_held(weights[name], parameter))


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore an optimizer's state as a copy, so that its steps do not change ``state``; it keeps its own settings."""
    own = [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = optimizer.device if isinstance(optimizer, CompactAdamW) else None
    moments = {i: _held(values, parameters[i], device) for i, values in state["state"].items()}
    optimizer.load_state_dict({**state, "param_groups": copy.deepcopy(state["param_groups"]), "state": moments})
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)


def _held(values: Mapping[str, Any], parameter: Tensor, device: torch.device | None) -> dict[str, Any]:
    """A copy of the optimizer's state of one weight; tensors of the weight's shape are sharded like it."""
    return {
        name: as_held(value, parameter, device).clone()
        if getattr(value, "shape", None) == parameter.shape
        else copy.deepcopy(value)
        for name, value in values.items()
    }


def random_state(generator: torch.Generator) -> dict[str, Any]:
    """States of the run's, torch's and Python's generators, and of the accelerator's under its type, such as cuda."""
    return {
        "generator": generator.get_state(),
        "torch": torch.get_rng_state(),
        **random_states(),
        "python": random.getstate(),
    }


def set_random_state(generator: torch.Generator, state: Mapping[str, Any]) -> None:
    """Restore the generators from `random_state`."""
    generator.set_state(state["generator"])
    torch.set_rng_state(state["torch"])
    set_random_states(state)
    random.setstate(state["python"])


def scaler_state(module: nn.Module) -> dict[str, Any]:
    """State of a module's gradient scaler; empty if it has none."""
    scaler: torch.amp.GradScaler | None = getattr(module, "grad_scaler", None)
    return {} if scaler is None else scaler.state_dict()


def load_scaler_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Restore a gradient scaler's state."""
    scaler: torch.amp.GradScaler | None = getattr(module, "grad_scaler", None)
    if scaler is not None:
        scaler.load_state_dict(state)
