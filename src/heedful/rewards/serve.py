"""Serve a reward model over HTTP: the other end of `heedful.rewards.http` (docs/rewards.md has the protocol).

One process with two threads: uvicorn's event loop receives requests, checks them and lets them wait; the main thread scores
them one after the other, in the order in which they came. Each request is a batch of its own, never scored together with
another: the last bits of a score depend on the rows beside it, and those of a run must not depend on when its requests come.
"""

import asyncio
import contextlib
import hmac
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from heedful.configs.scoring import ServeRewardConfig
from heedful.display import Screen, harmless, say
from heedful.errors import ConfigError, MachineError, MemoryFullError, is_out_of_memory
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.models.source import resolve
from heedful.redact import redact
from heedful.rewards.models import ModelReward, load_model_reward
from heedful.rewards.score_request import Answer, answer, longest_text
from heedful.serving.connections import SPARE_FILES, Server, bound, files_allowed
from heedful.serving.guard import Refusal, host_refusal
from heedful.types import MicroBatch

RETRY_AFTER = 1
"""Seconds after which a client that was sent away may try again."""
END_SECONDS = 0.5
"""How long clients may take their last answers when the server ends."""
QUIET_SECONDS = 10.0
"""The least time between two lines about requests that failed."""
ENDING: Answer = (503, {"error": "the server is ending"})


def show(text: str) -> None:
    """Print a line."""
    Screen(soft_wrap=True).print(harmless(text), markup=False, highlight=False)


