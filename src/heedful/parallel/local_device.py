"""What each rank has for itself: a device, and random numbers where they may differ."""

import contextlib
from collections.abc import Iterator

import torch

from heedful.errors import ConfigError
from heedful.parallel import ranks


def local_device(device: torch.device) -> torch.device:
    """The device of this rank: of several CUDA devices that with its number on this machine (LOCAL_RANK), made current.

    Raises ConfigError if a device was chosen that the ranks would share.
    """
    if not ranks.launched() or device.type == "cpu":
        return device
    here, count = ranks.number("LOCAL_RANK"), ranks.number("LOCAL_WORLD_SIZE")
    if device.type != "cuda":
        raise ConfigError(
            f"--device {device.type}: {count} ranks cannot share it; start one process, or use --device cpu"
        )
    if device.index is not None:
        raise ConfigError(
            f"--device {device}: {count} ranks cannot share a GPU; leave it out, and each takes the one of its number "
            "(CUDA_VISIBLE_DEVICES chooses among them)"
        )
    if count > torch.cuda.device_count():
        raise ConfigError(
            f"rank {ranks.number('RANK')}: {count} ranks on a machine with {torch.cuda.device_count()} CUDA devices; "
            f"torchrun --nproc-per-node {torch.cuda.device_count()}, or --device cpu"
        )
    device = torch.device("cuda", here)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Inside, each rank has its own stream of torch's random numbers, as for dropout; afterwards all have the same.

    The streams are seeded from the common one, so they are the same when a run goes on from a checkpoint.
    """
    if ranks.size() == 1:
        yield
        return
    seed = int(torch.randint(2**60, ()))
    uses_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    on_cpu, on_gpu = torch.get_rng_state(), torch.cuda.get_rng_state() if uses_gpu else None
    torch.manual_seed(seed + ranks.rank())
    try:
        yield
    finally:
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
