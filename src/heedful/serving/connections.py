"""The open connections: how many there may be, how long each may take, and which one is closed to make room.

uvicorn waits for a request's head and body as long as the client likes, and its ``limit_concurrency`` counts connections
only once a whole head has come, so idle ones would use up the file descriptors. Here every connection is in one of these
phases:

- *waiting* for a request's head: closed after `Limits.receive_seconds`, and the first to be closed to make room;
- *sending* its body: given the rest of that time, and closed to make room if no connection is waiting;
- *working*: the whole request is here. It is never closed to make room, and the queue limits how many there are;
- *answered*: closed if the client has not taken the answer after `Limits.receive_seconds`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import h11
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

LINGER_SECONDS = 1.0
"""How long what a client still sends is thrown away after a refusal: closed at once, it might never see the answer."""
LINGER_BYTES = 2**28
"""The most bytes that are thrown away like that."""

Peer = tuple[str, int]


class Connections:
    """All open connections of a server.

    Args:
        limit: the most at a time.
        seconds: the most that a request's arrival may take, or an answer's departure.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self.open: dict[Peer, Connection] = {}
        self.waiting: dict[Connection, None] = {}
        """Those without a whole head, the longest wait first."""
        self.sending: dict[Connection, None] = {}

    def protocol(self, **arguments: Any) -> asyncio.Protocol:
        """Make what uvicorn makes for a connection, under these limits."""
        return Connection(H11Protocol(**arguments), self)

    def make_room(self) -> bool:
        """Close a connection if there are too many; False if all of them are at work."""
        if len(self.open) < self.limit:
            return True
        for oldest in (*list(self.waiting)[:1], *list(self.sending)[:1]):
            oldest.drop()
            return True
        return False

    def drop_unfinished(self) -> None:
        """Close every connection that has no whole request."""
        for connection in [*self.waiting, *self.sending]:
            connection.drop()

    def drop_all(self) -> None:
        """Close every connection."""
        for connection in list(self.open.values()):
            connection.drop()

    def watched(self, app: ASGIApp) -> ASGIApp:
        """Return an application that also tells each request's connection how far it is.

        A body that is not complete in time is a TimeoutError in the application. An answer to a request whose body has not
        been read to its end closes the connection, so that the rest is never read.
        """

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            connection = self.open.get(cast(Peer, tuple(scope["client"] or ())))
            if connection is None:  # it is just being closed; the client's address may be gone already
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
            headers = Headers(scope=scope)
            refused = framing_refusal(headers, scope["http_version"])
            complete = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
            connection.work() if complete else connection.send_body()

            async def received() -> Message:
                nonlocal complete
                message = await (receive() if complete else connection.in_time(receive))
                if message["type"] == "http.request" and not message.get("more_body"):
                    complete = True
                    connection.work()
                return message

            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start":
                    connection.answer(closes=not complete)
                    if not complete:
                        message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
                await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    connection.wait()

            await (app if refused is None else JSONResponse({"error": refused}, 400))(scope, received, sent)

        return run


def framing_refusal(headers: Headers, version: str) -> str | None:
    """What is wrong with a request that does not say clearly where it ends; None if it does.

    A proxy before the server may see its end elsewhere, and take what follows for another request (RFC 9112, section 6.1).
    """
    if "transfer-encoding" not in headers:
        return None
    if "content-length" in headers:
        return "a request has either Content-Length or Transfer-Encoding, not both"
    return "Transfer-Encoding needs HTTP/1.1" if version != "1.1" else None


class Connection(asyncio.Protocol):
    """One connection: uvicorn's protocol, with a time limit and a place among the others."""

    def __init__(self, inner: H11Protocol, connections: Connections) -> None:
        self.inner = inner
        self.connections = connections
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self.deadline = 0.0
        self.lingers = False
        """The client may still be sending what nobody reads."""
        self.thrown_away: int | None = None
        """Bytes that came after the answer was sent; None as long as it was not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a place, or close the connection at once if there is none."""
        self.transport = cast(asyncio.Transport, transport)
        self.peer = cast(Peer, tuple((transport.get_extra_info("peername") or ())[:2]))  # none if it is reset already
        self.is_taken = bool(self.peer) and self.connections.make_room()
        if not self.is_taken:
            self.transport.abort()
            return
        self.connections.open[self.peer] = self
        self.inner.connection_made(cast(asyncio.Transport, _LingeringTransport(self)))
        self.wait()

    def data_received(self, data: bytes) -> None:
        """Hand on what came, or throw it away after an answer that refused it."""
        if self.thrown_away is None:
            try:
                self.inner.data_received(data)
            except h11.ProtocolError:  # uvicorn refuses what came, but the answer to it has begun
                self.drop()
            if self.inner.conn.their_state is h11.ERROR:
                self._give_up_request()
            return
        self.thrown_away += len(data)
        if self.thrown_away > LINGER_BYTES:
            self.drop()

    def _give_up_request(self) -> None:
        """Tell the application that nobody waits for its answer: uvicorn has refused the rest of the request."""
        cycle = self.inner.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self._leave()
        if self.is_taken:
            self.inner.connection_lost(exc)

    def eof_received(self) -> None:
        """Close the connection, as uvicorn does."""

    def pause_writing(self) -> None:
        """Make answers wait for the client to take what was sent."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Let answers go on."""
        self.inner.resume_writing()

    def wait(self) -> None:
        """Wait for the next request's head."""
        if self.thrown_away is None:
            self._enter(self.connections.waiting)
            self._limit(self.connections.seconds)

    def send_body(self) -> None:
        """The head is here; its body has what is left of the time."""
        self._enter(self.connections.sending)
        self._stop()

    def work(self) -> None:
        """The whole request is here."""
        self._enter(None)
        self._stop()

    def answer(self, *, closes: bool) -> None:
        """The answer begins. ``closes``: the request was not read to its end, so this is the connection's last."""
        self.lingers = closes
        self._limit(self.connections.seconds)

    async def in_time(self, receive: Callable[[], Awaitable[Message]]) -> Message:
        """Receive a piece of the body. Raises TimeoutError if the request's time is over."""
        async with asyncio.timeout_at(self.deadline):
            return await receive()

    def close(self) -> None:
        """Close the connection once all that was written is sent; after a refusal, let the client see it first."""
        if not self.lingers:
            self.transport.close()
        elif self.thrown_away is None:
            self.thrown_away = 0
            self._enter(self.connections.waiting)
            self._limit(LINGER_SECONDS)
            try:
                self.transport.write_eof()
                self.transport.resume_reading()
            except OSError:  # the client has reset the connection
                self.drop()

    def drop(self) -> None:
        """Close the connection at once."""
        self._leave()
        self.transport.abort()

    def _enter(self, phase: dict["Connection", None] | None) -> None:
        for other in (self.connections.waiting, self.connections.sending):
            other.pop(self, None)
        if phase is not None and self.connections.open.get(self.peer) is self:
            phase[self] = None

    def _leave(self) -> None:
        self._stop()
        self._enter(None)
        if self.connections.open.get(self.peer) is self:
            del self.connections.open[self.peer]

    def _limit(self, seconds: float) -> None:
        self._stop()
        self.deadline = self.loop.time() + seconds
        if not self.transport.is_closing():
            self.timer = self.loop.call_at(self.deadline, self.drop)

    def _stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class _LingeringTransport:
    """A connection's transport as uvicorn sees it: what closes it closes the connection, which may take its time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.transport, name)

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._connection.thrown_away is not None or self._connection.transport.is_closing()
