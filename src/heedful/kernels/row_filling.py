"""Fewer shapes of matrix products where each costs: in half precision on a CPU oneDNN compiles every shape it meets."""

import torch

MULTIPLE = 64
"""What the rows of a product, real ones and filling, are a multiple of."""
MOST_FILLING = 2**30
"""Filling rows times weights: beyond, computing them takes longer than to compile a new shape, 1 to 7 ms a product."""


def compiles_each_shape(device: torch.device) -> bool:
    """Whether the products of this moment are compiled for their shape."""
    return device.type == "cpu" and torch.is_autocast_enabled("cpu")


def filling(count: int, device: torch.device, *, weights: int) -> int:
    """Rows to add to ``count`` that mean nothing, each to be multiplied by ``weights`` numbers; 0 where they do not pay."""
    missing = -count % MULTIPLE
    return missing if compiles_each_shape(device) and missing * weights <= MOST_FILLING else 0
