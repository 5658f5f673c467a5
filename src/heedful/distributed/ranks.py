"""The processes (ranks) of a run, each with its own device: rank, share of the work, and collective operations.

torchrun --nproc-per-node 2 -m heedful ppo ...

starts them. Every rank reads all data and makes all decisions from the same numbers; only the expensive passes are
split. In a single process everything here is the identity: `shard_indices` returns all, sums do not change.

All ranks must call collective operations in the same order; `rank`, `size`, `is_first`, `shard_indices` and `parts` are
local. A Gloo collective that fails because a rank has died, hangs or has failed raises RankError, which names it. An
NCCL collective waits in the GPU until the launcher (torchrun) kills the process, once a rank has ended, or until NCCL's
timeout.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from heedful.errors import ConfigError, HeedfulError, is_out_of_memory

if TYPE_CHECKING:  # torch is imported only with several ranks
    import torch
    from torch import Tensor

T = TypeVar("T")
K = TypeVar("K")

BUCKET = 2**24
"""Numbers summed in one message (64 MiB in float32)."""


class _World:
    """This process among the joined ranks; alone before `join`."""

    rank = 0
    size = 1
    is_alone = False
    uses_nccl = False


def launched() -> bool:
    """True if a launcher such as torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In this context the rank acts as the only process, while others do something else or wait."""
    before, _World.is_alone = _World.is_alone, True
    try:
        yield
    finally:
        _World.is_alone = before


def size() -> int:
    """Number of ranks; 1 for a single process, or one that acts `alone`."""
    return 1 if _World.is_alone else _World.size


def rank() -> int:
    """The number of this process, from 0."""
    return _World.rank


def is_first() -> bool:
    """True on rank 0, which does all writing and display; True in a single process."""
    return _World.rank == 0


def join(device: torch.device, timeout: timedelta) -> None:
    """Join the ranks of the launcher's environment. Does nothing in a single process, or if already joined.

    Sums of tensors on CUDA devices use NCCL, everything else Gloo.

    Args:
        device: this rank's device.
        timeout: maximum time to wait for the slowest rank before the job ends.

    Raises ConfigError if the environment is incomplete or the port is taken; RankError on timeout.
    """
    if not launched() or size() > 1:
        return
    import torch.distributed as dist

    from heedful.devices import capabilities
    from heedful.display import fall_silent
    from heedful.distributed import rank_failures

    here, count = number("RANK"), number("WORLD_SIZE")
    store = rank_failures.open_store(here, count, timeout)
    uses_nccl = capabilities(device).nccl
    backend = "cpu:gloo,cuda:nccl" if uses_nccl else "gloo"
    with complete():
        dist.init_process_group(backend, store=store, rank=here, world_size=count, timeout=timeout)
    _World.rank, _World.size = here, count
    _World.uses_nccl = uses_nccl
    if here:
        fall_silent()


def leave() -> None:
    """Disconnect from the other ranks after a successful run; keeps the rank's number. Collective, for NCCL."""
    if _World.size > 1:
        import torch.distributed as dist

        _World.size = 1
        dist.destroy_process_group()


def give_up(error: BaseException) -> None:
    """Leave a run after an error on this rank, so that the others also end and know why. Repeated calls do nothing.

    The others' Gloo collectives fail from now on. NCCL groups end with the process (`ends_at_once`), not collectively.
    """
    if _World.size > 1:
        from heedful.distributed import rank_failures

        rank_failures.report(error)
        if not _World.uses_nccl:
            leave()
        _World.size = 1


def ends_at_once() -> bool:
    """True if this process must exit after an error without the usual clean-up, in which NCCL would wait for others."""
    return _World.uses_nccl


def number(name: str) -> int:
    """An integer variable of the launcher's environment. Raises ConfigError if it is missing or invalid."""
    text = os.environ.get(name, "")
    if not text.isdigit():
        got = f"is {text!r}" if text else "is not set"
        raise ConfigError(
            f"{name} {got}, but WORLD_SIZE={os.environ['WORLD_SIZE']} means several processes; start "
            "them with torchrun --nproc-per-node N -m heedful ..., which sets both, or unset WORLD_SIZE for one process"
        )
    return int(text)


