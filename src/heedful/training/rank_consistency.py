"""All ranks of a run are made from and with the same: what differs is found before it makes numbers differ."""

from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch

from heedful.configs.options import RunOptions, check_ranks
from heedful.distributed import ranks
from heedful.distributed.ranks import local_device
from heedful.distributed.sharding import is_divided
from heedful.errors import TrainingError
from heedful.kernels.device import resolve_device
from heedful.training.provenance import LIBRARIES, content_hashes, digest, file_sum, inputs, settings_of

REMEDY = {
    "settings": "start every rank with the same flags and the same YAML file",
    "output": "start every rank with the same --output, a folder that all machines see",
    "data": "copy the files, or name a folder that all machines see",
    "models": "copy the models, or name a folder that all machines see",
    "versions": "install the same versions on every machine",
    "code": "install the same heedful on every machine",
}
"""What may differ, and how to make it the same."""


def meet(config: RunOptions) -> None:
    """Meet the other ranks, if there are any. Raises ConfigError; RankError if they do not come in time."""
    if ranks.launched():
        ranks.join(local_device(resolve_device(config.device)), timedelta(minutes=config.distributed_timeout_minutes))


def join_ranks(config: RunOptions) -> None:
    """Meet the other ranks and check that all run the same. Raises ConfigError; RankError if they do not come in time."""
    if not ranks.launched():
        return
    meet(config)
    ranks.check_same(_facts(config), REMEDY)
    check_ranks(config, ranks.size())


def _facts(config: RunOptions) -> dict[str, str]:
    """Sums of what a run depends on."""
    files, models = content_hashes([str(path) for path in inputs(config)])
    code = sorted(Path(__file__).parents[1].rglob("*.py"))
    return {
        "settings": digest(settings_of(config))[:12],
        "output": str(config.folder.absolute()),
        **{f"data {path}": number[:12] for path, number in files.items()},
        **{f"models {path}": number[:12] for path, number in models.items()},
        "versions": " ".join(f"{name} {version(name)}" for name in LIBRARIES),
        "code": digest([[path.name, file_sum(path)] for path in code])[:12],
    }


def check_same_weights(optimizer: torch.optim.Optimizer) -> None:
    """Check that what learns has the same weights on every rank. Raises TrainingError, naming a rank that differs.

    Weights that are divided among ranks are there once.
    """
    if ranks.size() == 1:
        return
    weights = [w.detach() for group in optimizer.param_groups for w in group["params"] if not is_divided(w)]
    sums = [f"{float(w.sum(dtype=torch.float64))} {float(w.double().norm())}" for w in weights]
    for number, theirs in enumerate(ranks.gather(sums)):
        if theirs != sums and number and ranks.rank() == 0:
            raise TrainingError(
                f"rank {number} no longer has the weights of rank 0; ranks must run on processors and GPUs of one kind, with "
                "the same libraries"
            )
