"""Checks that all ranks of a run have the same settings, data, models, versions and weights."""

from datetime import timedelta
from pathlib import Path

import torch

from heedful.configs.options import RunOptions, check_ranks
from heedful.distributed import ranks
from heedful.distributed.ranks import local_device
from heedful.distributed.sharding import is_divided
from heedful.errors import TrainingError
from heedful.kernels.device import resolve_device
from heedful.training.provenance import content_hashes, digest, file_sum, inputs, settings_of, versions

REMEDY = {
    "settings": "start every rank with the same flags and the same YAML file",
    "output": "start every rank with the same --output, a folder shared by all machines",
    "data": "copy the files, or use a folder shared by all machines",
    "models": "copy the models, or use a folder shared by all machines",
    "versions": "install the same versions on every machine",
    "code": "install the same heedful on every machine",
}
"""Facts that may differ, each with its fix."""


def meet(config: RunOptions) -> None:
    """Wait for the other ranks, if any. Raises ConfigError; RankError on timeout."""
    if ranks.launched():
        ranks.join(local_device(resolve_device(config.device)), timedelta(minutes=config.distributed_timeout_minutes))


def join_ranks(config: RunOptions) -> None:
    """Wait for the other ranks, and check that all run the same. Raises ConfigError; RankError on timeout."""
    if not ranks.launched():
        return
    meet(config)
    ranks.check_same(_facts(config), REMEDY)
    check_ranks(config, ranks.size())


def _facts(config: RunOptions) -> dict[str, str]:
    """Hashes of a run's dependencies."""
    files, models = content_hashes([str(path) for path in inputs(config)])
    code = sorted(Path(__file__).parents[1].rglob("*.py"))
    return {
        "settings": digest(settings_of(config))[:12],
        "output": str(config.folder.absolute()),
        **{f"data {path}": number[:12] for path, number in files.items()},
        **{f"models {path}": number[:12] for path, number in models.items()},
        "versions": " ".join(f"{name} {version}" for name, version in versions().items()),
        "code": digest([[path.name, file_sum(path)] for path in code])[:12],
    }


def check_same_weights(optimizer: torch.optim.Optimizer) -> None:
    """Check that trained weights are equal on all ranks. Raises TrainingError that names a rank that differs.

    Sharded weights exist once, so they are not compared.
    """
    if ranks.size() == 1:
        return
    weights = [w.detach() for group in optimizer.param_groups for w in group["params"] if not is_divided(w)]
    sums = [f"{float(w.sum(dtype=torch.float64))} {float(w.double().norm())}" for w in weights]
    for number, theirs in enumerate(ranks.gather(sums)):
        if theirs != sums and number and ranks.rank() == 0:
            raise TrainingError(
                f"the weights of rank {number} differ from those of rank 0; run all ranks on processors and GPUs of "
                "the same kind, with the same libraries"
            )
