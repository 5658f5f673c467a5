"""CPU layers with fewer passes over memory and the same results: norms, rotary embeddings and gated MLPs.

A model's layer gets another class, so names of parameters, and saved files, do not change. This happens only if a test
shows that the layer computes the formula here.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from heedful.errors import is_out_of_memory
from heedful.kernels.cpu.products import compiles_each_shape

M = TypeVar("M", bound=nn.Module)

SMALLEST_ROW = 128
"""Row size from which an RMS norm's gradients are faster by torch's layer-norm kernel."""
MOST_READ = 0.9
"""Tokens are left out only if at most this share is read, since selecting rows also has a cost."""
SILU = (nn.SiLU, SiLUActivation)
ROTATION = "apply_rotary_pos_emb"
"""Name of the function in transformers' model files."""

Replacement = Callable[[nn.Module], type[nn.Module] | None]
_REPLACED: dict[tuple[Replacement, type[nn.Module]], type[nn.Module]] = {}
"""Replacement class of each class, made once by one of the functions below."""


def use_lean_layers(model: M, device: torch.device) -> M:
    """Replace norms, gated MLPs and attention layers that compute a formula below, in place, if ``device`` is a CPU.

    Layers with other formulas (Gemma's norms, rotations of neighbours) and other models in the process do not change.
    """
    for module in model.modules() if device.type == "cpu" else ():
        for replacement in (_lean_norm, _lean_mlp, _lean_attention):
            _replace(module, replacement)
    return model


def _replace(module: nn.Module, replacement: Replacement) -> None:
    kind = type(module)
    if (replacement, kind) not in _REPLACED:
        lean = replacement(module) or kind
        _REPLACED[replacement, kind] = _REPLACED[replacement, lean] = lean
    module.__class__ = _REPLACED[replacement, kind]


def _subclass(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    return type(f"Lean{kind.__name__}", (kind,), {"forward": forward})


# ------------------------------------------------------------------------------------------------------------ RMS norms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalization, Zhang and Sennrich 2019, equation 4, with an epsilon below the root.

        y_i = w_i r x_i,    r = (mean_j x_j^2 + eps)^(-1/2)

    Its gradients, with four to six passes over memory instead of autograd's eleven, are for upstream g

        dx_i = r w_i g_i - x_i r^3 mean_j(w_j g_j x_j),    dw_i = sum over rows of r g_i x_i

    and cannot be differentiated again. Those of a layer norm (Ba et al. 2016) with mean 0 differ only by
    - r mean_j(w_j g_j) in each dx_i; where torch's kernel for them is fast, it is used, and the term added back.

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
    """The gradients of x and weight by torch's layer-norm kernel."""
    shape = [x.shape[-1]]
    d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
        upstream, x, shape, torch.zeros_like(inverse), inverse, weight, None, [True, True, False]
    )
    centred = torch.mv(upstream.reshape(-1, *shape), weight).view_as(inverse).mul_(inverse).div_(*shape)
    return d_x.add_(centred), d_weight


def _lean_norm(norm: Any) -> type[nn.Module] | None:
    """A class of norms that compute `rms_norm`, if a module is an RMS norm by its name, parameters and results."""
    kind: type[nn.Module] = type(norm)
    parts = [name for name, _ in norm.named_parameters()]
    if not kind.__name__.endswith("RMSNorm") or parts != ["weight"]:
        return None
    eps = getattr(norm, "variance_epsilon", None)
    if not isinstance(eps, float):
        return None
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, len(norm.weight), generator=generator, dtype=torch.float64) for rows in (3, 1))
    with torch.no_grad():
        found = torch.func.functional_call(norm, {"weight": weight[0].float()}, (x.float(),)).double()
        if not torch.allclose(found, rms_norm(x, weight[0], eps), rtol=1e-4, atol=1e-5):
            return None

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if hidden_states.dtype == weight.dtype == torch.float32 and not torch.compiler.is_compiling():
            return rms_norm(hidden_states, weight, self.variance_epsilon)
        plain: Tensor = kind.forward(self, hidden_states)
        return plain

    return _subclass(kind, forward)


