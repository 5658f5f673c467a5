"""Settings of ``heedful plan``: those of a trainer, and how large the GPU and the texts are."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from heedful.configs.offline import DPOConfig, KTOConfig, RewardConfig, SFTConfig
from heedful.configs.online import A2CConfig, GRPOConfig, OnlineDPOConfig, PPOConfig
from heedful.configs.options import ShardOptions, check_ranks
from heedful.configs.parse import read_keys
from heedful.configs.settings import POSITIVE
from heedful.errors import ConfigError
from heedful.files import read_object


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ShardOptions):
    """Settings of a plan that a run determines by itself."""

    gpu_gb: Annotated[float | None, POSITIVE] = None
    """Memory of the GPU in GB (10^9 bytes), such as 24, 48 or 80: the plan also reports whether the run fits. None reports
    only the memory needed."""
    ranks: Annotated[int, POSITIVE] = 1
    """Processes of the run, each with a GPU of its own (torchrun --nproc-per-node N): the plan is of one of them. Each has
    its share of the rows, and with --shard full of the models."""
    data: str = ""
    """Not read: a plan takes every text to be as long as the longest."""
    output: Path = Path("plan")
    """Not written."""

    def check(self) -> None:
        super().check()
        if self.shard == "full" and self.ranks == 1:
            raise ConfigError(
                "--shard full shards models over several ranks; give their number (--ranks 8), or leave it out"
            )
        check_ranks(self, self.ranks)


@dataclass(frozen=True, kw_only=True)
class OfflinePlanOptions(PlanOptions):
    """A plan for training on given texts."""

    max_length: Annotated[int, POSITIVE] = 1024
    """Longest text in tokens, prompt included."""


@dataclass(frozen=True, kw_only=True)
class OnlinePlanOptions(PlanOptions):
    """A plan for training on sampled responses."""

    prompt_tokens: Annotated[int, POSITIVE] = 256
    """Longest prompt in tokens. The longest text has max-new-tokens more."""


@dataclass(frozen=True, kw_only=True)
class PlanSFTConfig(OfflinePlanOptions, SFTConfig):
    """How much memory heedful sft needs, part by part. --model is a model's name, or 0.5B, 1.5B, 4B or 8B."""


@dataclass(frozen=True, kw_only=True)
class PlanRewardConfig(OfflinePlanOptions, RewardConfig):
    """How much memory heedful reward needs, part by part. --model is a model's name, or 0.5B, 1.5B, 4B or 8B."""


@dataclass(frozen=True, kw_only=True)
class PlanDPOConfig(OfflinePlanOptions, DPOConfig):
    """How much memory heedful dpo needs, part by part. --model is a model's name, or 0.5B, 1.5B, 4B or 8B."""


@dataclass(frozen=True, kw_only=True)
class PlanKTOConfig(OfflinePlanOptions, KTOConfig):
    """How much memory heedful kto needs, part by part. --model is a model's name, or 0.5B, 1.5B, 4B or 8B."""


@dataclass(frozen=True, kw_only=True)
class PlanPPOConfig(OnlinePlanOptions, PPOConfig):
    """How much memory heedful ppo needs, part by part. --model is a model's name, or 0.5B, 1.5B, 4B or 8B."""


@dataclass(frozen=True, kw_only=True)
class PlanA2CConfig(OnlinePlanOptions, A2CConfig):
    """How much memory heedful a2c needs, part by part. --model is a model's name, or 0.5B, 1.5B, 4B or 8B."""


@dataclass(frozen=True, kw_only=True)
class PlanGRPOConfig(OnlinePlanOptions, GRPOConfig):
    """How much memory heedful grpo needs, part by part. --model is a model's name, or 0.5B, 1.5B, 4B or 8B."""


@dataclass(frozen=True, kw_only=True)
class PlanOnlineDPOConfig(OnlinePlanOptions, OnlineDPOConfig):
    """How much memory heedful online-dpo needs, part by part. --model is a model's name, or 0.5B, 1.5B, 4B or 8B."""


PlanConfig = (
    PlanSFTConfig
    | PlanRewardConfig
    | PlanDPOConfig
    | PlanKTOConfig
    | PlanPPOConfig
    | PlanA2CConfig
    | PlanGRPOConfig
    | PlanOnlineDPOConfig
)
TRAINERS: dict[str, type[PlanConfig]] = {
    "sft": PlanSFTConfig,
    "reward": PlanRewardConfig,
    "ppo": PlanPPOConfig,
    "a2c": PlanA2CConfig,
    "grpo": PlanGRPOConfig,
    "online-dpo": PlanOnlineDPOConfig,
    "dpo": PlanDPOConfig,
    "kto": PlanKTOConfig,
}
"""The trainers with a plan, by their commands."""


def trainer_of(path: Path, command: str = "plan") -> str:
    """Find the trainer of a YAML file of settings, for ``heedful plan`` or another ``command`` of all trainers.

    For a run's config.yaml it is the run's trainer; else the one in the file's name, as in polite-ppo.yaml; else the only one
    that has all keys of the file. Raises ConfigError if none or several have them.
    """
    run = path.parent / "run.json"
    if path.name == "config.yaml" and run.is_file():
        algorithm = read_object(run, f"name the trainer: heedful {command} ppo {path}", error=ConfigError).get(
            "algorithm"
        )
        if algorithm in TRAINERS:
            return str(algorithm)
    names = "|".join(sorted(TRAINERS, key=len, reverse=True))
    named = set(re.findall(rf"(?<![a-z0-9])({names})(?![a-z0-9])", path.stem.lower().replace("_", "-")))
    if len(named) == 1:
        return str(named.pop())
    keys = {one.key for one in read_keys(path, PlanPPOConfig)}
    fitting = [name for name, config in TRAINERS.items() if keys <= {field.name for field in fields(config)}]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        found = f"it could be that of heedful {', '.join(fitting[:-1])} or {fitting[-1]}"
    else:
        found = f"no trainer has all of its keys (there are plans of heedful {', '.join(TRAINERS)})"
    raise ConfigError(f"{path}: {found}; name the trainer: heedful {command} {(fitting or ['ppo'])[0]} {path}")
