"""uvicorn with limits on connections, which it lacks: for ``heedful serve-reward`` and ``heedful label serve``.

uvicorn waits for a request's head and body without limit, and its ``limit_concurrency`` counts a connection only after a
complete head: 300 idle ones once used up a server's file descriptors. Here, with a limit of S seconds,

- a connection is closed if a head is not complete S seconds after it opened or after its last answer;
- a body that is not complete S seconds after its head is a TimeoutError in the application, which answers 408;
- a connection is closed if the client has not received an answer after S seconds;
- at the maximum number of connections, a new one replaces the one that has waited longest for a head, or else for a body.
  A connection with a complete request is never closed to make room.

`Connection` uses internals of uvicorn's `H11Protocol`, so pyproject.toml sets an upper bound on uvicorn's version. No
server's own limits keep these promises: a body that trickles and a client that reads nothing are never ended by uvicorn
0.54, hypercorn 0.18 and granian 2.8, and idle connections keep others out or have no limit.
"""

import asyncio
import contextlib
import functools
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from heedful.errors import ConfigError
from heedful.signals import handled_signals

ACCEPTS = 16
"""Most connections accepted from the listening socket at a time, before excess ones are closed."""
BACKLOG = 1024
"""Most connections that wait to be accepted; the operating system may allow fewer."""
SPARE_FILES = 96
"""File descriptors not for connections: the interpreter's, and connections about to be closed."""
DISCARD_SECONDS = 1.0
"""Seconds for which the rest of a refused body is read and discarded, so that the client sees the answer."""
DISCARD_BYTES = 2**28
"""Most bytes discarded this way."""


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error}") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--port {port} of --host {host} cannot be used: {error.strerror}; choose another, or --port 0 for a "
            "free one"
        ) from error
    return listening


