"""Matrix products on a CPU, by the faster of torch's two libraries: MKL and oneDNN.

In float32 oneDNN multiplies large matrices where MKL leaves half of the processor idle. In half precision oneDNN
multiplies all and compiles code per shape, so shapes are kept few, and sampling stores its matrices in oneDNN's order.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

M = TypeVar("M", bound=nn.Module)

SMALLEST_PRODUCT = 2**26
"""Minimum number of multiplications for oneDNN: below it, compiling code for every text length costs more than it
saves."""
SMALLEST_STEP = 2**23
"""The same for rows of one token, as in sampling, where layers and steps repeat the same sizes."""
SMALLEST_SIDE = 16
"""Minimum rows, columns and inner dimension for oneDNN."""
MULTIPLE = 64
"""Rows of a product are padded to a multiple of this."""
MOST_FILLING = 2**30
"""Maximum padding rows times weights. Above it, computing them takes longer than compiling a new shape, 1 to 7 ms per
product."""


def _multiplies_at_half_speed() -> bool:
    """Whether torch's float32 products leave half of this processor idle.

    torch multiplies float32 matrices with MKL, which uses AVX-512 only on Intel processors. oneDNN, which torch uses
    for half precision, uses it on all processors that have it.
    """
    facts = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    is_amd = "AMD" in str(facts.get("cpu_name", "")) and bool(facts.get("avx512_f"))
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return is_amd and has_both and hasattr(torch.ops.mkldnn, "_linear_pointwise")


USES_ONEDNN = _multiplies_at_half_speed()
"""Whether large float32 products use oneDNN. Depends only on the processor, so a run resumed on it has the same
numbers."""


class FastLinear(nn.Linear):
    """A linear layer that uses `linear`, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FastConv1D(Conv1D):
    """`FastLinear` for GPT-2's linear layers, which store the matrix transposed."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


FAST: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, Conv1D: FastConv1D}


def use_fast_products(model: M, device: torch.device, compute_dtype: torch.dtype) -> M:
    """Convert every large linear layer to `FastLinear` or `FastConv1D`, in place, if that is faster on this processor.

    Names of parameters and saved files do not change.

    Args:
        model: the model.
        device: its device; only a CPU becomes faster.
        compute_dtype: dtype of its matrix products; only float32 becomes faster.
    """
    gains = USES_ONEDNN and device.type == "cpu" and compute_dtype == torch.float32
    for module in model.modules() if gains else ():
        is_large = isinstance(module, nn.Linear | Conv1D) and min(module.weight.shape) >= SMALLEST_SIDE
        if is_large and type(module) in FAST:
            module.__class__ = FAST[type(module)]
    return model


def is_plain_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a module is a plain linear layer: not quantised, and without adapters."""
    return type(module) in (nn.Linear, FastLinear)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, like `torch.nn.functional.linear`, with gradients that cannot be differentiated again.

    Args:
        x: rows, ``[..., in]``.
        weight: the matrix W, ``[out, in]``.
        bias: the vector b, ``[out]``.
    """
    if torch.compiler.is_compiling():
        compiled: Tensor = _compiled_linear(x, weight, bias)
        return compiled
    if not _gains_as_layer(x, weight):
        return nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)):
        learned: Tensor = _Linear.apply(x, weight, bias)
        return learned
    return _onednn(x, weight, bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product ``a @ b``, without a gradient.

    Args:
        a: ``[m, k]``.
        b: ``[k, n]``.
    """
    (rows, terms), columns = a.shape, b.shape[1]
    if not _gains(a, b, rows, terms, columns, smallest=SMALLEST_PRODUCT):
        return a @ b
    # oneDNN copies a non-contiguous left matrix. A transposed one can be the right matrix without a copy.
    if rows > columns and not a.is_contiguous() and a.t().is_contiguous():
        return _onednn(b.t(), a, None).t()
    return _onednn(a, b.t(), None)


def _gains_as_layer(x: Tensor, weight: Tensor) -> bool:
    rows = x.numel() // max(1, weight.shape[1])
    smallest = SMALLEST_STEP if x.dim() == 3 and x.shape[1] == 1 else SMALLEST_PRODUCT
    return not torch.is_autocast_enabled("cpu") and _gains(x, weight, rows, *weight.shape, smallest=smallest)


