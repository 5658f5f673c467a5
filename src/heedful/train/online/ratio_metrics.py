"""What the probability ratios of an update were like (docs/metrics.md)."""

from collections.abc import Callable

import torch
from torch import Tensor

from heedful import core
from heedful.core.policy_losses import Metrics

LARGEST = 40.0
"""Log-ratios are cut down to this in ``policy/effective_frac``, so that no square overflows."""
_MEAN, _SQUARE = "policy/ratio_mean", "policy/ratio_square"


def ratio_metrics(
    surrogate: core.Surrogate, mean: Callable[[Tensor, Tensor], Tensor], num_actions: int | Tensor
) -> Metrics:
    """Shares that were clipped, approximate KL, the largest ratio, and what `effective_frac` needs; nothing without a ratio.

    Args:
        surrogate: of a micro-batch.
        mean: the minibatch's mean, as the loss is averaged.
        num_actions: tokens, or responses, of the minibatch.
    """
    log_ratio, mask = surrogate.log_ratio, surrogate.mask
    if log_ratio is None or surrogate.clipped is None:
        return {}
    clipped = surrogate.clipped.to(log_ratio.dtype)
    bounded = torch.where(mask, log_ratio, 0.0).clamp(max=LARGEST).exp()
    return {
        "policy/clip_frac": mean(clipped, mask),
        "policy/approx_kl": mean(core.ratio_kl(log_ratio), mask),
        "policy/clip_frac_low": mean(clipped * (log_ratio < 0), mask),
        "policy/clip_frac_high": mean(clipped * (log_ratio > 0), mask),
        "policy/ratio_max": torch.where(mask, log_ratio, -torch.inf).max().exp(),
        _MEAN: core.masked_mean(bounded, mask, count=num_actions),
        _SQUARE: core.masked_mean(bounded.square(), mask, count=num_actions),
    }


def with_effective_frac(metrics: dict[str, float]) -> dict[str, float]:
    """A step's metrics with ``policy/effective_frac``, ``mean(r)^2 / mean(r^2)``, in place of the two means."""
    rest = {name: value for name, value in metrics.items() if name not in (_MEAN, _SQUARE)}
    if _MEAN in metrics:
        rest["policy/effective_frac"] = metrics[_MEAN] ** 2 / metrics[_SQUARE]
    return rest
