"""Rotary position embeddings on a CPU with a third of the passes over memory that autograd makes of them."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from heedful.kernels.lean import LeanClasses

M = TypeVar("M", bound=nn.Module)

NAME = "apply_rotary_pos_emb"
"""What transformers calls the function in each of its attention layers' files."""


def use_lean_rotations(model: M, device: torch.device) -> M:
    """Let every attention layer of a model whose formula is that of `rotate` learn by it, in place, if it will be on a CPU.

    Layers that rotate in another way (pairs of neighbours, other precisions) stay as they are, as do all other models of the
    process.

    Args:
        model: the model.
        device: where it will be.
    """
    return _LAYERS.use_in(model, device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, Su et al. 2021, equation 34, of halves in place of neighbours.

        y_i = x_i cos_i - x_{i+n} sin_i,    y_{i+n} = x_{i+n} cos_{i+n} + x_i sin_{i+n},    i < n = size / 2

    bit for bit as transformers computes it. The gradients, with upstream g, are

        dx_i = g_i cos_i + g_{i+n} sin_{i+n},    dx_{i+n} = g_{i+n} cos_{i+n} - g_i sin_i

    and cannot be differentiated again; cos and sin have none.

    Args:
        x: ``[..., size]``.
        cos, sin: of each position's angles, broadcast to x.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        learned: Tensor = _Rotate.apply(x, cos, sin)
        return learned
    return _rotated(x, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (first, second), (s1, s2) = x.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    y = x * cos
    y1, y2 = y.chunk(2, dim=-1)
    y1.sub_(second * s1)  # not as one operation, which rounds once less than the formula of transformers
    y2.add_(first * s2)
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (g1, g2), (s1, s2) = upstream.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        d_x = upstream * cos
        d1, d2 = d_x.chunk(2, dim=-1)
        d1.addcmul_(g2, s2)
        d2.addcmul_(g1, s1, value=-1)
        return d_x, None, None


def _class_of(kind: type[nn.Module]) -> type[nn.Module] | None:
    """A class of layers that rotate by `rotate`, if layers of this one call a function of the same formula."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names or forward.__closure__:
        return None
    plain = forward.__globals__[NAME]
    if not _is_plain(plain):
        return None

    def lean(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        is_same = all(x.dtype == torch.float32 and x.shape[-1] == q.shape[-1] for x in (q, k, cos, sin))
        if not is_same or torch.compiler.is_compiling():
            rotated: tuple[Tensor, Tensor] = plain(q, k, cos, sin, unsqueeze_dim)
            return rotated
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    replaced = FunctionType(
        forward.__code__, forward.__globals__ | {NAME: lean}, forward.__name__, forward.__defaults__
    )
    replaced.__kwdefaults__ = forward.__kwdefaults__
    return type(f"Lean{kind.__name__}", (kind,), {"forward": replaced})


def _is_plain(function: Callable[..., Any]) -> bool:
    """Whether a function of queries and keys computes `rotate` of both."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(1, 2, 3, 8, generator=generator) for _ in range(4))
    cos, sin = cos[:, 0], sin[:, 0]
    try:
        found = function(q, k, cos, sin)
    except Exception:  # other arguments
        return False
    expected = [rotate(x, cos[:, None], sin[:, None]) for x in (q, k)]
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(found, expected, strict=True))


_LAYERS = LeanClasses(lambda layer: _class_of(type(layer)))