def files_allowed() -> int:
    """The hard limit on open files of this process (``ulimit -Hn``)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


class Server(uvicorn.Server):
    """uvicorn's server for one application, with limits on connections.

    Args:
        app: the application.
        most_connections: how many may be open at a time, if the system allows that many files.
        receive_seconds: time limit for a head, for a body, and for sending an answer.
        end_seconds: time limit for open requests once the server stops.
        at_end: called in the event loop when the server begins to stop.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        most_connections: int,
        receive_seconds: float,
        end_seconds: float,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits = Connections(min(most_connections, files_allowed() - SPARE_FILES), receive_seconds)
        self.end_seconds = end_seconds
        self.at_end = at_end
        super().__init__(
            uvicorn.Config(
                _in_time(app, receive_seconds),
                http=functools.partial(Connection, self.limits),  # type: ignore[arg-type]  # it is only called
                ws="none",
                lifespan="off",
                proxy_headers=False,
                log_config=None,  # the process's own logging stays as it is
                log_level="error",  # do not log what clients send
                access_log=False,
                server_header=False,
                backlog=ACCEPTS,
                timeout_graceful_shutdown=int(end_seconds) + 1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT, SIGTERM or SIGHUP, and raise the signal again once the last answers are out.

        An exception of a signal's handler would be lost: the event loop runs callbacks, and catches what they raise. uvicorn
        does the same, but not for SIGHUP, and also for signals that the process was started to ignore.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        came: list[int] = []

        def stop(number: int, frame: FrameType | None) -> None:
            came.append(number)
            self.handle_exit(number, frame)

        handlers = {number: signal.signal(number, stop) for number in handled_signals()}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, after raising the limit on open files for the connections."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = self.limits.most + SPARE_FILES
        if soft != resource.RLIM_INFINITY and soft < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections without a complete request at once, others once answered or timed out."""
        self.at_end()
        for connection in list(self.limits.sending):  # their request has begun; uvicorn closes the others
            connection.drop()
        asyncio.get_running_loop().call_later(self.end_seconds, self.limits.drop_all)
        await super().shutdown(sockets)


class Connections:
    """All open connections of a server.

    Args:
        most: how many there may be at a time.
        seconds: time limit for receiving a head and for sending an answer.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self.most = most
        self.seconds = seconds
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}
        """Those without a complete head, the longest wait first."""
        self.sending: dict[Connection, None] = {}
        """Those with a head but an incomplete body, the longest wait first."""

    def make_room(self) -> bool:
        """Close a connection if there are too many; False if all have a complete request."""
        if len(self.open) < self.most:
            return True
        oldest = next(iter(self.waiting), None) or next(iter(self.sending), None)
        if oldest is not None:
            oldest.drop()
        return oldest is not None

    def drop_all(self) -> None:
        """Close every connection."""
        for connection in list(self.open):
            connection.drop()


class Connection(H11Protocol):
    """uvicorn's connection, with its place among the others and its timers."""

    def __init__(self, limits: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.limits = limits
        self.phase: dict[Connection, None] | None = None
        self.timers: dict[str, asyncio.TimerHandle] = {}
        """Timers that close it: "head" while it waits for one, "answer" while its client has not received it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # streams only
        """Take a place, or close the connection at once if there is none."""
        super().connection_made(transport)
        if not self.limits.make_room():
            transport.abort()
            return
        self.limits.open.add(self)
        self._follow()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        with contextlib.suppress(h11.ProtocolError):  # uvicorn refuses the bytes, but its answer has begun
            super().data_received(data)
        if self.conn.their_state is h11.ERROR and self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # uvicorn has refused the rest: the application's answer is not needed
            self.cycle.message_event.set()
        self._follow()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        """Pause sending until the client has received what was sent, within the time limit."""
        super().pause_writing()
        self._start("answer")

    def resume_writing(self) -> None:
        """Resume sending."""
        super().resume_writing()
        self._stop("answer")

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self._leave()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once."""
        self._leave()
        self.transport.abort()

    def _follow(self) -> None:
        """Take the place and the timer for the state of the request."""
        phases = {h11.IDLE: self.limits.waiting, h11.SEND_BODY: self.limits.sending}
        phase = phases.get(self.conn.their_state)
        if phase is not self.phase:
            self._enter(phase)
            self._stop("head")
        if phase is self.limits.waiting or self.transport.is_closing():
            self._start("head")

    def _enter(self, phase: "dict[Connection, None] | None") -> None:
        if self.phase is not None:
            self.phase.pop(self, None)
        self.phase = phase
        if phase is not None:
            phase[self] = None

    def _leave(self) -> None:
        self._enter(None)
        self.limits.open.discard(self)
        self._stop("head")
        self._stop("answer")

    def _start(self, timer: str) -> None:
        if timer not in self.timers:
            self.timers[timer] = self.loop.call_later(self.limits.seconds, self.drop)

    def _stop(self, timer: str) -> None:
        if timer in self.timers:
            self.timers.pop(timer).cancel()


def framing_refusal(headers: Headers, version: str) -> str | None:
    """The reason to refuse a request whose end is ambiguous; None if it is clear.

    A proxy in front may see another end and read the remainder as a second request (RFC 9112, section 6.1).
    """
    if "transfer-encoding" not in headers:
        return None
    if "content-length" in headers:
        return "a request has either Content-Length or Transfer-Encoding, not both"
    return "Transfer-Encoding needs HTTP/1.1" if version != "1.1" else None


def _in_time(app: ASGIApp, seconds: float) -> ASGIApp:
    """Return an application in which a late body is a TimeoutError.

    If an answer comes before the whole body was read, a part of the rest is discarded first, and the connection is closed if
    more is left.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        now = asyncio.get_running_loop().time
        deadline = now() + seconds
        headers = Headers(scope=scope)
        refused = framing_refusal(headers, scope["http_version"])
        is_complete = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

        async def receive_until(time: float) -> Message:
            nonlocal is_complete
            async with asyncio.timeout_at(time):
                message = await receive()
            is_complete = message["type"] != "http.request" or not message.get("more_body")
            return message

        async def received() -> Message:
            return await (receive() if is_complete else receive_until(deadline))

        async def discard() -> None:
            left, end = DISCARD_BYTES, now() + DISCARD_SECONDS
            with contextlib.suppress(TimeoutError):
                while left > 0 and not is_complete:
                    left -= len((await receive_until(end)).get("body", b""))

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_complete:
                if "expect" not in headers:  # such a client sends its body only on request
                    await discard()
                if not is_complete or refused is not None:  # what follows may be the rest of this request
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        await (app if refused is None else JSONResponse({"error": refused}, 400))(scope, received, sent)

    return run
