"""What a launcher gives each of several ranks of this machine."""

import contextlib
import os
import random
import socket


def free_port():
    """A free port below those that the system gives to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def environment(rank, size, port):
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return os.environ | {name: str(value) for name, value in (own | meeting).items()}