# ------------------------------------------------------------------------------------------------------------ rotations


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, Su et al. 2021, equation 34, of halves in place of neighbours.

        y_i = x_i cos_i - x_{i+n} sin_i,    y_{i+n} = x_{i+n} cos_{i+n} + x_i sin_{i+n},    i < n = size / 2

    bit for bit as in transformers. Its gradients, in a third of autograd's passes, are for upstream g

        dx_i = g_i cos_i + g_{i+n} sin_{i+n},    dx_{i+n} = g_{i+n} cos_{i+n} - g_i sin_i

    and cannot be differentiated again; cos and sin have none.

    Args:
        x: ``[..., size]``.
        cos, sin: cosine and sine of each position's angles, broadcast to x.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        learned: Tensor = _Rotate.apply(x, cos, sin)
        return learned
    return _rotated(x, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (first, second), (s1, s2) = x.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    y = x * cos
    y1, y2 = y.chunk(2, dim=-1)
    y1.sub_(second * s1)  # not a fused operation, which rounds once less than transformers
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


def _lean_attention(layer: nn.Module) -> type[nn.Module] | None:
    """A class of attention layers that use `rotate`, if this one calls a function with the same formula."""
    kind = type(layer)
    forward = kind.forward
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names or forward.__closure__:
        return None
    plain = forward.__globals__[ROTATION]
    if not _is_rotation(plain):
        return None

    def lean(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        is_same = all(x.dtype == torch.float32 and x.shape[-1] == q.shape[-1] for x in (q, k, cos, sin))
        if not is_same or torch.compiler.is_compiling():
            rotated: tuple[Tensor, Tensor] = plain(q, k, cos, sin, unsqueeze_dim)
            return rotated
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    replaced = FunctionType(
        forward.__code__, forward.__globals__ | {ROTATION: lean}, forward.__name__, forward.__defaults__
    )
    replaced.__kwdefaults__ = forward.__kwdefaults__
    return _subclass(kind, replaced)


def _is_rotation(function: Callable[..., Any]) -> bool:
    """Whether a function of queries and keys computes `rotate` of both."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(1, 2, 3, 8, generator=generator) for _ in range(4))
    cos, sin = cos[:, 0], sin[:, 0]
    required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if required != ["q", "k", "cos", "sin"]:
        return False
    try:
        found = function(q, k, cos, sin)
    except RuntimeError:  # its cosines have another shape
        return False
    expected = [rotate(x, cos[:, None], sin[:, None]) for x in (q, k)]
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(found, expected, strict=True))


# ----------------------------------------------------------------------------------------------------------- gated MLPs


def _lean_mlp(mlp: Any) -> type[nn.Module] | None:
    """A class of gated MLPs that reuse memory in passes without gradients; bitwise the same.

        y = W_down (a(W_gate x) * W_up x),    a an activation such as SiLU        Shazeer 2020, equation 6

    None if this one has other parameters or other results, tested on two random tokens.
    """
    kind: type[nn.Module] = type(mlp)
    parts = {name: module for name, module in mlp.named_children() if name != "act_fn"}
    is_gated = parts.keys() == {"gate_proj", "up_proj", "down_proj"} and hasattr(mlp, "act_fn")
    if not kind.__name__.endswith("MLP") or not is_gated:
        return None
    if (
        not all(isinstance(product, nn.Linear) for product in parts.values())
        or mlp.gate_proj.weight.device.type != "cpu"
    ):
        return None
    weight = mlp.gate_proj.weight
    x = torch.randn(1, 2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.no_grad():
        if not torch.equal(mlp(x), _gated_in_place(mlp, x)):
            return None

    def forward(self: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            plain: Tensor = kind.forward(self, x)
            return plain
        return _gated_in_place(self, x)

    return _subclass(kind, forward)


def _gated_in_place(mlp: Any, x: Tensor) -> Tensor:
    gate = mlp.gate_proj(x)
    gate = nn.functional.silu(gate, inplace=True) if isinstance(mlp.act_fn, SILU) else mlp.act_fn(gate)
    output: Tensor = mlp.down_proj(gate.mul_(mlp.up_proj(x)))
    return output


# ------------------------------------------------------------------------- the last MLP only for the tokens that are read

_IS_LAST: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
_READ: ContextVar[tuple[nn.Module, Tensor, list[int]] | None] = ContextVar("read", default=None)
"""The MLP that leaves tokens out in the current pass, the indices it computes, and their number in each pass."""


def only_last_mlp_of(trunk: PreTrainedModel, ids: Tensor, read: Tensor) -> contextlib.AbstractContextManager[object]:
    """In this context, the MLP of a trunk's last layer computes only the tokens in ``read``, if that is faster.

    An MLP does not mix tokens, and no layer follows, so the states at ``read`` do not change (tested once per trunk).
    Other states are meaningless.

    Args:
        trunk: the model without its head.
        ids: token ids of the pass, ``[batch, time]``.
        read: indices of the tokens to compute in the flattened ``ids``; each at most once.
    """
    gains = len(read) <= MOST_READ * ids.numel() and ids.device.type == "cpu" and not compiles_each_shape(ids.device)
    mlp = _last_mlp(trunk) if gains else None
    if mlp is not None and trunk not in _IS_LAST:
        _IS_LAST[trunk] = _try_leaving_out(trunk, mlp)
    return _only_for(mlp, read) if mlp is not None and _IS_LAST[trunk] else contextlib.nullcontext()


def warn_slower(what: str, error: Exception) -> None:
    """Say that a model does without a faster pass because it failed, and how."""
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    warnings.warn(f"{what}, which is slower: the faster way fails with {why}", stacklevel=3)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]`` for distinct rows; its gradient is copied, not accumulated."""
    taken: Tensor = _Take.apply(x, rows)
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return upstream.new_zeros(ctx.shape).index_copy_(0, rows, upstream), None


def _last_mlp(trunk: PreTrainedModel) -> nn.Module | None:
    """The MLP of a trunk's last layer; None if it may need other tokens, or is not called directly.

    A mixture of experts balances over all tokens. Compiled, checkpointed or sharded layers call it in other ways.
    """
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        return None
    last = layers[-1]
    mlp = getattr(last, "mlp", None)
    if not isinstance(mlp, nn.Module) or not type(mlp).__name__.endswith("MLP") or "forward" in vars(mlp):
        return None
    takes_only_tokens = len(inspect.signature(mlp.forward).parameters) == 1
    is_recomputed = bool(getattr(last, "gradient_checkpointing", False))
    is_called_otherwise = last._compiled_call_impl is not None or hasattr(last, "unshard")
    return mlp if takes_only_tokens and not is_recomputed and not is_called_otherwise else None


@contextlib.contextmanager
def _only_for(mlp: nn.Module, read: Tensor) -> Iterator[list[int]]:
    """In this context and thread, an MLP returns zeros for tokens not in ``read``. Yields a list with an entry per
    pass."""
    passes = list[int]()
    before = _READ.set((mlp, read, passes))
    try:
        yield passes
    finally:
        _READ.reset(before)


def _mlp_of_read(mlp: nn.Module) -> type[nn.Module]:
    """A class of MLPs that support `_only_for`."""
    kind = type(mlp)

    def forward(self: Any, x: Tensor) -> Tensor:
        mlp, read, passes = _READ.get() or (None, None, [])
        if mlp is not self or read is None:
            plain: Tensor = kind.forward(self, x)
            return plain
        passes.append(len(read))
        rows = x.flatten(0, -2)
        return torch.zeros_like(rows).index_copy(0, read, kind.forward(self, take(rows, read))).view_as(x)

    return _subclass(kind, forward)


@torch.no_grad()
def _try_leaving_out(trunk: PreTrainedModel, mlp: nn.Module) -> bool:
    """Whether the states at read tokens are the same if the MLP leaves out the others."""
    _replace(mlp, _mlp_of_read)
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]], device=next(trunk.parameters()).device)
    read, was_training = torch.tensor([2, 3, 5], device=ids.device), trunk.training
    trunk.eval()
    try:
        whole = trunk(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.flatten(0, 1)[read]
        with _only_for(mlp, read) as passes:
            part = trunk(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.flatten(0, 1)[read]
    except Exception as error:  # such as an MLP that wants its tokens as rows
        if is_out_of_memory(error):
            raise
        warn_slower(f"{type(trunk).__name__} computes all tokens in its last MLP", error)
        return False
    finally:
        trunk.train(was_training)
    return passes == [len(read)] and torch.allclose(part, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))
