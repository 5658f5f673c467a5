"""A run that a GPU has too little memory for is refused before anything is written."""

import torch

from heedful.checkpoints.shape import load_shape
from heedful.errors import CheckpointError, ConfigError
from heedful.kernels.device import HALF
from heedful.parallel import ranks
from heedful.planning.advice import what_fits
from heedful.planning.memory import CUDA_CONTEXT, GB
from heedful.planning.report import advice
from heedful.planning.work import Lengths, ShapeOf, Trainer, plan_of

MARGIN = 1.1
"""A run is refused if its plan is above this times the free memory: a plan may be a tenth off."""


def check_memory(config: Trainer, lengths: Lengths, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Refuse a run on a CUDA device whose memory is too small by far. Raises ConfigError.

    Call it when the lengths of the texts are known, best before the models are loaded. Elsewhere, and with ``memory_check``
    off, nothing happens.
    """
    if device.type != "cuda" or not config.memory_check:
        return
    # What this process holds is the run's own, or the memory that torch kept of an earlier one.
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        refuse_beyond(config, load_shape, lengths, ranks.size(), half=compute_dtype in HALF, free=free)
    except CheckpointError:
        return  # a model that cannot be built without weights cannot be planned; loading it says what is wrong, if anything


def refuse_beyond(
    config: Trainer, shape_of: ShapeOf, lengths: Lengths, number: int = 1, *, half: bool, free: float
) -> None:
    """Refuse settings whose plan for one of ``number`` ranks is above `MARGIN` times ``free`` bytes.

    Raises ConfigError, with what would fit.
    """

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
