"""Serve a reward model over HTTP: the other end of `heedful.rewards.http` (docs/rewards.md has the protocol).

One process with two threads: uvicorn's event loop receives, checks and queues requests; the main thread scores them one
after the other, in order of arrival. Each request is a batch of its own: the last bits of a score depend on the other rows of
its batch, and a run's scores must not depend on the timing of its requests.
"""

import asyncio
import contextlib
import hmac
import json
import math
import os
import queue
import reprlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from heedful.apps.serving.connections import SPARE_FILES, Server, bound, files_allowed
from heedful.configs.scoring import ServeRewardConfig
from heedful.configs.settings import is_visible_ascii
from heedful.data.messages import read_message, read_tools
from heedful.display import Screen, harmless, say
from heedful.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MachineError,
    MemoryFullError,
    RewardError,
    is_out_of_memory,
)
from heedful.hosts import Refusal, host_refusal
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.models.source import resolve
from heedful.redact import redact
from heedful.rewards.models import ModelReward, load_model_reward
from heedful.types import MicroBatch

RETRY_AFTER = 1
"""Retry-After in seconds for a refused client."""
END_SECONDS = 0.5
"""Seconds for clients to receive their last answers when the server ends."""
QUIET_SECONDS = 10.0
"""Minimal seconds between two lines about failed requests."""
MOST_LEFT = 8
"""Limit of the queue as a multiple of ``--max-queue``, counting requests whose clients have left."""
SHORTEST_LIMIT = 100_000
"""A text of up to this many characters is always tokenised, whatever the model's limit."""

Answer = tuple[int, dict[str, Any]]
"""The status and the content of an answer."""
ENDING: Answer = (503, {"error": "the server is ending"})


def _show(text: str) -> None:
    Screen(soft_wrap=True).print(harmless(text), markup=False, highlight=False)


def serve_reward(config: ServeRewardConfig, announce: Callable[[str], None] = _show) -> None:
    """Serve a reward model until Ctrl-C.

    Args:
        config: the model, the address and the limits.
        announce: called with a line of text when the server is ready (with its address), and when it has ended.

    Raises ConfigError if the server cannot listen at the address, the variable ``config.token_env`` is not set, or the system
    allows too few open files; CheckpointError if there is no such reward model; MemoryFullError if it does not fit into
    memory; MachineError if the GPU fails for good.
    """
    token = None if config.token_env is None else _token(config.token_env)
    connections = _connections(config)
    with bound(config.host, config.port) as listening:
        reward = _load(config)
        max_characters = longest_text(reward)
        requests = RequestQueue()
        front = Front(config, requests, token=token)
        server = Server(
            front.application,
            most_connections=connections,
            receive_seconds=config.receive_timeout,
            end_seconds=END_SECONDS,
            at_end=requests.close,
        )
        with running(server, requests, listening):
            host = f"[{config.host}]" if ":" in config.host else config.host
            announce(f"{config.model} scores at http://{host}:{listening.getsockname()[1]}/score; Ctrl-C ends it")
            if connections < config.max_connections:
                announce(
                    f"at most {connections} connections at a time, not {config.max_connections}: the system allows this "
                    "process no more open files (ulimit -n)"
                )
            with contextlib.suppress(KeyboardInterrupt):
                score_requests(requests, reward, max_characters=max_characters)
                raise MachineError("the thread that receives requests has ended by itself; start the server again")
    announce("the server has ended")


