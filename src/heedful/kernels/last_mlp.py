"""The last layer's MLP on a CPU only for the tokens whose states are read: it mixes no tokens, and no layer follows it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.errors import is_out_of_memory
from heedful.kernels.layout import hidden_states
from heedful.kernels.lean import LeanClasses
from heedful.kernels.row_filling import compiles_each_shape

MOST_READ = 0.9
"""At most this share of the tokens is read where the others are left out: taking rows apart costs a little too."""
_IS_LAST: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
_READ: ContextVar[tuple[nn.Module, Tensor, list[int]] | None] = ContextVar("read", default=None)
"""The MLP that leaves tokens out in a pass that goes on, the places of those that it reads, and how many each pass had."""


def read_states(trunk: PreTrainedModel, ids: Tensor, read: Tensor, **options: Any) -> Tensor:
    """Last hidden states ``[read, hidden]`` of some tokens of a batch, as `hidden_states` has them.

    Args:
        trunk: the model without its head.
        ids: token ids ``[batch, time]``.
        read: which of ``ids``, flattened, are read: their places, each at most once.
        options: further arguments of the trunk.
    """
    mlp = None
    if len(read) <= MOST_READ * ids.numel() and ids.device.type == "cpu" and not compiles_each_shape(ids.device):
        mlp = _last_mlp(trunk)
    if mlp is None or not _is_last(trunk, mlp):
        return take(hidden_states(trunk, ids, **options).flatten(0, 1), read)
    with _only_for(mlp, read):
        return take(hidden_states(trunk, ids, **options).flatten(0, 1), read)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]``, no row twice, whose gradient is copied to its place and not added there."""
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
    """The MLP of the last of a trunk's layers; None if it may need other tokens, or is not called as it is written.

    A mixture of experts balances over all tokens; layers that are compiled, recomputed or divided among ranks call in
    other ways.
    """
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        return None
    last = layers[-1]
    mlp = getattr(last, "mlp", None)
    is_plain = isinstance(mlp, nn.Module) and type(mlp).__name__.endswith("MLP") and "forward" not in vars(mlp)
    is_recomputed = bool(getattr(last, "gradient_checkpointing", False))
    is_called_otherwise = last._compiled_call_impl is not None or hasattr(last, "unshard")
    return mlp if is_plain and not is_recomputed and not is_called_otherwise else None


@contextlib.contextmanager
def _only_for(mlp: nn.Module, read: Tensor) -> Iterator[list[int]]:
    """While entered, and in this thread, an MLP gives zeros for all tokens but some. Yields what it counts its passes in."""
    passes = list[int]()
    before = _READ.set((mlp, read, passes))
    try:
        yield passes
    finally:
        _READ.reset(before)


def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of MLPs that `_only_for` reaches."""

    def forward(self: Any, x: Tensor) -> Tensor:
        mlp, read, passes = _READ.get() or (None, None, [])
        if mlp is not self or read is None:
            plain: Tensor = kind.forward(self, x)
            return plain
        passes.append(len(read))
        rows = x.flatten(0, -2)
        return torch.zeros_like(rows).index_copy(0, read, kind.forward(self, take(rows, read))).view_as(x)

    return type(f"Lean{kind.__name__}", (kind,), {"forward": forward})


def _is_last(trunk: PreTrainedModel, mlp: nn.Module) -> bool:
    """Whether states are the same if an MLP leaves out tokens that are not read. It is tried once per trunk."""
    if trunk not in _IS_LAST:
        _IS_LAST[trunk] = _try_leaving_out(trunk, mlp)
    return _IS_LAST[trunk]


@torch.no_grad()
def _try_leaving_out(trunk: PreTrainedModel, mlp: nn.Module) -> bool:
    _MLPS.use(mlp)
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]], device=next(trunk.parameters()).device)
    read, was_training = torch.tensor([2, 3, 5], device=ids.device), trunk.training
    trunk.eval()
    try:
        whole = hidden_states(trunk, ids).flatten(0, 1)[read]
        with _only_for(mlp, read) as passes:
            part = hidden_states(trunk, ids).flatten(0, 1)[read]
    except Exception as error:  # whatever an MLP of other arguments makes of it
        if is_out_of_memory(error):
            raise
        return False
    finally:
        trunk.train(was_training)
    return passes == [len(read)] and torch.allclose(part, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))


_MLPS = LeanClasses(lambda mlp: _class_of(type(mlp)))
