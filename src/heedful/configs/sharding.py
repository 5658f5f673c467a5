"""Settings of runs on several ranks: how they hold the models, and how many there can be."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from heedful.configs.checks import flag, refuse
from heedful.configs.ranges import POSITIVE
from heedful.configs.settings import Settings
from heedful.errors import ConfigError

UNSHARDED = {
    "compile": (False, "compiled layers are untried on divided weights"),
    "quantize": ("none", "4-bit weights cannot be divided"),
    "optimizer": (
        "adamw",
        "its 8-bit moments cannot be divided; with --shard full each rank has only its part of AdamW's",
    ),
    "reference_device": ("same", "the reference is divided among the ranks too"),
    "cuda_graphs": (False, "a recording needs weights that stay in one place, and whole ones are there only to sample"),
    "sampler_weights": ("folder", "rank 0 puts whole weights together in main memory, and NCCL sends what a GPU holds"),
    "dtype": ("float32", "float16 needs scaled gradients, which are untried on divided weights; use --dtype bfloat16"),
}
"""What does not go with --shard full, by field: the value that does, and why others do not (of dtype: only float16)."""


@dataclass(frozen=True, kw_only=True)
class ShardOptions(Settings):
    """How the ranks of a run (torchrun --nproc-per-node N -m heedful ...) hold its models."""

    SECTION = "devices"

    shard: Literal["none", "full"] = "none"
    """none: every rank holds whole models, the fastest if they fit. full: each holds a part of every weight, gradient and
    moment (PyTorch's FSDP2), and so of memory, for more traffic between ranks; the numbers stay the same. In one process it
    changes nothing."""
    replicas: Annotated[int, POSITIVE] = 1
    """With --shard full: how many times the ranks together hold the models. Set it to the number of machines, so that each
    holds them whole and only sums of gradients travel between machines."""
    sync_every: Literal["step", "micro-batch"] = "step"
    """With --shard full: when gradients are summed over the ranks and divided. step: once per optimizer step, in its last
    micro-batch; until then each rank holds the gradients of whole weights. micro-batch: each time, for the least memory and
    the most traffic."""

    def check(self) -> None:
        super().check()
        if self.shard == "none":
            refuse(self, "replicas", "sync_every", because="belongs to --shard full; add it, or leave this out")
            return
        for name, (fits, reason) in UNSHARDED.items():
            value: Any = getattr(self, name, fits)
            if value != fits and (name != "dtype" or value == "float16"):
                given = flag(name) if value is True else f"{flag(name)} {value}"
                raise ConfigError(f"{given} does not go with --shard full: {reason}; leave out one of the two")


def check_ranks(config: Any, ranks: int) -> None:
    """Refuse more ranks than an optimizer step has rows: some would never have any. Refuse ``replicas`` that do not divide
    them. Raises ConfigError."""
    check_replicas(config.replicas, ranks)
    per_row = 1
    if isinstance(per_prompt := getattr(config, "samples_per_prompt", 1), int) and not hasattr(config, "surrogate"):
        per_row = per_prompt
    for name in ("batch_size", "minibatch_size"):
        rows = getattr(config, name, None)
        if rows is not None and math.ceil(rows / per_row) < ranks:
            raise ConfigError(
                f"{ranks} ranks, but a step has {rows // per_row} rows to divide among them ({flag(name)} {rows}): "
                f"raise it to at least {ranks * per_row}, or start at most {rows // per_row} ranks"
            )


def check_replicas(replicas: int, ranks: int) -> None:
    """The ranks can hold the models so many times. Raises ConfigError."""
    if ranks % replicas:
        divisors = [str(count) for count in range(1, ranks + 1) if ranks % count == 0]
        raise ConfigError(
            f"--replicas {replicas} does not divide the {ranks} ranks; choose one of {', '.join(divisors)}, or start a "
            f"multiple of {replicas} ranks"
        )
