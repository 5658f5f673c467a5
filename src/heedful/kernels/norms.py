"""RMS norms on a CPU with half the passes over memory that autograd makes of them."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from heedful.kernels.lean import LeanClasses

M = TypeVar("M", bound=nn.Module)

SMALLEST_ROW = 128
"""Numbers of a row from which on torch's kernel for the gradients of a layer norm is the faster way to ours."""


def use_lean_norms(model: M, device: torch.device) -> M:
    """Let every RMS norm of a model whose formula is that of `rms_norm` learn by it, in place, if the model will be on a CPU.

    Names of parameters and saved files stay the same. Norms of other formulas, as Gemma's, stay as they are.

    Args:
        model: the model.
        device: where it will be.
    """
    return _NORMS.use_in(model, device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalization, Zhang and Sennrich 2019, equation 4, with an epsilon below the root.

        y_i = w_i r x_i,    r = (mean_j x_j^2 + eps)^(-1/2)

    The gradients, of which autograd makes eleven passes over memory and this four to six, are with upstream g

        dx_i = r w_i g_i - x_i r^3 mean_j(w_j g_j x_j),    dw_i = sum over rows of r g_i x_i

    and cannot be differentiated again. Those of a layer norm (Ba et al. 2016) whose mean is 0 are the same but for
    - r mean_j(w_j g_j) in each dx_i; where torch's kernel for them is fast, it computes them, and that is added again.

    Args:
        x: rows, ``[..., size]``.
        weight: w, ``[size]``.
        eps: added to the mean square.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        learned: Tensor = _RMSNorm.apply(x, weight, eps)
        return learned
    return (x * _inverse_root(x, eps)).mul_(weight)


def _inverse_root(x: Tensor, eps: float) -> Tensor:
    return x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_root(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        size, d_x, d_weight = x.shape[-1], None, None
        if all(ctx.needs_input_grad[:2]) and size >= SMALLEST_ROW and x.is_contiguous() and upstream.is_contiguous():
            return (*_as_layer_norm(upstream, x, weight, inverse), None)
        products = (upstream * x).reshape(-1, size)
        if ctx.needs_input_grad[1]:
            d_weight = torch.mv(products.t(), inverse.reshape(-1))
        if ctx.needs_input_grad[0]:
            along = (torch.mv(products, weight) / size).view_as(inverse).mul_(inverse**3)
            d_x = (upstream * weight).mul_(inverse).addcmul_(x, along, value=-1)
        return d_x, d_weight, None


def _as_layer_norm(upstream: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight by the kernel for those of a layer norm."""
    shape = [x.shape[-1]]
    d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
        upstream, x, shape, torch.zeros_like(inverse), inverse, weight, None, [True, True, False]
    )
    centred = torch.mv(upstream.reshape(-1, *shape), weight).view_as(inverse).mul_(inverse).div_(*shape)
    return d_x.add_(centred), d_weight


def _is_plain(norm: Any) -> bool:
    """Whether a module is an RMS norm of the formula of `rms_norm`, by its name, its parts, and what it computes."""
    parts = [name for name, _ in norm.named_parameters()]
    eps = getattr(norm, "variance_epsilon", None)
    if not type(norm).__name__.endswith("RMSNorm") or parts != ["weight"] or not isinstance(eps, float):
        return False
    size = norm.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, size, generator=generator, dtype=torch.float64) for rows in (3, 1))
    with torch.no_grad():
        is_same: bool = torch.allclose(
            torch.func.functional_call(norm, {"weight": weight[0].float()}, (x.float(),)).double(),
            rms_norm(x, weight[0], eps),
            rtol=1e-4,
            atol=1e-5,
        )
    return is_same


def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if hidden_states.dtype == weight.dtype == torch.float32 and not torch.compiler.is_compiling():
            return rms_norm(hidden_states, weight, self.variance_epsilon)
        plain: Tensor = kind.forward(self, hidden_states)
        return plain

    return type(f"Lean{kind.__name__}", (kind,), {"forward": forward})


_NORMS = LeanClasses(lambda norm: _class_of(type(norm)) if _is_plain(norm) else None)