def local_device(device: torch.device) -> torch.device:
    """This rank's device: of those with NCCL, the one of index LOCAL_RANK, made current.

    Raises ConfigError for a device that ranks would share.
    """
    if not launched() or device.type == "cpu":
        return device
    import torch

    from heedful.devices import capabilities, device_module, name_of

    here, count, module = number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE"), device_module(device)
    if not capabilities(device).nccl:
        raise ConfigError(
            f"--device {device.type}: {count} ranks cannot share it; start one process, or use --device cpu"
        )
    if device.index is not None:
        raise ConfigError(
            f"--device {device}: {count} ranks cannot share a GPU; leave it out, and each rank uses the GPU of its number "
            "(CUDA_VISIBLE_DEVICES selects among them)"
        )
    if count > module.device_count():
        raise ConfigError(
            f"rank {number('RANK')}: {count} ranks on a machine with {module.device_count()} {name_of(device)} devices; "
            f"use torchrun --nproc-per-node {module.device_count()}, or --device cpu"
        )
    device = torch.device(device.type, here)
    module.set_device(device)
    return device


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """In this context each rank has its own stream of torch's random numbers, for example for dropout; then all share
    one again.

    The streams are seeded from the shared one, so they are the same after resuming from a checkpoint.
    """
    if size() == 1:
        yield
        return
    import torch

    from heedful.devices import dropout_state, set_dropout_state

    seed = int(torch.randint(2**60, ()))
    shared = dropout_state()
    torch.manual_seed(seed + rank())
    try:
        yield
    finally:
        set_dropout_state(shared)


def shard_indices(costs: Sequence[float]) -> list[int]:
    """This rank's indices, in ascending order; see `parts`."""
    return list(range(len(costs))) if size() == 1 else parts(costs, size())[rank()]


