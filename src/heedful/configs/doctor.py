"""Settings of ``heedful doctor``: those of a trainer, and what is shown; or a device."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from heedful.configs.offline import DPOConfig, KTOConfig, RewardConfig, SFTConfig
from heedful.configs.online import A2CConfig, GRPOConfig, OnlineDPOConfig, PPOConfig
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


@dataclass(frozen=True, kw_only=True)
class DoctorSFTConfig(DoctorOptions, SFTConfig):
    """Examine data, model and settings of heedful sft before it runs. Nothing is written."""


@dataclass(frozen=True, kw_only=True)
class DoctorRewardConfig(DoctorOptions, RewardConfig):
    """Examine data, model and settings of heedful reward before it runs. Nothing is written."""


@dataclass(frozen=True, kw_only=True)
class DoctorDPOConfig(DoctorOptions, DPOConfig):
    """Examine data, model and settings of heedful dpo before it runs. Nothing is written."""


@dataclass(frozen=True, kw_only=True)
class DoctorKTOConfig(DoctorOptions, KTOConfig):
    """Examine data, model and settings of heedful kto before it runs. Nothing is written."""


@dataclass(frozen=True, kw_only=True)
class DoctorPPOConfig(DoctorOptions, PPOConfig):
    """Examine data, models, rewards and settings of heedful ppo before it runs. Nothing is written."""


@dataclass(frozen=True, kw_only=True)
class DoctorA2CConfig(DoctorOptions, A2CConfig):
    """Examine data, models, rewards and settings of heedful a2c before it runs. Nothing is written."""


@dataclass(frozen=True, kw_only=True)
class DoctorGRPOConfig(DoctorOptions, GRPOConfig):
    """Examine data, models, rewards and settings of heedful grpo before it runs. Nothing is written."""


@dataclass(frozen=True, kw_only=True)
class DoctorOnlineDPOConfig(DoctorOptions, OnlineDPOConfig):
    """Examine data, models, rewards and settings of heedful online-dpo before it runs. Nothing is written."""


DoctorConfig = (
    DoctorSFTConfig
    | DoctorRewardConfig
    | DoctorDPOConfig
    | DoctorKTOConfig
    | DoctorPPOConfig
    | DoctorA2CConfig
    | DoctorGRPOConfig
    | DoctorOnlineDPOConfig
)
