"""Limits on connections: who gives way when there are too many, and what ends clients that idle, stall or read nothing."""

import asyncio
import contextlib
import logging
import socket
import threading
import time

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from heedful.apps.serving.connections import DISCARD_SECONDS, Server, bound

SECONDS = 4.0
"""What a head, a body and the departure of an answer may take, each: less than uvicorn's own limit of idle connections."""
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
WHOLE = HEAD % 2 + b"ok"
LARGE = 12_000_000
"""Bytes of an answer that no buffer of the system holds."""
PATIENCE = 120
"""Seconds for which a client waits for what must come; a busy machine is slow."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when a test says so."""

    now = 0.0

    def time(self):
        return self.now


class Served:
    """A server in a thread, whose application waits for a gate before it answers."""

    def __init__(self, *, most=100, answer=b"ok", end_seconds=5.0):
        self.gate = asyncio.Event()
        self.gate.set()
        self.answer = answer
        self.server = Server(self.application, most_connections=most, receive_seconds=SECONDS, end_seconds=end_seconds)
        self.listening = bound("127.0.0.1", 0)
        self.loop = Loop()
        self.thread = threading.Thread(target=self.run)
        self.clients = []

    def run(self):
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.server.serve(sockets=[self.listening]))

    async def pieces(self):
        """An answer that is longer than the system's buffers by so little that no application has to wait for its client."""
        while not any(one.transport.get_write_buffer_size() for one in self.server.limits.open):
            yield b"x" * 8192

    async def application(self, scope, receive, send):
        if scope["path"] == "/early":  # it answers before the body has come
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"early", "more_body": True})
        try:
            await Request(scope, receive).body()
        except TimeoutError:
            await Response("late", 408)(scope, receive, send)
            return
        await self.gate.wait()
        answer = StreamingResponse(self.pieces()) if self.answer is None else Response(self.answer)
        await answer(scope, receive, send)

    def later(self, seconds=0.0):
        """Let time pass, and the server do what there is to do, until nothing is left."""

        done = threading.Event()

        def look(times):  # at every connection, once more each time
            self.loop.call_soon(look, times - 1) if times else done.set()

        def passed():
            self.loop.now += seconds
            look(50)

        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(passed)
        while self.thread.is_alive() and not done.wait(0.01):
            pass

    def open_gate(self):
        self.loop.call_soon_threadsafe(self.gate.set)

    def connect(self, sent=b"", *, receives=None):
        """A client that has sent something, and that the server has seen."""
        client = socket.socket()
        self.clients.append(client)
        if receives is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        client.settimeout(PATIENCE)
        client.connect(self.listening.getsockname())
        self.send(client, sent)
        return client

    def send(self, client, sent):
        client.sendall(sent)
        self.later()

    def leaves_open(self, client):
        """Whether the server has left a connection open, on which nothing is to be read."""
        self.later()
        client.setblocking(False)
        try:
            return client.recv(1) != b""
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        finally:
            client.settimeout(PATIENCE)

    def end(self):
        """Ask the server to end. Returns the seconds until it has ended."""
        began = self.loop.now
        self.server.should_exit = True
        while self.thread.is_alive():
            self.later(0.1)
        return self.loop.now - began

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.001)
        return self

    def __exit__(self, *_):
        for client in self.clients:
            client.close()
        self.end()
        self.listening.close()


