"""Serve a reward model over HTTP: the other end of `heedful.rewards.http` (docs/rewards.md has the protocol).

Two processes share the work. `heedful.serving` receives requests, checks them and lets them queue; here, one at a time, they
are read, scored and answered.
"""

import contextlib
import json
import math
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heedful.checkpoints.source import resolve
from heedful.configs.scoring import ServeRewardConfig
from heedful.display import harmless
from heedful.errors import CheckpointError, ConfigError, DataError, RewardError
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.rewards.model import ModelReward
from heedful.rewards.resolve import load_model_reward
from heedful.rewards.score_request import RequestError, read_request
from heedful.serving.limits import Limits
from heedful.serving.process import FrontProcess
from heedful.types import MicroBatch

SPARE_FILES = 96
"""File descriptors that are not for connections: the interpreter's, and connections that are about to be closed."""
SHORTEST_LIMIT = 100_000
"""A text of so many characters is always tokenised, whatever the model can read."""
QUIET_SECONDS = 10.0
"""The least time between two lines about requests that failed."""


def serve_reward(config: ServeRewardConfig, announce: Callable[[str], None] = print) -> None:
    """Serve a reward model until Ctrl-C.

    Args:
        config: the model, the address and the limits.
        announce: is called with a line of text when the server is ready (with its address), and when it has ended.

    Raises ConfigError if the server cannot listen at the address, there is no token where ``config.token_env`` says, or the
    system allows too few open files; CheckpointError if there is no such reward model.
    """
    limits = limits_of(config)
    device = resolve_device(config.device)
    # Both before the model, which may take minutes to load.
    with _bound(config.host, config.port) as listening, FrontProcess(listening) as front:
        reward = load_model_reward(
            resolve(config.model, config),
            device=device,
            compute_dtype=resolve_dtype(config.dtype, device),
            micro_batch=MicroBatch(config.micro_batch_size),
        )
        front.open(limits)
        host = f"[{config.host}]" if ":" in config.host else config.host
        announce(f"{config.model} scores at http://{host}:{listening.getsockname()[1]}/score; Ctrl-C ends it")
        if limits.max_connections < config.max_connections:
            announce(
                f"at most {limits.max_connections} connections at a time, not {config.max_connections}: the system allows "
                "this process no more open files (ulimit -n)"
            )
        with contextlib.suppress(KeyboardInterrupt):
            answer_requests(front, reward, max_characters=longest_text(reward))
    announce("the server has ended")


def limits_of(config: ServeRewardConfig) -> Limits:
    """Return what the process that receives requests has to know. Raises ConfigError."""
    limits = Limits(
        name=public_name(config.model),
        hosts=tuple(name.lower().strip("[]") for name in (config.host, *config.allowed_hosts)),
        any_address=config.host in ("0.0.0.0", "::"),
        token=None if config.token_env is None else _token(config.token_env),
        max_request_bytes=int(config.max_request_mb * 1e6),
        max_held_bytes=int(config.max_held_mb * 1e6),
        max_queue=config.max_queue,
        max_connections=min(config.max_connections, _files_allowed() - SPARE_FILES),
        receive_seconds=config.receive_timeout,
    )
    needed = config.max_queue + 8
    if limits.max_connections < needed:
        raise ConfigError(
            f"the system allows this process {_files_allowed()} open files (ulimit -n), and --max-queue {config.max_queue} "
            f"needs {needed + SPARE_FILES}; raise it with `ulimit -n`, or lower --max-queue"
        )
    return limits


def answer_requests(front: FrontProcess, reward: ModelReward, *, max_characters: int) -> None:
    """Answer one request after the other, forever.

    Args:
        front: where they come from.
        reward: scores the responses.
        max_characters: the longest text that is tokenised.

    Raises OSError if the process that receives them dies.
    """
    log = _Log()
    for body in front.requests():
        status, content = answer(reward, body, max_characters=max_characters, log=log)
        front.answer(status, json.dumps(content, ensure_ascii=False).encode())


def answer(
    reward: ModelReward, body: bytes | bytearray, *, max_characters: int, log: Callable[[str], None]
) -> tuple[int, dict[str, Any]]:
    """Return the status and the content of the answer to one request.

    What is wrong with the request is said to whoever sent it; what is wrong with the server, only to ``log``.
    """
    try:
        prompts, completions, truncated = read_request(body, max_characters=max_characters)
        scores = reward(prompts, completions, truncated) if completions else []
    except (RequestError, RewardError, DataError) as error:
        return 400, {"error": str(error)}
    except CheckpointError as error:
        log(f"a conversation could not be rendered: {error}")
        return 400, {"error": "the model's chat template cannot render a conversation; the server's log says why"}
    except Exception as error:
        log(f"scoring failed: {type(error).__name__}: {error}")
        return 500, {"error": "scoring failed; the server's log says why"}
    if not all(map(math.isfinite, scores)):
        log("the reward model gave a score that is not finite")
        return 500, {"error": "the reward model gave a score that is not finite"}
    return 200, {"scores": scores}


def longest_text(reward: ModelReward) -> int:
    """Return the most characters that a text may have to be tokenised at all: more cannot be short enough for the model.

    No token stands for more characters than its own name has, unless a tokenizer drops or merges what it does not know,
    which `SHORTEST_LIMIT` leaves room for.
    """
    longest_token = max(map(len, reward.inputs.tokenizer.get_vocab()))
    return max(SHORTEST_LIMIT, reward.model.max_length * longest_token)


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


class _Log:
    """Writes lines to standard error, but not more often than every `QUIET_SECONDS`."""

    def __init__(self) -> None:
        self._next = 0.0
        self._left_out = 0

    def __call__(self, text: str) -> None:
        if time.monotonic() < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._next, self._left_out = time.monotonic() + QUIET_SECONDS, 0
        print(f"heedful: {harmless(text)}{more}", file=sys.stderr, flush=True)


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


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"--port {port} of --host {host} cannot be listened at: {error.strerror}; choose another, or --port 0 for a "
            "free one"
        ) from error
    return bound
