"""Memory check: refuses a run that needs more GPU or main memory than there is, before anything is written."""

import math
import os
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from heedful.configs.online import RolloutConfig
from heedful.configs.options import TrainingOptions
from heedful.devices import capabilities, free_memory
from heedful.distributed import ranks
from heedful.errors import CheckpointError, ConfigError
from heedful.kernels.device import HALF
from heedful.models.shape import load_shape
from heedful.planning.memory import CUDA_CONTEXT, GB, Lengths, ShapeOf, plan_of
from heedful.planning.report import advice, what_fits
from heedful.types import MicroBatch

MARGIN = 1.1
"""A run on a GPU is refused if its plan exceeds the free memory by this factor: a plan may be 10 % off."""
BESIDE_WEIGHTS = {"CUDA itself", "states of the value head", "copy that samples", "copy for servers"}
"""Parts of an optimizer step's plan that are not weights, gradients or moments."""


def check_memory(config: TrainingOptions, lengths: Lengths, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Raises ConfigError, with settings that would fit, if a run needs clearly more memory than the device has, or for a
    device without memory of its own, if its weights, gradients and moments alone exceed the machine's memory.

    Call it when the lengths of the texts are known, best before the models are loaded. Does nothing with
    ``memory_check`` off.
    """
    if not config.memory_check:
        return
    half = compute_dtype in HALF
    try:
        free = free_memory(device)
        if free is not None:
            refuse_on_gpu(config, load_shape, lengths, half=half, free=free, number=ranks.size())
            refuse_beside_gpu(config, load_shape, lengths, half=half, memory=main_memory())
        else:
            kind = planned_as(device)
            refuse_in_main_memory(config, load_shape, lengths, kind, half=half, memory=main_memory())
    except CheckpointError:
        return  # a model that cannot be built without weights cannot be planned; loading it reports errors


class SamplingPlan(NamedTuple):
    """How a run samples."""

    micro_batch: MicroBatch
    """Rows at a time."""
    graphs: bool = False
    """Whether there is room for CUDA graphs."""
    merges_adapters: bool = False
    """Whether adapters are merged in the copy that samples."""


def sampling_plan(
    config: RolloutConfig, lengths: Lengths, device: torch.device, compute_dtype: torch.dtype
) -> SamplingPlan:
    """What the memory of a run has room for in sampling."""
    limit, here = config.rollout_micro_batch, math.ceil(config.rollout_batch_size / ranks.size())
    grows = config.rollout_micro_batch_size is None and here > limit.rows
    planned = config if capabilities(device).graphs else replace(config, cuda_graphs="off")
    if config.sampler or not (config.lora_rank or grows or planned.cuda_graphs == "auto"):
        return SamplingPlan(limit, graphs=config.cuda_graphs == "on")
    half, kind, free = compute_dtype in HALF, planned_as(device), (free_memory(device) or 0) / MARGIN
    try:
        plan = plan_of(planned, load_shape, lengths, ranks=ranks.size(), device=kind, half=half, free=free)
    except CheckpointError:  # a model that cannot be built without weights cannot be planned
        return SamplingPlan(limit, graphs=config.cuda_graphs == "on")
    limit = replace(limit, rows=max(limit.rows, plan.sampled_rows)) if grows else limit
    return SamplingPlan(limit, graphs=plan.graphs, merges_adapters=plan.merges_adapters)


def refuse_on_gpu(
    config: TrainingOptions, shape_of: ShapeOf, lengths: Lengths, *, half: bool, free: float, number: int = 1
) -> None:
    """Raises ConfigError if the plan for one of ``number`` ranks exceeds `MARGIN` times ``free`` bytes."""

    def needed(settings: TrainingOptions) -> float:  # the CUDA context is already part of the used memory
        return plan_of(settings, shape_of, lengths, ranks=number, device="cuda", half=half).peak - CUDA_CONTEXT

    need = needed(config)
    if need <= MARGIN * free:
        return
    who, asked = ("this run", "") if number == 1 else (f"each of the {number} ranks", f" --ranks {number}")
    raise ConfigError(
        f"{who} needs about {need / GB:.1f} GB, and {free / GB:.1f} GB of the GPU are free (texts of up to "
        f"{lengths.longest} tokens; heedful plan{asked} lists the parts); "
        f"{advice(what_fits(config, needed, free))}\n"
        "--no-memory-check runs it anyway"
    )


def refuse_beside_gpu(
    config: TrainingOptions, shape_of: ShapeOf, lengths: Lengths, *, half: bool, memory: float
) -> None:
    """Raises ConfigError if what the ranks of this machine keep in main memory beside their GPUs exceeds it."""

    def needed(settings: TrainingOptions) -> float:
        plan = plan_of(settings, shape_of, lengths, ranks=ranks.size(), device="cuda", half=half)
        return sum(plan.main_memory(_local_ranks()).values())

    need = needed(config)
    if need > memory:
        raise ConfigError(
            f"this run needs about {need / GB:.1f} GB of main memory beside the GPU, but this machine has "
            f"{memory / GB:.1f} GB; {advice(what_fits(config, needed, memory))}\n--no-memory-check runs it anyway"
        )


def _local_ranks() -> int:
    """Ranks of this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "") if ranks.size() > 1 else ""  # optional on a CPU
    return int(local) if local.isdigit() else 1


def refuse_in_main_memory(
    config: TrainingOptions,
    shape_of: ShapeOf,
    lengths: Lengths,
    device: Literal["cpu", "cuda"],
    *,
    half: bool,
    memory: float,
) -> None:
    """Raises ConfigError if weights, gradients and moments of all ranks of this machine exceed its memory.

    Activations are left out: on a CPU, the freed memory that a process keeps is unknown.
    """

    def needed(settings: TrainingOptions) -> float:
        if settings != config and _needs_gpu(settings, half):
            return math.inf
        step = plan_of(settings, shape_of, lengths, ranks=ranks.size(), device=device, half=half).phases["step"]
        return _local_ranks() * sum(size for name, size in step.items() if name not in BESIDE_WEIGHTS)

    need = needed(config)
    if need <= memory:
        return
    raise ConfigError(
        f"this run needs about {need / GB:.1f} GB for weights, gradients and the optimizer's moments alone, but this machine "
        f"has {memory / GB:.1f} GB of memory; {advice(what_fits(config, needed, memory))}\n"
        "--no-memory-check runs it anyway"
    )


def planned_as(device: torch.device) -> Literal["cpu", "cuda"]:
    """The kind of device whose plan holds: every accelerator stores weights like CUDA."""
    return "cpu" if device.type == "cpu" else "cuda"


def main_memory() -> float:
    """Bytes of the machine's main memory, which Apple's GPUs share; infinite if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not available on Windows
        return math.inf


def _needs_gpu(settings: TrainingOptions, half: bool) -> bool:
    """Whether settings need a CUDA device, or bfloat16 products where there are none (``half`` is False)."""
    moved = settings.optimizer_device == "cpu" or getattr(settings, "reference_device", "same") == "cpu"
    small = settings.quantize != "none" or settings.optimizer != "adamw"
    return moved or small or (settings.weights_dtype == "bfloat16" and not half)
