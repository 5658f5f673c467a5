"""A run that the disk has no room for is refused before anything is written."""

import math
import shutil
from typing import Any, Protocol

import torch

from heedful.configs.options import TrainingOptions
from heedful.errors import MachineError
from heedful.train.output_folder import bytes_of_models, real_path
from heedful.train.state_file import size_of


class Learns(Protocol):
    """What learns in a run."""

    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        """All that changes during a run."""


def check_space(config: TrainingOptions, learner: Learns) -> None:
    """Refuse a disk that has no room for what a run writes. Raises MachineError.

    A checkpoint has the weights that learn as a model, the learner's state, and Adam's two moments, which that has from the
    first step on. While a new one is written there is one more than are kept, besides best/ and final/. What a run that goes
    on has of these counts as free.
    """
    weights = [p for group in learner.optimizer.param_groups for p in group["params"]]
    trained = sum(p.numel() * max(4, p.element_size()) for p in weights)
    checkpoints = (config.keep or 2) + 1
    needed = checkpoints * (size_of(learner.state_dict()) + 3 * trained) + 2 * trained + 32 * 2**20
    folder = real_path(config.output)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free + (0 if config.overwrite else bytes_of_models(real_path(config.output)))
    gigabytes = math.ceil(needed / 1e8) / 10
    if free < needed:
        raise MachineError(
            f"--output {config.output}: the disk has {free / 1e9:.1f} GB free, and the run needs {gigabytes:.1f} GB "
            f"for {checkpoints} checkpoints, best/ and final/; free some, choose another disk, keep fewer (--keep), or train "
            "adapters (--lora-rank)"
        )
