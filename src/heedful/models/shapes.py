"""Fewer shapes of matrix products where each costs: in half precision on a CPU oneDNN compiles every shape it meets."""

import torch

MULTIPLE = 64
"""Rows of a product, real and filling, are a whole number of it: a shape that was met before costs less than the filling."""


def is_compiled(device: torch.device) -> bool:
    """Whether the products of this moment are compiled for their shape, which takes milliseconds each."""
    return device.type == "cpu" and torch.is_autocast_enabled("cpu")


def filling(count: int, device: torch.device) -> int:
    """Rows to add to ``count`` that mean nothing; none where products are not compiled."""
    return -count % MULTIPLE if is_compiled(device) else 0
