"""How much a critic knows of some actions and of others: by their place, or by the length of their response.

No gradient flows through anything here.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from heedful.core.masking import at_least_float32, same_shape
from heedful.core.values import explained_variance

__all__ = ["explained_in_bins"]


class Explained(NamedTuple):
    """What values explain of returns, in bins of actions by a number that each has, from the lowest on."""

    by: Float[Tensor, " bins"]
    """Mean of the number, such as the place in the response."""
    explained: Float[Tensor, " bins"]
    """Explained variance; NaN where returns do not vary."""
    bias: Float[Tensor, " bins"]
    """Mean of return minus value: above 0 where values are too low."""
    actions: Float[Tensor, " bins"]
    """Number of actions."""


@torch.no_grad()
def explained_in_bins(
    values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    by: Num[Tensor, "*shape"],
    *,
    bins: int = 10,
) -> Explained:
    """Explained variance and bias, in ``bins`` of about equally many actions by a number of each, such as its place.

        bin = floor(bins (c - n / 2) / N)      of N actions, n have this number, and c have this or a lower one

    Actions with the same number stay together, so that bins are as equal as they allow; an empty one is left out. Raises
    ValueError without actions, or for ``bins`` below 1.
    """
    same_shape(values=values, returns=returns, mask=mask, by=by)
    if bins < 1 or not bool(mask.any()):
        raise ValueError(f"explained_in_bins: {int(mask.sum())} actions in {bins} bins; both must be at least 1")
    v, r, x = (at_least_float32(numbers)[mask] for numbers in (values, returns, by))
    _, number, counts = x.unique(return_inverse=True, return_counts=True)
    middle = counts.cumsum(0).double() - counts / 2
    own = (bins * middle / len(x)).long()[number]
    parts = [own == one for one in own.unique()]
    return Explained(
        by=torch.stack([x[part].mean() for part in parts]),
        explained=torch.stack([explained_variance(v, r, part) for part in parts]),
        bias=torch.stack([(r - v)[part].mean() for part in parts]),
        actions=x.new_tensor([int(part.sum()) for part in parts]),
    )