def read(client):
    """What comes until the connection is closed."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            received += piece
    return bytes(received)


def is_answered(client, length=2):
    """Whether a whole answer comes, with a body of so many bytes."""
    received, missing = bytearray(), length + 1
    with contextlib.suppress(ConnectionResetError):
        while missing and (piece := client.recv(1 << 20)):
            received += piece
            head = received[:1000].partition(b"\r\n\r\n")
            missing = length + sum(map(len, head[:2])) - len(received) if head[1] else length
    return received.startswith(b"HTTP/1.1 200") and missing == 0


def test_who_gives_way_to_a_new_connection():
    """Who has waited longest for a head, then for a body; never one whose request is whole: then the new one is refused."""
    with Served(most=4) as served:
        served.gate.clear()
        body, whole = served.connect(HEAD % 9 + b"half"), served.connect(WHOLE)
        first, second = served.connect(b"POST"), served.connect()
        is_open = served.leaves_open
        assert all(map(is_open, (body, whole, first, second)))
        third = served.connect(WHOLE)
        assert [is_open(one) for one in (body, whole, first, second, third)] == [True, True, False, True, True]
        fourth = served.connect(WHOLE)
        assert [is_open(one) for one in (body, whole, second, third, fourth)] == [True, True, False, True, True]
        fifth = served.connect(WHOLE)
        assert [is_open(one) for one in (body, whole, third, fourth, fifth)] == [False, True, True, True, True]
        assert not is_open(served.connect(WHOLE))
        served.open_gate()
        assert all(map(is_answered, (whole, third, fourth, fifth)))
        idle = served.connect()
        assert sum(map(is_open, (whole, third, fourth, fifth, idle))) == 4
        assert is_open(idle), "one that has its answer waits for a head, and has done so for longer"


def test_a_client_that_leaves_gives_its_place_back():
    with Served(most=2) as served:
        served.gate.clear()
        for _ in range(4):
            client = served.connect(WHOLE)
            client.close()
            served.later()
        assert served.server.limits.open == set()
        assert (served.server.limits.waiting, served.server.limits.sending) == ({}, {})
        staying = served.connect(WHOLE)
        served.open_gate()
        assert is_answered(staying)


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHo"], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come(sent):
    with Served() as served:
        client = served.connect(sent)
        (one,) = served.server.limits.open
        for _ in range(9):
            served.later(0.1 * SECONDS)
            assert served.leaves_open(client)
            if sent:  # what trickles in is no reason to wait longer
                served.send(client, b"o")
        served.later(0.11 * SECONDS)
        assert read(client) == b""
        assert one.timers == {}


def test_a_body_that_does_not_come():
    """It costs its client an answer, and the connection."""
    with Served() as served:
        client = served.connect(HEAD % 9 + b"half")
        served.later(0.99 * SECONDS)
        assert served.leaves_open(client)
        served.later(0.02 * SECONDS)
        served.later(DISCARD_SECONDS)  # in which the rest may still come, so that the client sees the answer
        answer = read(client)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer


def test_a_whole_request_may_wait_and_the_next_has_its_time_again():
    """The time for a head ends with it, and begins anew with the answer."""
    with Served() as served:
        served.gate.clear()
        client = served.connect(WHOLE[:10])
        for piece in (WHOLE[10:20], WHOLE[20:]):
            served.send(client, piece)
        served.later(2 * SECONDS)
        served.open_gate()
        assert is_answered(client)
        for _ in range(4):
            served.later(0.6 * SECONDS)
            client.sendall(WHOLE)
            assert is_answered(client)
        served.later(0.99 * SECONDS)
        assert served.leaves_open(client)
        served.later(0.02 * SECONDS)
        assert read(client) == b""


def test_half_a_request_behind_another_has_its_time_from_the_answer():
    """It came while the other was being answered."""
    with Served() as served:
        served.gate.clear()
        client = served.connect(WHOLE + WHOLE[:20])
        served.later(2 * SECONDS)
        served.open_gate()
        assert is_answered(client)
        served.later(0.5 * SECONDS)
        client.sendall(WHOLE[20:])
        assert is_answered(client)
        served.later(0.99 * SECONDS)
        assert served.leaves_open(client)
        served.later(0.02 * SECONDS)
        assert read(client) == b""


def test_an_answer_that_nobody_takes_is_given_up():
    """One that is taken in time comes whole, and leaves the connection for others."""
    with Served(answer=b"x" * LARGE) as served:
        deaf = [
            served.connect(WHOLE * times, receives=4096) for times in (1, 2)
        ]  # the second waits for the first to be taken
        theirs = list(served.server.limits.open)
        reading = served.connect(WHOLE)
        for _ in range(4):
            assert is_answered(reading, LARGE)
            served.later(0.6 * SECONDS)
            reading.sendall(WHOLE)
        assert all(len(read(client)) < LARGE for client in deaf)
        assert [one.timers for one in theirs] == [{}, {}]


@pytest.mark.parametrize("kept", [b"close", b"keep-alive"])
def test_the_last_of_an_answer_that_nobody_takes_is_given_up(kept):
    with Served(answer=None) as served:
        served.connect(WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: %s\r\n\r\n" % kept), receives=4096)
        (one,) = served.server.limits.open
        while not one.transport.get_write_buffer_size():
            served.later()
        served.later(0.99 * SECONDS)
        assert served.server.limits.open == {one}
        served.later(0.02 * SECONDS)
        assert served.server.limits.open == set()
        assert one.timers == {}


def test_the_logging_of_the_process_stays_as_it_is():
    """Else one server that begins lets another one print for a moment."""
    logger, handler = logging.getLogger("uvicorn"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        with Served():
            assert logger.handlers == [handler]
            assert logging.getLogger("uvicorn.error").level == logging.ERROR
    finally:
        logger.removeHandler(handler)


def test_a_body_that_breaks_the_protocol_behind_its_answer_costs_the_connection(caplog):
    with Served() as served:
        client = served.connect(
            b"POST /early HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
        )
        (one,) = served.server.limits.open
        assert b"early" in client.recv(4096)
        client.sendall(b"no length of a chunk\r\n")
        read(client)
        assert served.server.limits.open == set()
        assert one.timers == {}
    assert [record.name for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("sent", [b"", b"POST", HEAD % 9 + b"half"], ids=["nothing", "half a head", "half a body"])
def test_the_end_waits_for_no_request_that_is_not_whole(sent):
    with Served(end_seconds=60) as served:
        client = served.connect(sent)
        assert served.end() < 1
        assert read(client) == b""


def test_the_end_waits_for_answers_so_long_and_no_longer():
    with Served(end_seconds=20) as served:
        served.gate.clear()
        client = served.connect(WHOLE)
        served.server.should_exit = True
        served.later(0.1)
        served.later(19.9)
        assert served.leaves_open(client)
        served.later(0.2)
        assert read(client) == b""
        served.open_gate()
