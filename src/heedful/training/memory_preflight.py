"""A run that a GPU, or a machine without one, has too little memory for is refused before anything is written."""

import math
import os
from typing import Literal

import torch

from heedful.distributed import ranks
from heedful.errors import CheckpointError, ConfigError
from heedful.kernels.device import HALF
from heedful.models.shape import load_shape
from heedful.planning.memory import CUDA_CONTEXT, GB, Lengths, ShapeOf, Trainer, plan_of
from heedful.planning.report import advice, what_fits

MARGIN = 1.1
"""A run on a GPU is refused if its plan is above this times the free memory: a plan may be a tenth off."""
BESIDE_WEIGHTS = {"CUDA itself", "states of the value head", "copy that samples", "copy for servers"}
"""What an optimizer step holds besides weights, gradients and moments."""


def check_memory(config: Trainer, lengths: Lengths, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Refuse a run on a CUDA device whose memory is too small by far, or one elsewhere whose weights, gradients and moments
    alone are more than the machine's memory. Raises ConfigError, with what would fit.

    Call it when the lengths of the texts are known, best before the models are loaded. With ``memory_check`` off, nothing
    happens.
    """
    if not config.memory_check:
        return
    half = compute_dtype in HALF
    try:
        if device.type == "cuda":
            # What this process holds is the run's own, or the memory that torch kept of an earlier one.
            free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
            refuse_on_gpu(config, load_shape, lengths, half=half, free=free, number=ranks.size())
        else:
            # Apple's GPUs store as CUDA devices do.
            kind: Literal["cpu", "cuda"] = "cpu" if device.type == "cpu" else "cuda"
            refuse_in_main_memory(config, load_shape, lengths, kind, half=half, memory=main_memory())
    except CheckpointError:
        return  # a model that cannot be built without weights cannot be planned; loading it says what is wrong, if anything


def refuse_on_gpu(
    config: Trainer, shape_of: ShapeOf, lengths: Lengths, *, half: bool, free: float, number: int = 1
) -> None:
    """Refuse settings whose plan for one of ``number`` ranks is above `MARGIN` times ``free`` bytes. Raises ConfigError."""

    def needed(settings: Trainer) -> float:  # the context is there already when free memory is asked for
        return plan_of(settings, shape_of, lengths, ranks=number, device="cuda", half=half).peak - CUDA_CONTEXT

    need = needed(config)
    if need <= MARGIN * free:
        return
    who, asked = ("this run", "") if number == 1 else (f"each of the {number} ranks", f" --ranks {number}")
    raise ConfigError(
        f"{who} needs about {need / GB:.1f} GB, and {free / GB:.1f} GB of the GPU are free (texts of up to "
        f"{lengths.longest} tokens; heedful plan{asked} says what each part takes); "
        f"{advice(what_fits(config, needed, free))}\n"
        "--no-memory-check goes ahead all the same"
    )


def refuse_in_main_memory(
    config: Trainer, shape_of: ShapeOf, lengths: Lengths, device: Literal["cpu", "cuda"], *, half: bool, memory: float
) -> None:
    """Refuse settings whose weights, gradients and moments, of all ranks of this machine, are more than its memory.

    Activations are left out: no plan knows how much of freed memory a process on a CPU keeps. Raises ConfigError.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "") if ranks.size() > 1 else ""  # on a CPU it need not be there
    local_ranks = int(local) if local.isdigit() else 1

    def needed(settings: Trainer) -> float:
        if settings != config and _needs_gpu(settings, half):
            return math.inf
        step = plan_of(settings, shape_of, lengths, ranks=ranks.size(), device=device, half=half).phases["step"]
        return local_ranks * sum(size for name, size in step.items() if name not in BESIDE_WEIGHTS)

    need = needed(config)
    if need <= memory:
        return
    raise ConfigError(
        f"this run needs about {need / GB:.1f} GB for weights, gradients and the optimizer's moments alone, and this machine "
        f"has {memory / GB:.1f} GB of memory; {advice(what_fits(config, needed, memory))}\n"
        "--no-memory-check goes ahead all the same"
    )


def main_memory() -> float:
    """Bytes of the machine's main memory, which Apple's GPUs share; infinite where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no such call
        return math.inf


def _needs_gpu(settings: Trainer, half: bool) -> bool:
    """Whether settings are refused on a machine without a CUDA device, or with its precision of products."""
    moved = settings.optimizer_device == "cpu" or getattr(settings, "reference_device", "same") == "cpu"
    small = settings.quantize != "none" or settings.optimizer != "adamw"
    return moved or small or (settings.weights_dtype == "bfloat16" and not half)