def serve_reward(config: ServeRewardConfig, announce: Callable[[str], None] = show) -> None:
    """Serve a reward model until Ctrl-C.

    Args:
        config: the model, the address and the limits.
        announce: is called with a line of text when the server is ready (with its address), and when it has ended.

    Raises ConfigError if the server cannot listen at the address, there is no token where ``config.token_env`` says, or the
    system allows too few open files; CheckpointError if there is no such reward model; MemoryFullError if memory cannot hold
    it; MachineError if the GPU fails for good.
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


@dataclass(eq=False)
class Waiting:
    """A request that waits for its scores."""

    body: bytearray
    answer: "Future[Answer]" = field(default_factory=Future)


class RequestQueue:
    """Requests that wait, in the order in which they came. An event loop adds them, another thread takes them."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._changes = threading.Semaphore(0)
        self._is_closed = False

    def add(self, request: Waiting) -> None:
        """Let a request wait for its turn; once this is closed, it is answered that the server ends."""
        if self._is_closed:
            request.answer.set_result(ENDING)
            return
        self._waiting.append(request)
        self._changes.release()

    def withdraw(self, request: Waiting) -> None:
        """Forget a request whose client has left, unless its turn has come."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(request)

    def take(self) -> Waiting | None:
        """Wait for the next request; None once this is closed."""
        while True:
            self._changes.acquire()
            if self._is_closed:
                return None
            with contextlib.suppress(IndexError):  # it was withdrawn
                return self._waiting.popleft()

    def close(self) -> None:
        """Answer all that wait that the server ends, and let nobody wait any more."""
        self._is_closed = True
        while self._waiting:
            self._waiting.popleft().answer.set_result(ENDING)
        self._changes.release()


def score_requests(requests: RequestQueue, reward: ModelReward, *, max_characters: int) -> None:
    """Answer one request after the other, until there are no more or this thread is interrupted.

    Args:
        requests: where they wait.
        reward: scores the responses.
        max_characters: the longest text that is tokenised.

    Raises MachineError if the GPU fails for good. Whatever ends it, the request at hand is answered that the server ends.
    """
    log = _Log()
    while (request := requests.take()) is not None:
        answered = ENDING
        try:
            answered = answer(reward, request.body, max_characters=max_characters, log=log)
        finally:
            request.answer.set_result(answered)


@contextlib.contextmanager
def running(server: Server, requests: RequestQueue, listening: Any) -> Iterator[None]:
    """Let a thread receive requests while the context lasts."""

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
    """The web application: checks requests, and lets those wait for which there is room.

    Args:
        config: whom to answer, and how much to hold.
        requests: where they wait.
        token: what a request for scores must bring; None is no token.
    """

    def __init__(self, config: ServeRewardConfig, requests: RequestQueue, *, token: str | None) -> None:
        self.requests = requests
        self.token = token
        self.name = public_name(config.model)
        self.hosts = tuple(name.lower().strip("[]") for name in (config.host, *config.allowed_hosts))
        self.any_address = config.host in ("0.0.0.0", "::")
        self.max_queue = config.max_queue
        self.max_request_bytes = int(config.max_request_mb * 1e6)
        self.max_held_bytes = int(config.max_held_mb * 1e6)
        self.receive_seconds = config.receive_timeout
        self.unanswered = 0
        """Requests that wait or are being scored."""
        self.held = 0
        """Bytes of bodies that are being received, wait or are being scored."""
        routes = [Route("/score", self.score, methods=["POST"]), Route("/health", self.health, methods=["GET"])]
        self.application = Starlette(routes=routes, exception_handlers={HTTPException: _elsewhere})

    async def health(self, request: Request) -> Response:
        """Answer ``GET /health``."""
        refusal = host_refusal(request.headers, self)
        if refusal is not None:
            return _refused(*refusal)
        return JSONResponse({"status": "ok", "model": self.name, "requests": self.unanswered})

    async def score(self, request: Request) -> Response:
        """Answer ``POST /score``."""
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
        """Refuse a request that lacks the token, or whose body is not said to be JSON."""
        if self.token is not None:
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                wrong = "with another one" if given else "without it"
                return 401, (
                    f"this server asks for a token, and the request came {wrong}; send `Authorization: Bearer TOKEN`"
                )
        kind = headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            return 415, f"the Content-Type must be application/json, got {kind[:80]!r}"
        return None

    def _lack_of_room(self, length: int, received: int = 0) -> Refusal | None:
        """Refuse a request of which so many more bytes are to come, if it cannot be kept."""
        if received + length > self.max_request_bytes:
            return 413, f"the request is larger than {self.max_request_bytes} bytes; send fewer responses at a time"
        if self.unanswered > self.max_queue or self.held + length > self.max_held_bytes:
            return 429, (
                f"the server is busy: {self.max_queue} requests or {self.max_held_bytes} bytes of them wait; try again later"
            )
        return None

    async def _read(self, request: Request, body: bytearray) -> Refusal | None:
        """Read a request's body, and count what is held. Raises ClientDisconnect."""
        try:
            async for piece in request.stream():
                refusal = self._lack_of_room(len(piece), len(body))
                if refusal is not None:
                    return refusal
                self.held += len(piece)
                body += piece
        except TimeoutError:
            return 408, f"the request did not arrive within {self.receive_seconds:g} seconds"
        return None

    async def _scored(self, request: Request, body: bytearray) -> Answer:
        """Wait for a request's scores. Raises ClientDisconnect if its client leaves before."""
        waiting = Waiting(body)
        answered = asyncio.wrap_future(waiting.answer)
        left = asyncio.create_task(_has_left(request))
        self.unanswered += 1
        self.requests.add(waiting)
        try:
            events: set[asyncio.Future[Any]] = {answered, left}
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.unanswered -= 1
            self.requests.withdraw(waiting)
            left.cancel()
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

    It begins with the run if the folder is one of a run's. Names on the Hub or ModelScope stay as they are.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        return model
    parts = path.resolve().parts[1:]
    if len(parts) > 2 and parts[-2] == "checkpoints":
        return "/".join(parts[-3:])
    return "/".join(parts[-2:] if parts[-1] in ("final", "best") else parts[-1:])


def _load(config: ServeRewardConfig) -> ModelReward:
    """Load the reward model. Raises CheckpointError and MemoryFullError."""
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


def _connections(config: ServeRewardConfig) -> int:
    """Return how many connections there may be at a time. Raises ConfigError."""
    possible, needed = files_allowed() - SPARE_FILES, config.least_connections
    if possible < needed:
        raise ConfigError(
            f"the system allows this process {files_allowed()} open files (ulimit -n), and --max-queue {config.max_queue} "
            f"needs {needed + SPARE_FILES}; raise it with `ulimit -n`, or lower --max-queue"
        )
    return min(config.max_connections, possible)


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
        say(f"{redact(harmless(text))}{more}")
