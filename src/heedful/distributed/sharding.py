"""Sharding of models over ranks: each holds a shard of every weight, gradient and optimizer moment (PyTorch's FSDP2).

A block's weights are gathered while it computes, and its gradients are reduced and scattered. Other uses of full
weights (sampling, saving) make a copy with `gathered`.

Functions are collective (same order and arguments on all ranks) unless documented otherwise.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.pytorch_utils import Conv1D

from heedful.configs.options import check_replicas
from heedful.distributed.ranks import complete, is_first, size
from heedful.errors import ConfigError

M = TypeVar("M", bound=nn.Module)

SyncEvery = Literal["step", "micro-batch"]
MOST_REPLICATED = 0.1
"""Largest share of a block's weights that is replicated so that the others can be gathered in half precision."""


class _Divided(NamedTuple):
    """Facts about a sharded model."""

    structure: nn.Module
    """The same model without storage; see `gathered`."""
    sync_every: SyncEvery


_DIVIDED: WeakKeyDictionary[nn.Module, _Divided] = WeakKeyDictionary()


def make_mesh(device: torch.device, replicas: int = 1, timeout: timedelta | None = None) -> DeviceMesh:
    """FSDP2's device mesh: all ranks in one row, or ``replicas`` rows, each with the full model.

    ``timeout`` of collectives in a row or column; None is torch's default.

    Raises ConfigError if the number of ranks is not a multiple of ``replicas``.
    """
    ranks = size()
    check_replicas(replicas, ranks)
    if replicas == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    if timeout is not None:
        for group in mesh.get_all_groups():
            _set_pg_timeout(timeout, group)
    return mesh


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    sync_every: SyncEvery = "step",
    compute_dtype: torch.dtype = torch.float32,
    trained: torch.dtype | None = None,
) -> None:
    """Shard a model over the ranks of a mesh, in place: each block is a unit, and the rest belongs to the root.

    Gradients are summed over ranks, not averaged, since losses divide by counts of the whole batch. Products run under
    autocast as before, so the numbers equal those of one process up to the order of sums. bfloat16 gradients are summed
    in float32.

    Weights are gathered in their storage dtype, but float32 blocks of linear layers in bfloat16, if autocast would
    convert them to it. What else these blocks have, such as norms, is replicated in float32.

    The gradients of a unit are reduced together, in one dtype. So only trainable weights of its most frequent dtype are
    sharded, and the rest is replicated: with bfloat16 matrices, the float32 norms and biases.

    Args:
        module: the module whose ``forward`` is called; with full weights, equal on every rank, on any device. Adapters
            must be added before.
        mesh: see `make_mesh`. The shards are on its device.
        sync_every: when gradients are summed, for `lockstep_forwards`.
        compute_dtype: autocast's.
        trained: dtype of trained weights that are still in half precision. They are converted unit by unit, so that no rank
            has all of them in it. None leaves their dtypes.

    Raises ConfigError if the model has no blocks.
    """
    _DIVIDED[module] = _Divided(_without_numbers(module), sync_every)
    units = [*blocks(module), *heads(module), module]
    dtypes, whole = _dtypes(units, trained)
    gathers_half = [
        unit for unit in blocks(module) if compute_dtype == torch.bfloat16 and _is_of_products(unit, trained)
    ]
    whole.update(p for block in gathers_half for p in set(block.parameters()) - _of_products(block))
    for parameter in whole:
        parameter.data = parameter.data.to(mesh.device_type)  # the rest is moved when it is sharded
    for unit, dtype in zip(units, dtypes, strict=True):
        for parameter in unit.parameters():
            if parameter.requires_grad and not is_divided(parameter):
                parameter.data = parameter.data.to(mesh.device_type).to(_trained_in(parameter, trained))
        is_half = unit in gathers_half
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_half else None,
            reduce_dtype=torch.float32 if is_half or dtype == torch.bfloat16 else None,
            cast_forward_inputs=False,
        )
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=whole)
    for part in _parts(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale while it sums
    for block in blocks(module):
        block.register_forward_hook(_forget_casts)
    module.register_forward_hook(_let_go)


def _forget_casts(_module: nn.Module, _inputs: object, _output: object) -> None:
    """A block's forward hook: drop the half-precision copies of its weights, which autocast would keep until the pass
    ends.

    Together those copies are a full model. They are kept while the block computes, as in one process: the two gradients
    of a weight used twice are then added in half precision, before conversion to float32.
    """
    torch.clear_autocast_cache()


def _dtypes(
    units: Sequence[nn.Module], trained: torch.dtype | None
) -> tuple[list[torch.dtype | None], set[nn.Parameter]]:
    """Each unit's most frequent dtype of trainable parameters, and the trainable parameters with another dtype.

    Args:
        units: a parameter belongs to the first unit with it. The dtype is None if nothing is trainable.
    """
    dtypes: list[torch.dtype | None] = []
    others: set[nn.Parameter] = set()
    seen: set[nn.Parameter] = set()
    for unit in units:
        own = [p for p in unit.parameters() if p not in seen]
        seen.update(own)
        counts: Counter[torch.dtype] = Counter()
        for parameter in own:
            counts[_trained_in(parameter, trained)] += parameter.numel() if parameter.requires_grad else 0
        most = max(counts, key=lambda dtype: counts[dtype]) if any(p.requires_grad for p in own) else None
        dtypes.append(most)
        others.update(p for p in own if p.requires_grad and _trained_in(p, trained) != most)
    return dtypes, others


def _of_products(unit: nn.Module) -> set[nn.Parameter]:
    """The parameters of linear layers, which autocast converts wherever they are used."""
    layers = (layer for layer in unit.modules() if isinstance(layer, nn.Linear | Conv1D))
    return {parameter for layer in layers for parameter in layer.parameters(recurse=False)}


def _is_of_products(block: nn.Module, trained: torch.dtype | None) -> bool:
    """Whether a block can be gathered in half precision: all of it is trained in float32, and nearly all in linear layers.

    Frozen matrices are stored in half precision, and experts of a mixture multiply in their storage dtype.
    """
    of_products = sum(parameter.numel() for parameter in _of_products(block))
    is_trained = all(p.requires_grad and _trained_in(p, trained) == torch.float32 for p in block.parameters())
    return is_trained and of_products >= (1 - MOST_REPLICATED) * _weights(block)


def _trained_in(parameter: nn.Parameter, trained: torch.dtype | None) -> torch.dtype:
    """The dtype in which a weight is trained (see `shard`)."""
    return trained if trained is not None and parameter.dtype.itemsize == 2 else parameter.dtype


def _let_go(module: nn.Module, _inputs: object, _output: object) -> None:
    """A forward hook: without a backward pass, reshard the root's weights at once, like those of blocks."""
    if not torch.is_grad_enabled():
        module.reshard()  # type: ignore[operator]  # an FSDPModule


def blocks(module: nn.Module) -> list[nn.Module]:
    """The layers of a model: the module list with most weights. Raises ConfigError if there is none."""
    lists: list[nn.Module] = [found for found in module.modules() if isinstance(found, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"--shard full: {type(module).__name__} has no list of layers to shard; leave out --shard")
    return list(max(lists, key=_weights).children())


def _weights(module: nn.Module) -> int:
    return sum(int(parameter.numel()) for parameter in module.parameters())


def heads(module: nn.Module) -> list[nn.Module]:
    """Modules that are also called separately: a policy's value head has its own passes."""
    head = getattr(module, "value_head", None)
    return [head] if isinstance(head, nn.Module) and hasattr(module, "lm") else []


def _parts(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def is_sharded(module: nn.Module) -> bool:
    """Whether a model is sharded. Local."""
    return isinstance(module, FSDPModule)


def _without_numbers(module: M) -> M:
    """A copy of a model with parameters on the meta device; buffers are shared."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    return copy.deepcopy(module, {id(buffer): buffer for buffer in module.buffers()} | empty)


def gathered(module: M, *, convert: Callable[[nn.Module, Tensor], Tensor] | None = None) -> M:
    """A copy of a sharded model with its current full weights; an unsharded model is returned itself.

    Weights are gathered one by one, so the copy needs memory for only one weight more. ``convert`` maps a weight's
    module and the full weight to the weight in the copy.
    """
    if not is_sharded(module):
        return module
    filled = _gathered(module, None, convert, keeps=True)
    assert filled is not None
    return filled


def gathered_on_first(module: M) -> M | None:
    """`gathered` on rank 0, in main memory, for saving; None on the others, which need memory for one full weight at a
    time."""
    if not is_sharded(module):
        return module if is_first() else None
    return _gathered(module, torch.device("cpu"), None, keeps=is_first())


def _gathered(
    module: M, device: torch.device | None, convert: Callable[[nn.Module, Tensor], Tensor] | None, *, keeps: bool
) -> M | None:
    owners: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    structure = _DIVIDED[module].structure
    filled = copy.deepcopy(structure, {id(buffer): buffer for buffer in structure.buffers()}) if keeps else None
    for key, names in owners.items():
        full = whole_tensor(tensors[key].detach())
        if filled is None:
            continue
        if not is_divided(tensors[key]):
            full = full.clone()
        held = full if device is None else full.to(device)
        del full
        made: dict[int, nn.Parameter] = {}  # a tied weight stays tied, unless converted for one of its modules
        for name in names:
            path, _, last = name.rpartition(".")
            owner = filled.get_submodule(path)
            tensor = held if convert is None else convert(owner, held)
            new = made.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=tensors[key].requires_grad))
            setattr(owner, last, new)
    if filled is not None:
        filled.train(module.training)
    return filled  # type: ignore[return-value]  # a copy of the module, of its class


def is_divided(tensor: Tensor) -> bool:
    """Whether a tensor is sharded. Local."""
    return isinstance(tensor, DTensor)


def whole_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with complete():
        return tensor.full_tensor()


@contextlib.contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """In this context a part of a sharded model has its full parameters. Collective."""
    divided = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if is_divided(parameter)
    ]
    try:
        for owner, name, parameter in divided:
            setattr(owner, name, nn.Parameter(whole_tensor(parameter.detach()), requires_grad=False))
        yield
    finally:
        for owner, name, parameter in divided:
            setattr(owner, name, parameter)


def held(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or the tensor itself if not sharded. Shares memory. Local."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_held(tensor: Tensor) -> int:
    """Index of this rank's first element in the flattened full tensor; 0 if not sharded. Local."""
    if not isinstance(tensor, DTensor):
        return 0
    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return start[0] * (tensor.numel() // tensor.shape[0])


def divided_like(whole: Tensor, like: Tensor, device: torch.device | None = None) -> Tensor:
    """Shard a full tensor like ``like``, on a device (None: its own). No communication.

    If ``like`` is not sharded, returns the full tensor.
    """
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return whole
    shape, start = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = torch.empty_like(like, dtype=whole.dtype, device=device)
    held(part).copy_(whole[tuple(slice(first, first + length) for first, length in zip(start, shape, strict=True))])
    return part


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Clip the gradient norm of one module's parameters, sharded or not. Returns the norm before clipping, there."""
    divided, whole = [p for p in parameters if is_divided(p)], [p for p in parameters if not is_divided(p)]
    with complete() if divided else contextlib.nullcontext():
        norms = [whole_tensor(_norm([p.grad for p in kind if p.grad is not None])) for kind in (divided, whole) if kind]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for kind in (divided, whole):
        torch.nn.utils.clip_grads_with_norm_(kind, max_norm, norm)
    return norm


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Total norm of the gradients in at least float32; torch's has the precision of the gradients, such as bfloat16."""
    if not any(gradient.dtype == torch.bfloat16 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


@torch.no_grad()
def exchange(one: Tensor, other: Tensor) -> None:
    """Swap the values of two equally sharded tensors in place, since FSDP2 relies on the weights' addresses."""
    mine, its = held(one), held(other)
    kept = mine.clone()
    mine.copy_(its)
    its.copy_(kept)


class LockstepForwards:
    """Keeps ranks in step in a loop over micro-batches through sharded models: all make the same number of passes.

    Gathering weights is collective, so a rank with fewer micro-batches makes dummy passes.

    Args:
        dummy_losses: one per pass of a micro-batch, in order, for ranks without rows: each reads every weight, and
            returns 0 (such as `Policy.dummy_loss`).
        modules: the modules of the passes.
        sync_every: ``step`` sums gradients over ranks in the last pass of the loop, with memory for full gradients
            until then; ``micro-batch`` sums in every pass.
    """

    def __init__(
        self, dummy_losses: Sequence[Callable[[], Tensor]], modules: Sequence[nn.Module], sync_every: SyncEvery = "step"
    ) -> None:
        self.dummy_losses, self.modules, self.sync_every = dummy_losses, modules, sync_every

    def before(self, *, is_last: bool) -> None:
        """Call before the passes of each micro-batch, also of dummy passes."""
        for module in self.modules:
            module.set_requires_gradient_sync(is_last or self.sync_every == "micro-batch")  # type: ignore[operator]  # an FSDPModule

    def nothing(self) -> None:
        """Make dummy passes. Gradients do not change."""
        for dummy_loss in self.dummy_losses:
            loss = dummy_loss()
            if loss.requires_grad:
                loss.backward()


def lockstep_forwards(*through: tuple[nn.Module, Callable[[], Tensor]]) -> LockstepForwards | None:
    """`LockstepForwards` through models, each with its dummy loss; None if none is sharded."""
    divided = [(module, dummy_loss) for module, dummy_loss in through if is_sharded(module)]
    if not divided:
        return None
    root = next((known for module, _ in divided if (known := _DIVIDED.get(module)) is not None), None)
    return LockstepForwards(
        [dummy_loss for _, dummy_loss in divided],
        [module for module, _ in divided],
        "step" if root is None else root.sync_every,
    )
