"""Fewer shapes of matrix products where each shape costs: on a CPU, oneDNN compiles every new one in half precision."""

import torch

MULTIPLE = 64
"""Rows of a product are filled up to a multiple of this."""
MOST_FILLING = 2**30
"""Most filling rows times weights. Above it, computing them takes longer than compiling a new shape, 1 to 7 ms per
product."""


def compiles_each_shape(device: torch.device) -> bool:
    """Whether matrix products are currently compiled for each shape."""
    return device.type == "cpu" and torch.is_autocast_enabled("cpu")


def filling(count: int, device: torch.device, *, weights: int) -> int:
    """Number of meaningless rows to add, so that products have few different shapes; 0 if adding does not pay.

    Args:
        count: number of real rows.
        device: where the products are computed.
        weights: number of weights that each row is multiplied by.
    """
    missing = -count % MULTIPLE
    return missing if compiles_each_shape(device) and missing * weights <= MOST_FILLING else 0