def _gains(a: Tensor, b: Tensor, *sides: int, smallest: int) -> bool:
    """Whether oneDNN is faster for this product."""
    count = sides[0] * sides[1] * sides[2]
    is_float32 = a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"
    return USES_ONEDNN and is_float32 and count >= smallest and min(sides) >= SMALLEST_SIDE


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b. A matrix that is neither contiguous nor a transposed contiguous one would be a thousand times
    slower."""
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.t().contiguous().t() if weight.stride(0) == 1 else weight.contiguous()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


class _Linear(torch.autograd.Function):
    """y = x W^T + b, with dx = dy W, dW = dy^T x, and db the sum of dy over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _keep(ctx, (x, weight, bias))
        return _onednn(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, upstream, product)


def _keep(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor | None],
    output: Tensor | None = None,  # noqa: ARG001  torch passes it
) -> None:
    """Save only the tensors that the required gradients need: for a frozen layer, the matrix."""
    x, weight, _ = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] else None,
        weight if ctx.needs_input_grad[0] else None,
    )


def _gradients(
    ctx: Any, upstream: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    rows = upstream.reshape(-1, upstream.shape[-1])
    d_x = None if weight is None else multiply(rows, weight).view(ctx.shape)
    d_weight = None if x is None else multiply(rows.t(), x.reshape(-1, x.shape[-1])).contiguous()
    return d_x, d_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


# torch.compile would compile anew for every branch of `_gains`. So compiled code has one operation per product, which
# checks sizes at run time.


@torch.library.custom_op("heedful::linear", mutates_args=())
def _compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _onednn(x, weight, bias) if _gains_as_layer(x, weight) else nn.functional.linear(x, weight, bias)


@_compiled_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001  a bias changes no shape
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("heedful::product", mutates_args=())
def _compiled_product(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b).contiguous()


@_compiled_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _compiled_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, upstream, _compiled_product)


_compiled_linear.register_autograd(_compiled_gradients, setup_context=_keep)


# ------------------------------------------------------------------------------------------- half precision


def compiles_each_shape(device: torch.device) -> bool:
    """Whether matrix products are currently compiled per shape."""
    return device.type == "cpu" and torch.is_autocast_enabled("cpu")


def filling(count: int, device: torch.device, *, weights: Iterable[int]) -> int:
    """Number of padding rows, so that products have few different shapes; 0 if padding costs more than it saves.

    Args:
        count: number of real rows.
        device: device of the products.
        weights: numbers of weights that each row is multiplied with.
    """
    missing = -count % MULTIPLE
    return missing if compiles_each_shape(device) and missing * sum(weights) <= MOST_FILLING else 0


class PackedLinear(nn.Module):
    """A linear layer for inference with its matrix in oneDNN's storage order.

    With few rows a product is up to twice as fast, since oneDNN need not reorder the matrix at each call.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.plain: Tensor | None = None
        self.packed: Tensor | None = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = None if linear.bias is None else linear.bias.detach().to(self.dtype)

    @staticmethod
    def is_possible(module: nn.Linear) -> bool:
        """Whether this layer is in bfloat16 on a CPU, and torch has the packed product."""
        return (
            module.weight.device.type == "cpu"
            and module.weight.dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        )

    @property
    def weight(self) -> Tensor:
        """The matrix in its usual order, for the few models that read it directly; replaces the packed copy."""
        if self.plain is None:
            assert self.packed is not None
            self.plain, self.packed = self.packed.to_dense(), None
        return self.plain

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return nn.functional.linear(x.to(self.dtype), self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")


def pack_linears(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every bfloat16 linear layer on a CPU by a `PackedLinear`, in place.

    Models with adapters do not change, because PEFT's layers read the matrices of their base layers.
    """
    for parent in list(model.modules()) if not getattr(model, "peft_config", None) else ():
        for name, module in list(parent.named_children()):
            if is_plain_linear(module) and PackedLinear.is_possible(module):
                setattr(parent, name, PackedLinear(module))
    return model