class RequestQueue:
    """Waiting requests in order of arrival. An event loop adds them, another thread takes them."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[bytearray, Future[Answer]] | None] = queue.SimpleQueue()
        self._is_closed = False

    def __len__(self) -> int:
        """Number of requests in the queue, including those whose clients have left."""
        return self._waiting.qsize()

    def add(self, body: bytearray) -> "Future[Answer]":
        """Add a request to the queue. Its answer can be cancelled until it is taken."""
        answer: Future[Answer] = Future()
        if self._is_closed:
            answer.set_result(ENDING)
        else:
            self._waiting.put((body, answer))
        return answer

    def take(self) -> "tuple[bytearray, Future[Answer]] | None":
        """Wait for the next request; None once this is closed."""
        while (request := self._waiting.get()) is not None and not request[1].set_running_or_notify_cancel():
            pass
        return request

    def close(self) -> None:
        """Answer all waiting requests that the server is ending, and accept no more."""
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while request := self._waiting.get_nowait():
                if request[1].set_running_or_notify_cancel():
                    request[1].set_result(ENDING)
        self._waiting.put(None)


def score_requests(requests: RequestQueue, reward: ModelReward, *, max_characters: int) -> None:
    """Answer one request after the other, until the queue is closed or this thread is interrupted.

    Raises MachineError if the GPU fails for good. At any end, the current request is answered that the server is ending.
    """
    log = _Log()
    while (request := requests.take()) is not None:
        body, waiting = request
        answered = ENDING
        try:
            answered = answer(reward, body, max_characters=max_characters, log=log)
        finally:
            waiting.set_result(answered)


@contextlib.contextmanager
def running(server: Server, requests: RequestQueue, listening: Any) -> Iterator[None]:
    """Receive requests in a thread during the context."""

    def receive() -> None:
        try:
            asyncio.run(server.serve(sockets=[listening]))
        finally:
            requests.close()

    thread = threading.Thread(target=receive, name="receives requests", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


class Front:
    """The web application: checks requests and queues them as long as there is room."""

    def __init__(self, config: ServeRewardConfig, requests: RequestQueue, *, token: str | None) -> None:
        self.config, self.requests, self.token = config, requests, token
        self.name = public_name(config.model)
        self.hosts = tuple(name.lower().strip("[]") for name in (config.host, *config.allowed_hosts))
        self.any_address = config.host in ("0.0.0.0", "::")
        self.max_request_bytes = int(config.max_request_mb * 1e6)
        self.max_held_bytes = int(config.max_held_mb * 1e6)
        self.unanswered = 0
        """Requests that wait or are being scored."""
        self.held = 0
        """Bytes of bodies that are being received, wait or are being scored."""
        routes = [Route("/score", self.score, methods=["POST"]), Route("/health", self.health, methods=["GET"])]
        self.application = Starlette(routes=routes, exception_handlers={HTTPException: _elsewhere})

    async def health(self, request: Request) -> Response:
        refusal = host_refusal(request.headers, self)
        if refusal is not None:
            return _refused(*refusal)
        return JSONResponse({"status": "ok", "model": self.name, "requests": self.unanswered})

    async def score(self, request: Request) -> Response:
        refusal = host_refusal(request.headers, self) or self._sender_refusal(request.headers)
        refusal = refusal or self._lack_of_room(int(request.headers.get("content-length", 0)))
        if refusal is not None:
            return _refused(*refusal)
        body = bytearray()
        try:
            refusal = await self._read(request, body) or self._lack_of_room(0)
            if refusal is not None:
                return _refused(*refusal)
            status, content = await self._scored(request, body)
            return _refused(status, content["error"]) if "error" in content else JSONResponse(content, status)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is left to read it
        finally:
            self.held -= len(body)

    def _sender_refusal(self, headers: Mapping[str, str]) -> Refusal | None:
        """Refuse a request without the right token, or without the content type of JSON."""
        if self.token is not None:
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                wrong = "with another one" if given else "without it"
                return 401, (
                    f"this server needs a token, and the request came {wrong}; send `Authorization: Bearer TOKEN`"
                )
        kind = headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            return 415, f"the Content-Type must be application/json, got {kind[:80]!r}"
        return None

    def _lack_of_room(self, length: int, received: int = 0) -> Refusal | None:
        """Refuse a request with ``length`` more bytes to come if there is no room for it."""
        if received + length > self.max_request_bytes:
            return 413, f"the request is larger than {self.max_request_bytes} bytes; send fewer responses at a time"
        is_full = self.unanswered > self.config.max_queue or len(self.requests) > MOST_LEFT * self.config.max_queue
        if is_full or self.held + length > self.max_held_bytes:
            return 429, (
                f"the server is busy: {self.config.max_queue} requests or {self.max_held_bytes} bytes of them wait; try "
                "again later"
            )
        return None

    async def _read(self, request: Request, body: bytearray) -> Refusal | None:
        """Read a request's body, and count its bytes in ``held``. Raises ClientDisconnect."""
        try:
            async for piece in request.stream():
                refusal = self._lack_of_room(len(piece), len(body))
                if refusal is not None:
                    return refusal
                self.held += len(piece)
                body += piece
        except TimeoutError:
            return 408, f"the request did not arrive within {self.config.receive_timeout:g} seconds"
        return None

    async def _scored(self, request: Request, body: bytearray) -> Answer:
        """Wait for a request's scores. Raises ClientDisconnect if its client leaves before."""
        waiting = self.requests.add(body)
        answered = asyncio.wrap_future(waiting)
        left = asyncio.create_task(_has_left(request))
        self.unanswered += 1
        try:
            events: set[asyncio.Future[Any]] = {answered, left}
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.unanswered -= 1
            left.cancel()
            if waiting.cancel():  # it stays in the queue, but its body is released
                self.held -= len(body)
                body.clear()
        if not answered.done():
            raise ClientDisconnect
        return answered.result()


