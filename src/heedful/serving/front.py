"""The web application of ``heedful serve-reward``, in a process of its own; `heedful.serving.process` starts it.

Whatever takes long (JSON, tokens, scores) happens in the workers, which have the model, so ``/health`` is answered at any
time.
"""

import asyncio
import contextlib
import io
import json
import resource
import socket
import sys
from collections import deque
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from heedful.serving.channel import HEADER, READY, WORKER, exchange
from heedful.serving.connections import Connections
from heedful.serving.guard import Refusal, host_refusal, score_refusal
from heedful.serving.limits import Limits

ACCEPTS = 16
"""The most connections that are taken from the listening socket at a time, before those that are too many are closed."""
BACKLOG = 1024
"""The most connections that wait to be taken; the operating system may allow fewer."""
SMALL = 2**16
"""A body of so many bytes is read even if the queue is full, so that its connection need not be closed."""
RETRY_AFTER = 1
"""Seconds after which a client that was sent away may try again."""
TRIES = 2
"""How many workers may die while they score a request, before it is refused: it may be what kills them."""
GRACE_SECONDS = 0.5
"""How long clients may take their last answers when the server ends."""


class Front:
    """Receives requests, and passes each on to the worker that has been free for longest, in the order in which they come.

    A request whose worker dies has the next one that is free.

    Args:
        control: brings the sockets at which workers take requests; it does not block.
        limits: whom to answer, and how much to hold.
    """

    def __init__(self, control: socket.socket, limits: Limits) -> None:
        self.control = control
        self.limits = limits
        self.connections = Connections(limits.max_connections, limits.receive_seconds)
        self.free: deque[socket.socket] = deque()
        """Workers that score nothing."""
        self.waiting: deque[asyncio.Future[socket.socket]] = deque()
        """Requests that wait for a worker, the next one first; none does while a worker is free."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queued = 0
        """Requests that wait for a worker, or have one."""
        self.held = 0
        """Bytes of bodies."""
        self.server = uvicorn.Server(
            uvicorn.Config(
                self.connections.watched(self._application()),
                http=self.connections.protocol,  # type: ignore[arg-type]  # it is only called
                ws="none",
                lifespan="off",
                proxy_headers=False,
                log_level="error",  # what clients send is no reason for a line
                access_log=False,
                server_header=False,
                backlog=ACCEPTS,
                timeout_graceful_shutdown=2,
            )
        )

    async def run(self, listening: socket.socket) -> None:
        """Serve until standard input is closed, which the process that started it does when it ends."""
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._end)
        serving = asyncio.create_task(self.server.serve(sockets=[listening]))
        while not self.server.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            listening.listen(BACKLOG)
            await asyncio.get_running_loop().sock_sendall(self.control, HEADER.pack(READY, 0))
            asyncio.get_running_loop().add_reader(self.control.fileno(), self._take_worker)
        await serving

    async def score(self, request: Request) -> Response:
        """Answer ``POST /score``."""
        refusal = score_refusal(request.headers, self.limits) or self._lack_of_room(request)
        if refusal is not None:
            return _refused(*refusal)
        body = bytearray()
        try:
            refusal = await self._read(request, body)
            if refusal is None and self._is_full():
                refusal = self._busy()
            return _refused(*refusal) if refusal is not None else await self._answered(request, body)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is left to read it
        finally:
            self.held -= len(body)

    def _application(self) -> Starlette:
        async def score(request: Request) -> Response:
            refusal = host_refusal(request.headers, self.limits)
            return await self.score(request) if refusal is None else _refused(*refusal)

        async def health(request: Request) -> Response:
            refusal = host_refusal(request.headers, self.limits)
            return JSONResponse({"status": "ok", "model": self.limits.name}) if refusal is None else _refused(*refusal)

        async def refused(_: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            return _refused(error.status_code, f"{error.detail}; there are POST /score and GET /health")

        routes = [Route("/score", score, methods=["POST"]), Route("/health", health, methods=["GET"])]
        return Starlette(routes=routes, exception_handlers={HTTPException: refused})

    def _lack_of_room(self, request: Request) -> Refusal | None:
        """Refuse a request before its body is read, if it is known that it cannot be kept."""
        length = int(request.headers.get("content-length", 0))
        if length > self.limits.max_request_bytes:
            return self._too_large()
        if length > SMALL and self._is_full():
            return self._busy()
        return self._busy() if self.held + length > self.limits.max_held_bytes else None

    async def _read(self, request: Request, body: bytearray) -> Refusal | None:
        """Read a request's body, and count what is held. Raises ClientDisconnect."""
        try:
            async for piece in request.stream():
                if len(body) + len(piece) > self.limits.max_request_bytes:
                    return self._too_large()
                if self.held + len(piece) > self.limits.max_held_bytes:
                    return self._busy()
                self.held += len(piece)
                body += piece
        except TimeoutError:
            return 408, f"the request did not arrive within {self.limits.receive_seconds:g} seconds"
        return None

    async def _answered(self, request: Request, body: bytearray) -> Response:
        """Have a request scored when its turn comes, unless its client leaves before that."""
        self.queued += 1
        asked = asyncio.create_task(self._asked(body))
        left = asyncio.create_task(_has_left(request))
        try:
            events: set[asyncio.Future[Any]] = {asked, left, self.ended}
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.queued -= 1
            left.cancel()
            asked.cancel()  # what the model is already working on goes on
        answer = asked.result() if asked.done() and not asked.cancelled() else None
        if answer is None:
            return _refused(503, "the server is ending")
        status, content = answer
        return Response(bytes(content), status, media_type="application/json")

    async def _asked(self, body: bytearray) -> tuple[int, bytearray]:
        for i in range(TRIES):
            worker = await self._free_worker(is_next=i > 0)
            answer = await asyncio.shield(asyncio.create_task(self._exchange(worker, body)))
            if answer is not None:
                return answer
        message = f"{TRIES} workers died while they scored this request; the server's log says how"
        return 422, bytearray(json.dumps({"error": message}).encode())  # no 5xx: sent again, it would kill more

    async def _free_worker(self, *, is_next: bool) -> socket.socket:
        """Wait for a worker, before all others or after them."""
        self._forget_dead()
        if self.free:
            return self.free.popleft()
        turn: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        (self.waiting.appendleft if is_next else self.waiting.append)(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn in self.waiting:
                self.waiting.remove(turn)
            elif not turn.cancelled():
                self._release(turn.result())
            raise

    async def _exchange(self, worker: socket.socket, body: bytearray) -> tuple[int, bytearray] | None:
        answer = await exchange(worker, body)
        if answer is None:
            worker.close()
        else:
            self._release(worker)
        return answer

    def _take_worker(self) -> None:
        """Receive a worker that has started.

        Its socket does not come if too many files are open: it is closed then, so the worker ends and another is started.
        """
        content, descriptors, _, _ = socket.recv_fds(self.control, len(WORKER), 1)
        if not content:  # whoever started this process has ended
            asyncio.get_running_loop().remove_reader(self.control.fileno())
        self._forget_dead()
        for descriptor in descriptors:
            worker = socket.socket(fileno=descriptor)
            worker.setblocking(False)
            self._release(worker)

    def _release(self, worker: socket.socket) -> None:
        """Give a worker to the next request, if any waits."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(worker)
                return
        self.free.append(worker)

    def _forget_dead(self) -> None:
        """Close the sockets of workers that have died while they were free."""
        for worker in [worker for worker in self.free if not _is_there(worker)]:
            self.free.remove(worker)
            worker.close()

    def _is_full(self) -> bool:
        return self.queued >= self.limits.max_queue + self.limits.workers

    def _busy(self) -> Refusal:
        return 429, (
            f"the server is busy: {self.limits.max_queue} requests or {self.limits.max_held_bytes} bytes of them wait; try "
            "again later"
        )

    def _too_large(self) -> Refusal:
        limit = self.limits.max_request_bytes
        return 413, f"the request is larger than {limit} bytes; send fewer responses at a time"

    def _end(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(sys.stdin.fileno())
        self.server.should_exit = True
        self.connections.drop_unfinished()
        self.ended.set_result(None)
        loop.call_later(GRACE_SECONDS, self.connections.drop_all)


def _is_there(worker: socket.socket) -> bool:
    """Whether a worker that is free is alive: it has nothing to say until it is asked."""
    try:
        return worker.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


async def _has_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(status: int, message: str) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(RETRY_AFTER)}}
    headers[503] = headers[429]
    content = json.dumps({"error": message}, ensure_ascii=False)
    return Response(content, status, headers.get(status), media_type="application/json")


def main(control: int, listening: int) -> None:
    """Read the limits from standard input, and serve.

    Args:
        control: file descriptor of the socket that brings workers.
        listening: file descriptor of the bound socket.
    """
    line = io.FileIO(sys.stdin.fileno(), closefd=False).readline()  # no buffer: what follows is only the end
    if not line:
        return
    with socket.socket(fileno=control) as brings_workers, socket.socket(fileno=listening) as bound:
        brings_workers.setblocking(False)
        limits = Limits.from_json(line)
        _allow_files(limits.files)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_run(brings_workers, bound, limits))


def _allow_files(count: int) -> None:
    """Let this process have so many files open at a time. The hard limit allows them (`heedful.rewards.serve`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


async def _run(control: socket.socket, listening: socket.socket, limits: Limits) -> None:
    await Front(control, limits).run(listening)
