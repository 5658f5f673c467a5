"""Ranks: real processes that meet as torchrun's do."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def environment(rank, size, port):
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return os.environ | {name: str(value) for name, value in (own | meeting).items()}


@pytest.fixture(scope="session")
def launch():
    """``launch(size, *words)`` starts ``python *words`` in ``size`` ranks and returns their processes."""

    def start(size, *words, per_rank=None, **variables):
        port, started = free_port(), []
        for rank in range(size):
            more = {**variables, **((per_rank or {}).get(rank, {}))}
            started.append(
                subprocess.Popen(
                    [sys.executable, *map(str, words)],
                    env=environment(rank, size, port) | more,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    return start


@pytest.fixture(scope="session")
def results(launch):
    """``results(size, script)`` is what the script printed last in each rank, read as JSON."""

    def of(size, script, *words, timeout=300):
        found = []
        processes = launch(size, HERE / script, *words)
        try:
            for process in processes:
                out, err = process.communicate(timeout=timeout)
                assert process.returncode == 0, err[-4000:]
                found.append(json.loads(out.splitlines()[-1]))
        finally:
            for process in processes:
                process.kill()
        return found

    return of
