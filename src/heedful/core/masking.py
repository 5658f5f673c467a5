"""Masked reductions.

Masks are boolean; True marks entries that count. ``where`` replaces the others before any arithmetic, so NaN or
infinity in padding never reaches a result or a gradient (``nan * 0`` is ``nan``).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["first_in_mask", "masked_mean", "masked_sum", "masked_var", "rescale", "whiten"]

STD_FLOOR = 1e-4
"""Lower bound of the standard deviation in `whiten` and `rescale`, the same as of ``rsqrt(var + 1e-8)``."""

Count = int | float | Tensor


def rightness(difference: Tensor) -> Tensor:
    """1 where the difference is positive, 1/2 where it is 0 (a tie), else 0. Detached."""
    difference = difference.detach()
    return (difference > 0).to(difference.dtype) + 0.5 * (difference == 0)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert float16, bfloat16, integers and booleans to float32; leave float32 and float64 as they are."""
    return x if x.dtype == torch.float64 else x.float()


def same_shape(dims: int | None = None, **tensors: Tensor | None) -> None:
    """Check that a function's tensors have one shape, and that masks are boolean. torch would repeat a smaller one, and the
    result would be wrong.

    Args:
        dims: number of dimensions; None allows any.
        tensors: the arguments by name; None is skipped.

    Raises ValueError with the names and shapes of two arguments that differ, or the type of one.
    """
    first = ""
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}; it must be a tensor, such as torch.tensor({name})")
        if name.endswith("mask") and x.dtype != torch.bool:
            raise ValueError(f"{name} has dtype {x.dtype}; masks are boolean: {name}.bool()")
        if not first:
            first, expected = name, x.shape
        elif x.shape != expected:
            raise ValueError(f"{name} has shape {list(x.shape)}, but {first} has {list(expected)}; they must be equal")
    if dims is not None and len(expected) != dims:
        raise ValueError(f"{first} has shape {list(expected)}; it must have {dims} dimension{'s' * (dims > 1)}")


def one_per_row(**tensors: Tensor) -> None:
    """Check that the first of two tensors has the shape of the second one without its last dimension.

    Raises ValueError with the names and shapes of both.
    """
    (name, x), (rows, y) = tensors.items()
    if x.shape != y.shape[:-1]:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, but {rows} has {list(y.shape)}; "
            f"{name} must have the shape of {rows} without the last dimension"
        )


def one_number(**numbers: Count | None) -> None:
    """Check that each is a number, or a tensor without dimensions; None is skipped. Raises ValueError with its shape."""
    for name, x in numbers.items():
        if isinstance(x, Tensor) and x.dim():
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be one number")


def masked_sum(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Sum of ``x`` inside the mask, in at least float32."""
    same_shape(x=x, mask=mask)
    return torch.where(mask, at_least_float32(x), 0.0).sum()


def masked_mean(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, count: Count | None = None
) -> Float[Tensor, ""]:
    """Mean of ``x`` inside the mask: ``sum(x[mask]) / count``.

    Args:
        x: values.
        mask: True for entries that count.
        count: divisor; None is the number of True entries. With the count of the whole optimizer step, the results of
            micro-batches add up to the mean over the whole batch.

    An empty mask gives NaN.
    """
    one_number(count=count)
    return masked_sum(x, mask) / (mask.sum() if count is None else count)


def first_in_mask(mask: Bool[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
    """True only at each row's first True entry; a row without one stays False."""
    same_shape(2, mask=mask)
    return mask & (mask.cumsum(dim=1) == 1)


def masked_var(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Population variance of ``x`` inside the mask: ``mean((x - mean(x))^2)``, without Bessel's correction."""
    same_shape(x=x, mask=mask)
    x = torch.where(mask, at_least_float32(x), 0.0)
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


def whiten(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    mean: float | Float[Tensor, ""] | None = None,
    var: float | Float[Tensor, ""] | None = None,
) -> Float[Tensor, "*shape"]:
    """Shift and scale to mean 0 and variance 1 inside the mask: ``(x - mean) / max(sqrt(var), 1e-4)``; zero outside.

    Args:
        x: values.
        mask: True for entries that count.
        mean: mean to subtract, for example over all ranks; None is the mean of ``x`` inside the mask.
        var: variance; None is the population variance of ``x`` inside the mask (Huang et al. 2023, "The N
            Implementation Details of RLHF with PPO").
    """
    same_shape(x=x, mask=mask)
    x = torch.where(mask, at_least_float32(x), 0.0)
    mean, std = _mean_and_std(x, mask, mean, var)
    return torch.where(mask, (x - mean) / std, 0.0)


def rescale(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    mean: float | Float[Tensor, ""] | None = None,
    var: float | Float[Tensor, ""] | None = None,
) -> Float[Tensor, "*shape"]:
    """Scale to variance 1 and keep the mean: ``(x - mean) / max(sqrt(var), 1e-4) + mean``; zero outside the mask.

    Arguments as in `whiten`. lm-human-preferences calls this ``whiten(shift_mean=False)`` and applies it to rewards.
    """
    same_shape(x=x, mask=mask)
    x = torch.where(mask, at_least_float32(x), 0.0)
    mean, std = _mean_and_std(x, mask, mean, var)
    return torch.where(mask, (x - mean) / std + mean, 0.0)


def _mean_and_std(
    x: Tensor, mask: Tensor, mean: float | Tensor | None, var: float | Tensor | None
) -> tuple[Tensor, Tensor]:
    one_number(mean=mean, var=var)
    mean = masked_mean(x, mask) if mean is None else torch.as_tensor(mean, dtype=x.dtype, device=x.device)
    var = masked_var(x, mask) if var is None else torch.as_tensor(var, dtype=x.dtype, device=x.device)
    return mean, var.sqrt().clamp_min(STD_FLOOR)