async def _has_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _elsewhere(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refused(error.status_code, f"{error.detail}; there are POST /score and GET /health")


def _refused(status: int, message: str) -> Response:
    retry = {"Retry-After": str(RETRY_AFTER)}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: retry, 503: retry}
    return JSONResponse({"error": message}, status, headers.get(status))


def public_name(model: str) -> str:
    """Return a model's name without the folders above it: ``reward/final`` for ``/somebody/runs/reward/final``.

    For a folder inside a run it begins with the run's name. Names on the Hub or ModelScope stay unchanged.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        return model
    parts = path.resolve().parts[1:]
    if len(parts) > 2 and parts[-2] == "checkpoints":
        return "/".join(parts[-3:])
    return "/".join(parts[-2:] if parts[-1] in ("final", "best") else parts[-1:])


def _load(config: ServeRewardConfig) -> ModelReward:
    device = resolve_device(config.device)
    try:
        return load_model_reward(
            resolve(config.model, config),
            device=device,
            compute_dtype=resolve_dtype(config.dtype, device),
            micro_batch=MicroBatch(config.micro_batch_size),
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryFullError("memory ran out while the reward model was loaded") from error
        raise


def _token(variable: str) -> str:
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(
            f"--token-env {variable}: there is no such environment variable, or it is empty; set it first"
        )
    if not is_visible_ascii(token):
        raise ConfigError(
            f"--token-env {variable}: the token must have only ASCII letters, digits and signs, no spaces or line breaks, "
            "because it is sent in a header"
        )
    return token


def _connections(config: ServeRewardConfig) -> int:
    """Return the maximal number of connections. Raises ConfigError."""
    possible, needed = files_allowed() - SPARE_FILES, config.least_connections
    if possible < needed:
        raise ConfigError(
            f"the system allows this process {files_allowed()} open files (ulimit -n), and --max-queue {config.max_queue} "
            f"needs {needed + SPARE_FILES}; raise it with `ulimit -n`, or lower --max-queue"
        )
    return min(config.max_connections, possible)


class _Log:
    """Writes lines to standard error, at most one per `QUIET_SECONDS`."""

    def __init__(self) -> None:
        self._next, self._left_out = 0.0, 0

    def __call__(self, text: str) -> None:
        if time.monotonic() < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._next, self._left_out = time.monotonic() + QUIET_SECONDS, 0
        say(f"{redact(harmless(text))}{more}")


# One request, valid or not ------------------------------------------------------------------------------------------------


class RequestError(ValueError):
    """A request that does not follow the protocol; the message has the place."""


def answer(reward: ModelReward, body: bytes | bytearray, *, max_characters: int, log: Callable[[str], None]) -> Answer:
    """Answer one request. ``log`` gets faults of the server; faults of the request are only answered.

    Raises MachineError if the GPU can no longer be used in this process.
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
        if _is_end_of_device(error):
            raise MachineError(
                f"the GPU can no longer be used in this process ({type(error).__name__}: {error}); start the server again"
            ) from error
        log(f"scoring failed: {type(error).__name__}: {error}")
        return 500, {"error": "scoring failed; the server's log says why"}
    if not all(map(math.isfinite, scores)):
        log("the reward model gave a score that is not finite")
        return 500, {"error": "the reward model gave a score that is not finite"}
    return 200, {"scores": scores}