def parts(costs: Sequence[float], count: int) -> list[list[int]]:
    """Split indices into ``count`` parts of about equal cost: the next most expensive goes to the cheapest part.

    Every index is in exactly one part, and no part is empty if there are enough. The largest sum is at most 4/3 of the
    optimum (Graham 1969, "Bounds on multiprocessing timing anomalies"). A cost counts as at least 1.
    """
    divided: list[list[int]] = [[] for _ in range(count)]
    loads = [(0.0, number) for number in range(count)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, number = heapq.heappop(loads)
        divided[number].append(index)
        heapq.heappush(loads, (load + max(1.0, costs[index]), number))
    return [sorted(part) for part in divided]


def add(tensors: Iterable[Tensor]) -> None:
    """All-reduce: replace each tensor by its sum over the ranks, in place; small tensors share a message.

    The result is bitwise equal on all ranks. Half precision is summed in float32.
    """
    if size() == 1:
        return
    import torch

    for bucket in _buckets(tensors):
        first, is_short = bucket[0], bucket[0].dtype in (torch.float16, torch.bfloat16)
        if len(bucket) == 1 and first.is_contiguous() and not is_short:
            _all_reduce(first)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        flat = flat.float() if is_short else flat
        _all_reduce(flat)
        for tensor, numbers in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(numbers.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of the same dtype and device into messages."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        bucket = kinds.setdefault((tensor.dtype, tensor.device), [])
        if bucket and sum(one.numel() for one in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = kinds[tensor.dtype, tensor.device] = []
        bucket.append(tensor)
    yield from kinds.values()


def add_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace the gradient of each parameter by its sum over the ranks.

    A gradient that only some ranks have counts as 0 on the others; one that no rank has stays None.
    """
    if size() == 1:
        return
    import torch

    learned = [parameter for parameter in parameters if parameter.requires_grad]
    have = torch.tensor([parameter.grad is not None for parameter in learned], dtype=torch.uint8)
    _all_reduce(have, largest=True)
    chosen = [parameter for parameter, has in zip(learned, have.tolist(), strict=True) if has]
    for parameter in chosen:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    add(parameter.grad for parameter in chosen if parameter.grad is not None)


def all_gather_rows(mine: Tensor, rows: Sequence[int], count: int) -> Tensor:
    """Gather disjoint rows of all ranks into ``[count, ...]``.

    ``mine`` are this rank's rows, ``[len(rows), ...]``, and ``rows`` their indices. The other dimensions must be equal
    on all ranks, also without rows.
    """
    import torch

    everything = torch.zeros(count, *mine.shape[1:], dtype=mine.dtype, device=mine.device)
    everything[torch.tensor(rows, dtype=torch.long, device=mine.device)] = mine
    if size() > 1:
        numbers = everything.view(torch.uint8) if everything.dtype == torch.bool else everything
        _all_reduce(numbers)  # 0 + x is x
    return everything


def all_gather_into(numbers: Tensor, mine: Sequence[Tensor], among: Tensor | None = None) -> None:
    """Gather rows of a tensor, ``[rows, ...]``, in place; each rank has filled in its own.

    ``mine`` are this rank's row indices, in parts; ``among`` those of all ranks (None for all rows).
    """
    if size() == 1:
        return
    import torch

    kept = torch.zeros_like(numbers)
    for rows in mine:
        kept[rows] = numbers[rows]
    _all_reduce(kept)
    if among is None:
        numbers.copy_(kept)
    else:
        numbers[among] = kept[among]


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank. It must be picklable."""
    if size() == 1:
        return value
    held = [value if is_first() else None]
    with complete():
        _dist().broadcast_object_list(held, src=0)
    return held[0]  # type: ignore[return-value]  # rank 0's value


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 only (`alone`), and return its result, which must be picklable, on every rank.

    An `Exception` of it is raised on every rank.
    """
    if size() == 1:
        return work()
    outcome: tuple[T | None, Exception | None] = (None, None)
    if is_first():
        try:
            with alone():
                outcome = work(), None
        except Exception as error:
            outcome = None, error if isinstance(error, HeedfulError) else _portable(error)
    value, failure = broadcast(outcome)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # None only with a failure, raised above


def _portable(error: Exception) -> Exception:
    """A picklable error: itself, or one with the same message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def gather(value: T) -> list[T]:
    """The values of all ranks, ordered by rank, on every rank. They must be picklable."""
    if size() == 1:
        return [value]
    held: list[Any] = [None] * size()
    with complete():
        _dist().all_gather_object(held, value)
    return held


def any_of(flag: bool) -> bool:
    """True on every rank if it is True on any."""
    return bool(largest(float(flag)))


class ElsewhereMemoryError(MemoryError):
    """Another rank ran out of memory, so this one repeats the work together with it."""


def raise_peer_errors() -> None:
    """Call before collectives in work that is repeated if a rank runs out of memory.

    Raises ElsewhereMemoryError if one did: that rank calls ``any_of(True)`` instead.
    """
    if any_of(False):
        raise ElsewhereMemoryError("out of memory on another rank")


def total(value: float) -> float:
    """The sum of the ranks' numbers, in order of rank."""
    return value if size() == 1 else sum(gather(value))


def merged(parts: Mapping[K, T]) -> dict[K, T]:
    """The union of all ranks' entries, which have different keys."""
    return {key: value for part in gather(dict(parts)) for key, value in part.items()}


def largest(value: float) -> float:
    """The largest of the ranks' numbers."""
    if size() == 1:
        return value
    import torch

    held = torch.tensor([value], dtype=torch.float64)
    _all_reduce(held, largest=True)
    return float(held)


def check_same(facts: Mapping[str, str], what: Mapping[str, str]) -> None:
    """Raises ConfigError on every rank if a rank's facts differ from rank 0's.

    ``what`` maps each name, or its first word, to the fix.
    """
    everywhere = gather(dict(facts))
    for number, others in enumerate(everywhere):
        for name, value in everywhere[0].items():
            if others.get(name) != value:
                remedy = what.get(name) or what[name.split()[0]]
                raise ConfigError(
                    f"rank {number} differs from rank 0 in {name}: {others.get(name)} instead of {value}; {remedy}"
                )


def _dist() -> Any:
    import torch.distributed

    return torch.distributed


def _all_reduce(tensor: Tensor, *, largest: bool = False) -> None:
    operation = _dist().ReduceOp
    with complete():
        _dist().all_reduce(tensor, operation.MAX if largest else operation.SUM)


@contextlib.contextmanager
def complete() -> Iterator[None]:
    """Context of a collective: converts its failure to RankError, except torch's own error if this rank runs out of
    memory."""
    try:
        yield
    except RuntimeError as error:  # from Gloo and NCCL, including DistError
        if is_out_of_memory(error):
            raise
        from heedful.distributed import rank_failures

        raise rank_failures.lost(error) from error
