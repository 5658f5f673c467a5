"""A rank that does what its argument says after the first message; run in several ranks by test_failing_ranks.py.

failing.py SECONDS WHAT_RANK_0_DOES WHAT_RANK_1_DOES ...

With LIKE_NCCL set, the end of a group waits for all ranks, as NCCL's does; "block" is a rank whose main thread stands in a
sum that is never completed and hears no signal.
"""

import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.tensor import Shard, distribute_tensor

from heedful import DataError
from heedful.cli import main as cli
from heedful.distributed import ranks
from heedful.distributed.sharded_files import write_parts
from heedful.distributed.sharding import make_mesh
from heedful.errors import Terminated


def divided():
    """A tensor of which each rank has a part."""
    return distribute_tensor(torch.arange(8.0), make_mesh(torch.device("cpu")), [Shard(0)])


def run(seconds, *does):
    ranks.join(torch.device("cpu"), timedelta(seconds=float(seconds)))
    if "LIKE_NCCL" in os.environ:
        torch.distributed.destroy_process_group = lambda: time.sleep(3600)
        ranks._World.uses_nccl = True
    assert ranks.total(1.0) == len(does)
    parts = {"w": divided()} if "save" in does else {}
    match does[ranks.rank()]:
        case "save":
            with tempfile.TemporaryDirectory() as folder:
                write_parts(Path(folder), parts)
        case "raise":
            raise DataError("坏的 line 3")
        case "break":
            raise ValueError("a mistake of our own")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(3600)
        case "block":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            time.sleep(3600)
        case "terminate":
            raise Terminated(signal.SIGTERM)
    ranks.total(1.0)


if __name__ == "__main__":
    cli._run = lambda words, **_: run(*words)
    sys.exit(cli.main())