def longest_text(reward: ModelReward) -> int:
    """Return the maximal characters of a text to tokenise: a longer text cannot fit into the model's context.

    No token covers more characters than its own name has, unless a tokenizer drops or merges unknown characters; the margin
    for these is `SHORTEST_LIMIT`.
    """
    longest_token = max(map(len, reward.inputs.tokenizer.get_vocab()))
    return max(SHORTEST_LIMIT, reward.model.max_length * longest_token)


def read_request(body: bytes | bytearray, *, max_characters: int) -> tuple[list[Any], list[Any], list[bool]]:
    """The prompts, completions and ``truncated`` flags of a request. Raises RequestError, DataError."""
    try:
        content = json.loads(body, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError(f'the request must be a JSON object with "prompts" and "completions", got {_short(content)}')
    for key in ("prompts", "completions"):
        if not isinstance(content.get(key), list):
            raise RequestError(f'"{key}" must be a list, got {_short(content.get(key))}')
    prompts, completions = content["prompts"], content["completions"]
    truncated = content.get("truncated", [False] * len(completions))
    if not isinstance(truncated, list) or not all(isinstance(cut, bool) for cut in truncated):
        raise RequestError(f'"truncated" must be a list of true and false, got {_short(truncated)}')
    if not len(prompts) == len(completions) == len(truncated):
        raise RequestError(
            f'"prompts", "completions" and "truncated" must have the same length, got {len(prompts)}, {len(completions)} and '
            f"{len(truncated)}"
        )
    for key, texts in (("prompts", prompts), ("completions", completions)):
        for i, text in enumerate(texts):
            _check_text(f"{key}[{i}]", text, max_characters)
    return prompts, completions, truncated


def _integer(digits: str) -> int:
    """Parse an integer in Python, so that other threads run during a long list of numbers; json's C code blocks them."""
    return int(digits)


def _check_text(place: str, text: Any, max_characters: int) -> None:
    """Check that a text is a string or a list of messages, not too long, and can be written as UTF-8.

    Raises RequestError, and DataError for thinking, tools or calls in another form than heedful sends.
    """
    is_chat = isinstance(text, list) and bool(text) and all(map(_is_message, text))
    if not isinstance(text, str) and not is_chat:
        raise RequestError(
            f'{place} must be a string or a list of messages {{"role": "...", "content": "..."}}, got {_short(text)}'
        )
    written = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    if len(written) > max_characters:
        raise RequestError(
            f"{place} has {len(written)} characters; the reward model can read at most {max_characters} of any text"
        )
    try:
        written.encode()
        for i, message in enumerate(text if is_chat else []):
            read_tools("the request", message.get("tools"))
            more = {key: value for key, value in message.items() if key != "tools"}
            if more.keys() != {"role", "content"}:
                read_message("the request", f"{place}[{i}]", more)
    except UnicodeEncodeError as error:
        raise RequestError(f"{place} contains half a character (a lone surrogate), which is not text") from error


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _short(value: Any) -> str:
    """The beginning of a value's repr, without building all of a long one."""
    return f"{reprlib.repr(value):.80}"


def _is_end_of_device(error: Exception) -> bool:
    """Whether every later GPU call of this process would fail too, as after an illegal memory access."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
