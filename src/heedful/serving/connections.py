"""uvicorn with the limits on connections that it lacks: for ``heedful serve-reward`` and ``heedful label serve``.

uvicorn waits for a request's head and body as long as the client likes, and its ``limit_concurrency`` counts connections
only once a whole head has come: 300 idle ones once used up a server's file descriptors. Here, with S seconds allowed,

- a head that has not come S seconds after the connection opened, or after its last answer, costs the client its connection;
- a body that has not come S seconds after its head is a TimeoutError in the application, which answers 408;
- an answer that the client has not taken after S seconds costs it its connection;
- if there are as many connections as may be, a new one takes the place of the one that has waited longest for a head, or
  else for a body. A connection whose whole request is here is never closed to make room.

`Connection` uses internals of uvicorn's `H11Protocol`, so pyproject.toml bounds uvicorn's version above.
"""

import asyncio
import contextlib
import functools
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from heedful.errors import ConfigError

ACCEPTS = 16
"""The most connections that are taken from the listening socket at a time, before those that are too many are closed."""
BACKLOG = 1024
"""The most connections that wait to be taken; the operating system may allow fewer."""
SPARE_FILES = 96
"""File descriptors that are not for connections: the interpreter's, and connections that are about to be closed."""
DISCARD_SECONDS = 1.0
"""How long the rest of a refused body is thrown away before the answer: closed at once, the client might never see it."""
DISCARD_BYTES = 2**28
"""The most bytes that are thrown away like that."""


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
            f"--port {port} of --host {host} cannot be listened at: {error.strerror}; choose another, or --port 0 for a "
            "free one"
        ) from error
    return listening


def files_allowed() -> int:
    """The most files that the system lets this process have open, once it asks for them (``ulimit -Hn``)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


class Server(uvicorn.Server):
    """uvicorn's server for one application, with limits on connections.

    Args:
        app: the application.
        most_connections: how many may be open at a time, if the system allows so many files.
        receive_seconds: how long a head, a body and the departure of an answer may take, each.
        end_seconds: how long requests may take to be answered once the server ends.
        at_end: called in the event loop when the server begins to end.
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
                log_level="error",  # what clients send is no reason for a line
                access_log=False,
                server_header=False,
                backlog=ACCEPTS,
                timeout_graceful_shutdown=int(end_seconds) + 1,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with as many files as the connections need."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = self.limits.most + SPARE_FILES
        if soft != resource.RLIM_INFINITY and soft < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what has no whole request at once, and the rest when it is answered or its time is over."""
        self.at_end()
        for connection in list(self.limits.sending):  # whose request has begun; uvicorn closes those without one
            connection.drop()
        asyncio.get_running_loop().call_later(self.end_seconds, self.limits.drop_all)
        await super().shutdown(sockets)


class Connections:
    """All open connections of a server.

    Args:
        most: how many there may be at a time.
        seconds: how long each may wait for a head, and for its answer to be taken.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self.most = most
        self.seconds = seconds
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}
        """Those without a whole head, the longest wait first."""
        self.sending: dict[Connection, None] = {}
        """Those with a head and without a whole body, the longest wait first."""

    def make_room(self) -> bool:
        """Close a connection if there are too many; False if all of them have a whole request."""
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
    """uvicorn's connection, with a place among the others and the time that it has."""

    def __init__(self, limits: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.limits = limits
        self.phase: dict[Connection, None] | None = None
        self.timers: dict[str, asyncio.TimerHandle] = {}
        """What closes it: "head" if it waits for one too long, "answer" if its client does not take it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, or close the connection at once if there is none."""
        super().connection_made(transport)
        if not self.limits.make_room():
            transport.abort()
            return
        self.limits.open.add(self)
        self._follow()

    def data_received(self, data: bytes) -> None:
        """Read what came."""
        with contextlib.suppress(h11.ProtocolError):  # uvicorn refuses what came, but the answer to it has begun
            super().data_received(data)
        if self.conn.their_state is h11.ERROR and self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # uvicorn has refused the rest, so nobody waits for the application's answer
            self.cycle.message_event.set()
        self._follow()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        """Make answers wait until the client takes what was sent, which it must do in time."""
        super().pause_writing()
        self._start("answer")

    def resume_writing(self) -> None:
        """Let answers continue."""
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
        """Take the place and the time that belong to how far the request is."""
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
    """What is wrong with a request that does not say clearly where it ends; None if it does.

    A proxy before the server may see its end elsewhere, and take what follows for another request (RFC 9112, section 6.1).
    """
    if "transfer-encoding" not in headers:
        return None
    if "content-length" in headers:
        return "a request has either Content-Length or Transfer-Encoding, not both"
    return "Transfer-Encoding needs HTTP/1.1" if version != "1.1" else None


def _in_time(app: ASGIApp, seconds: float) -> ASGIApp:
    """Return an application in which a body that is late is a TimeoutError.

    An answer to a request whose body was not read to its end comes after a part of the rest was thrown away, and closes the
    connection if that was not all.
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
                if "expect" not in headers:  # such a client sends its body only once it is asked for
                    await discard()
                if not is_complete:
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        await (app if refused is None else JSONResponse({"error": refused}, 400))(scope, received, sent)

    return run
