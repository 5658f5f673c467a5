"""Serve a reward model over HTTP: the other end of `heedful.rewards.http` (docs/rewards.md has the protocol)."""

import contextlib
import json
import math
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from heedful.checkpoints.source import resolve
from heedful.configs.scoring import ServeRewardConfig
from heedful.data.messages import read_message, read_tools
from heedful.errors import ConfigError, DataError, HeedfulError
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.rewards.model import ModelReward
from heedful.rewards.resolve import load_model_reward
from heedful.types import MicroBatch


def serve_reward(config: ServeRewardConfig, announce: Callable[[str], None] = print) -> None:
    """Serve a reward model until Ctrl-C.

    Args:
        config: the model, the address and the limits.
        announce: is called with a line of text when the server is ready (with its address), and when it has ended.

    Raises ConfigError if the server cannot listen at the address, CheckpointError if there is no such reward model.
    """
    device = resolve_device(config.device)
    with _bound(config.host, config.port) as listening:  # before the model, which may take minutes to load
        reward = load_model_reward(
            resolve(config.model, config),
            device=device,
            compute_dtype=resolve_dtype(config.dtype, device),
            micro_batch=MicroBatch(config.micro_batch_size),
        )
        app = make_app(reward, config.model, max_bytes=int(config.max_request_mb * 1e6))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        listening.listen()
        host = f"[{config.host}]" if ":" in config.host else config.host
        announce(f"{config.model} scores at http://{host}:{listening.getsockname()[1]}/score; Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):  # before the server handles signals itself
            server.run(sockets=[listening])
    announce("the server has ended")


def make_app(reward: ModelReward, name: str, *, max_bytes: int) -> Starlette:
    """Make the web application: ``POST /score`` asks the reward, one request at a time; ``GET /health`` returns its name.

    Args:
        reward: scores the responses.
        name: the model's name, for ``/health``.
        max_bytes: the largest request that is accepted.
    """
    one_at_a_time = threading.Lock()

    def scored(prompts: list[Any], completions: list[Any], truncated: list[bool]) -> list[float]:
        with one_at_a_time:
            return reward(prompts, completions, truncated) if completions else []

    async def score(request: Request) -> Response:
        try:
            body = await _body(request, max_bytes)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is left to read it
        if body is None:
            return _refused(413, f"the request is larger than {max_bytes} bytes; send fewer responses at a time")
        try:
            scores = await run_in_threadpool(scored, *read_request(body))
        except (RequestError, HeedfulError) as error:
            return _refused(400, str(error))
        except Exception as error:
            print(f"heedful: scoring failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return _refused(500, f"scoring failed: {type(error).__name__}: {error}")
        if not all(map(math.isfinite, scores)):
            return _refused(500, "the reward model gave a score that is not finite")
        return JSONResponse({"scores": scores})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "model": name})

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _refused(error.status_code, f"{error.detail}; there are POST /score and GET /health")

    routes = [Route("/score", score, methods=["POST"]), Route("/health", health, methods=["GET"])]
    return Starlette(routes=routes, exception_handlers={HTTPException: refused})


class RequestError(ValueError):
    """A request that does not follow the protocol; the message says where."""


def read_request(body: bytes) -> tuple[list[Any], list[Any], list[bool]]:
    """Return the prompts, completions and ``truncated`` flags of a request. Raises RequestError.

    Each prompt and completion is a string or a list of messages.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError(f'the request must be a JSON object with "prompts" and "completions", got {content!r:.80}')
    for key in ("prompts", "completions"):
        if not isinstance(content.get(key), list):
            raise RequestError(f'"{key}" must be a list, got {content.get(key)!r:.80}')
    prompts, completions = content["prompts"], content["completions"]
    truncated = content.get("truncated", [False] * len(completions))
    if not isinstance(truncated, list) or not all(isinstance(cut, bool) for cut in truncated):
        raise RequestError(f'"truncated" must be a list of true and false, got {truncated!r:.80}')
    if not len(prompts) == len(completions) == len(truncated):
        raise RequestError(
            f'"prompts", "completions" and "truncated" must have the same length, got {len(prompts)}, {len(completions)} and '
            f"{len(truncated)}"
        )
    for key, texts in (("prompts", prompts), ("completions", completions)):
        for i, text in enumerate(texts):
            _check_text(f"{key}[{i}]", text)
    return prompts, completions, truncated


def _check_text(place: str, text: Any) -> None:
    """Raise RequestError if a text is not a string or a list of messages, or cannot be written as UTF-8."""
    is_chat = isinstance(text, list) and bool(text) and all(_is_message(message) for message in text)
    if not isinstance(text, str) and not is_chat:
        raise RequestError(
            f'{place} must be a string or a list of messages {{"role": "...", "content": "..."}}, got {text!r:.80}'
        )
    try:
        json.dumps(text, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{place} contains half a character (a lone surrogate), which is not text") from error
    for i, message in enumerate(text if isinstance(text, list) else []):
        _check_extras(f"{place}[{i}]", message)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _check_extras(place: str, message: dict[str, Any]) -> None:
    """Raise RequestError if a message has thinking, tools or calls of another form than heedful sends."""
    more = {key: value for key, value in message.items() if key != "tools"}
    try:
        read_tools("the request", message.get("tools"))
        if more.keys() != {"role", "content"}:
            read_message("the request", place, more)
    except DataError as error:
        raise RequestError(str(error)) from error


async def _body(request: Request, max_bytes: int) -> bytes | None:
    """Return the request's body, or None if it is too large. It is read to its end, so that the sender gets the answer."""
    body = bytearray()
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= max_bytes:
            body += piece
    return bytes(body) if size <= max_bytes else None


def _refused(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)


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
