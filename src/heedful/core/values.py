"""How much a critic knows: explained variance, and values beside the returns that came.

No gradient flows through anything here.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.core.masking import at_least_float32, first_in_mask, masked_mean, masked_var, same_shape

__all__ = ["Calibration", "calibration", "explained_variance", "first_values"]


@torch.no_grad()
def explained_variance(
    values: Float[Tensor, "*shape"], returns: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """Share of the returns' variance that the values explain: ``1 - var(returns - values) / var(returns)``.

    1 if the values are right, 0 if they are as good as a constant, below 0 if they are worse. A constant error does not
    count. Honest only with returns that no value is part of (`rewards_to_go`). The returns of `gae` at lambda below 1 hold
    later values: values that are wrong, but change little within a response, explain them.

    NaN if the returns are equal up to rounding (variance at most 1e-12 of their mean square), or nothing is in the mask.
    """
    same_shape(values=values, returns=returns, mask=mask)
    var = masked_var(returns, mask)
    share = 1 - masked_var(at_least_float32(returns) - at_least_float32(values), mask) / var
    varies = var > 1e-12 * masked_mean(at_least_float32(returns).square(), mask)
    return torch.where(varies, share, torch.nan)


@torch.no_grad()
def first_values(values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """At every action the value before the first one: what a critic predicts that has read the prompt only. 0 outside."""
    same_shape(2, values=values, mask=mask)
    first = torch.where(first_in_mask(mask), at_least_float32(values), 0.0).sum(dim=1, keepdim=True)
    return torch.where(mask, first, 0.0)


class Calibration(NamedTuple):
    """Values beside returns, in bins of equally many actions by the value, from the lowest on."""

    value: Float[Tensor, " bins"]
    """Mean value."""
    returned: Float[Tensor, " bins"]
    """Mean return: equal to the value if the critic is calibrated."""
    std: Float[Tensor, " bins"]
    """Population standard deviation of the returns."""
    actions: Float[Tensor, " bins"]
    """Number of actions."""


@torch.no_grad()
def calibration(
    values: Float[Tensor, "*shape"], returns: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, bins: int = 10
) -> Calibration:
    """Sort the actions by value, split them into ``bins`` of equal size, and average values and returns in each.

    Fewer bins if there are fewer actions. Raises ValueError without actions, or for ``bins`` below 1.
    """
    same_shape(values=values, returns=returns, mask=mask)
    if bins < 1 or not bool(mask.any()):
        raise ValueError(f"calibration: {int(mask.sum())} actions in {bins} bins; both must be at least 1")
    given, order = at_least_float32(values)[mask].sort(stable=True)
    came = at_least_float32(returns)[mask][order]
    parts = [(v, r) for v, r in zip(given.tensor_split(bins), came.tensor_split(bins), strict=True) if len(v)]
    return Calibration(
        value=torch.stack([v.mean() for v, _ in parts]),
        returned=torch.stack([r.mean() for _, r in parts]),
        std=torch.stack([r.std(correction=0) for _, r in parts]),
        actions=given.new_tensor([len(v) for v, _ in parts]),
    )
