"""Serve a reward model over HTTP: the other end of `heedful.rewards.http` (docs/rewards.md has the protocol).

The process of the command starts the others and loads no torch. One receives requests, checks them and lets them queue
(`heedful.serving`); the workers, each with a model, read, score and answer them (`heedful.rewards.serve_worker`).
"""

import contextlib
import os
import pickle
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heedful.configs.scoring import ServeRewardConfig
from heedful.display import Screen, harmless
from heedful.errors import ConfigError
from heedful.serving.limits import SPARE_FILES, Limits
from heedful.serving.listening import bound
from heedful.serving.process import FrontProcess
from heedful.serving.workers import Workers

WORKER = "from heedful.rewards.serve_worker import main; main"
"""What a worker runs."""


def show(text: str) -> None:
    """Print a line."""
    Screen(soft_wrap=True).print(harmless(text), markup=False, highlight=False)


def serve_reward(config: ServeRewardConfig, announce: Callable[[str], None] = show) -> None:
    """Serve a reward model until Ctrl-C.

    Args:
        config: the model, the address and the limits.
        announce: is called with a line of text when the server is ready (with its address), and when it has ended.

    Raises ConfigError if the server cannot listen at the address, there is no token where ``config.token_env`` says, or the
    system allows too few open files; CheckpointError if there is no such reward model; MachineError or MemoryFullError if a
    worker cannot hold it.
    """
    limits = limits_of(config)
    orders = [pickle.dumps((config, index)) for index in range(config.workers)]
    with (
        bound(config.host, config.port) as listening,
        Workers(WORKER, orders) as workers,
        FrontProcess(listening) as front,
    ):
        found = workers.start(front)
        front.open(limits)
        host = f"[{config.host}]" if ":" in config.host else config.host
        announce(f"{config.model} scores at http://{host}:{listening.getsockname()[1]}/score; Ctrl-C ends it")
        if config.workers > 1:
            announce(f"{config.workers} workers, each with a copy of the model: {_places(found)}")
        if limits.max_connections < config.max_connections:
            announce(
                f"at most {limits.max_connections} connections at a time, not {config.max_connections}: the system allows "
                "this process no more open files (ulimit -n)"
            )
        with contextlib.suppress(KeyboardInterrupt):
            workers.keep(front)
    announce("the server has ended")


def _places(found: list[dict[str, Any]]) -> str:
    """Say where workers are: how many on each device, and with how many threads on a CPU."""
    devices = [about["device"] for about in found]
    if set(devices) == {"cpu"}:
        return f"on the CPU, {found[0]['threads']} thread{'s' * (found[0]['threads'] > 1)} each"
    return ", ".join(f"{devices.count(device)} on {device}" for device in dict.fromkeys(devices))


def limits_of(config: ServeRewardConfig) -> Limits:
    """Return what the process that receives requests has to know. Raises ConfigError."""
    limits = Limits(
        name=public_name(config.model),
        hosts=tuple(name.lower().strip("[]") for name in (config.host, *config.allowed_hosts)),
        any_address=config.host in ("0.0.0.0", "::"),
        token=None if config.token_env is None else _token(config.token_env),
        workers=config.workers,
        max_request_bytes=int(config.max_request_mb * 1e6),
        max_held_bytes=int(config.max_held_mb * 1e6),
        max_queue=config.max_queue,
        max_connections=min(config.max_connections, _files_allowed() - SPARE_FILES - config.workers),
        receive_seconds=config.receive_timeout,
    )
    needed = config.least_connections
    if limits.max_connections < needed:
        raise ConfigError(
            f"the system allows this process {_files_allowed()} open files (ulimit -n), and --max-queue {config.max_queue} "
            f"needs {needed + SPARE_FILES + config.workers}; raise it with `ulimit -n`, or lower --max-queue"
        )
    return limits


def public_name(model: str) -> str:
    """Return a model's name without the folders above it: ``reward/final`` for ``/somebody/runs/reward/final``.

    It begins with the run if the folder is one of a run's. Names on the Hub or ModelScope stay as they are.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        return model
    parts = path.resolve().parts[1:]
    if len(parts) > 2 and parts[-2] == "checkpoints":
        return "/".join(parts[-3:])
    return "/".join(parts[-2:] if parts[-1] in ("final", "best") else parts[-1:])


def _token(variable: str) -> str:
    """Return the token in an environment variable. Raises ConfigError."""
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(
            f"--token-env {variable}: there is no such environment variable, or it is empty; set it first"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--token-env {variable}: the token must consist of ASCII letters, digits and signs, without spaces and line "
            "breaks, because it is sent in a header"
        )
    return token


def _files_allowed() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
