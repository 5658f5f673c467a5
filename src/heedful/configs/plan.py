"""Settings of ``heedful plan``: those of a trainer, and how large the GPU and the texts are."""

import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from heedful.configs.online import PPOConfig, RolloutConfig
from heedful.configs.options import ShardOptions, check_ranks
from heedful.configs.parse import read_keys
from heedful.configs.settings import POSITIVE
from heedful.configs.trainers import TRAINERS
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


@cache
def plan_settings(trainer: type[Any]) -> type[PlanOptions]:
    """The settings of a plan of the trainer with these settings."""
    options = OnlinePlanOptions if issubclass(trainer, RolloutConfig) else OfflinePlanOptions
    models = "--model is a model's name, or 0.5B, 1.5B, 4B or 8B."
    explained = f"How much memory heedful {trainer.algorithm} needs, part by part. {models}"
    made = type(f"Plan{trainer.__name__}", (options, trainer), {"__doc__": explained, "__module__": __name__})
    return dataclass(frozen=True, kw_only=True)(made)


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
    keys = {one.key for one in read_keys(path, plan_settings(PPOConfig))}
    known = {name: {field.name for field in fields(plan_settings(one.settings()))} for name, one in TRAINERS.items()}
    fitting = [name for name, names in known.items() if keys <= names]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        found = f"it could be that of heedful {', '.join(fitting[:-1])} or {fitting[-1]}"
    else:
        found = f"no trainer has all of its keys (there are plans of heedful {', '.join(TRAINERS)})"
    raise ConfigError(f"{path}: {found}; name the trainer: heedful {command} {(fitting or ['ppo'])[0]} {path}")
