"""Settings of ``heedful doctor``: those of a trainer, and what is shown; or a device."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from heedful.configs.online import RolloutConfig
from heedful.configs.settings import NOT_NEGATIVE, Settings


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Settings):
    """What an examination shows. It writes nothing."""

    output: Path | None = None
    """Folder that the run would write to; its disk is looked at."""
    examples: Annotated[int, NOT_NEGATIVE] = 2
    """Records to show as text, tokens and mask."""
    json: bool = False
    """Write the findings as JSON to standard output, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class DoctorDeviceConfig(Settings):
    """Check training and sampling on a device, with tiny models made on the spot, and print a table to send to heedful."""

    device: str = "auto"
    """auto (CUDA if there is any, else mps, else cpu), cpu, cuda, cuda:N, mps, or any other type of device that torch
    knows."""
    json: bool = False
    """Write the table as JSON to standard output, and nothing else."""


@cache
def doctor_settings(trainer: type[Any]) -> type[DoctorOptions]:
    """The settings of an examination of the trainer with these settings."""
    read = "data, models, rewards, environments" if issubclass(trainer, RolloutConfig) else "data, model"
    explained = f"Examine {read} and settings of heedful {trainer.algorithm} before it runs. Nothing is written."
    made = type(f"Doctor{trainer.__name__}", (DoctorOptions, trainer), {"__doc__": explained, "__module__": __name__})
    return dataclass(frozen=True, kw_only=True)(made)
