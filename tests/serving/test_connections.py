"""Limits on connections: who gives way when there are too many, and what ends clients that idle, stall or read nothing."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from heedful.serving.connections import Server, bound

SECONDS = 0.3
"""What a head, a body and the departure of an answer may take, each."""
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
WHOLE = HEAD % 2 + b"ok"
LARGE = 12_000_000
"""Bytes of an answer that no buffer of the system holds."""


class Served:
    """A server in a thread, whose application waits for a gate before it answers."""

    def __init__(self, *, most=100, answer=b"ok", seconds=SECONDS, end_seconds=5.0):
        self.gate = threading.Event()
        self.gate.set()
        self.answer = answer
        self.server = Server(self.application, most_connections=most, receive_seconds=seconds, end_seconds=end_seconds)
        self.listening = bound("127.0.0.1", 0)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.listening])))
        self.clients = []

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
        while not self.gate.is_set():
            await asyncio.sleep(0.005)
        answer = StreamingResponse(self.pieces()) if self.answer is None else Response(self.answer)
        await answer(scope, receive, send)

    def connect(self, sent=b"", *, receives=None):
        """A client that has sent something, and that the server has seen."""
        before = len(self.server.limits.open)
        client = socket.socket()
        self.clients.append(client)
        if receives is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        client.settimeout(10)
        client.connect(self.listening.getsockname())
        client.sendall(sent)
        deadline = time.monotonic() + 0.05
        while len(self.server.limits.open) == before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.01)
        return client

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *_):
        self.gate.set()
        for client in self.clients:
            client.close()
        self.server.should_exit = True
        self.thread.join()
        self.listening.close()


def is_open(client):
    """Whether the server has left a connection open, on which nothing is to be read."""
    client.settimeout(0.02)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False
    finally:
        client.settimeout(10)


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
    with Served(most=4, seconds=30) as served:
        served.gate.clear()
        body, whole = served.connect(HEAD % 9 + b"half"), served.connect(WHOLE)
        first, second = served.connect(b"POST"), served.connect()
        assert all(map(is_open, (body, whole, first, second)))
        third = served.connect(WHOLE)
        assert [is_open(one) for one in (body, whole, first, second, third)] == [True, True, False, True, True]
        fourth = served.connect(WHOLE)
        assert [is_open(one) for one in (body, whole, second, third, fourth)] == [True, True, False, True, True]
        fifth = served.connect(WHOLE)
        assert [is_open(one) for one in (body, whole, third, fourth, fifth)] == [False, True, True, True, True]
        assert not is_open(served.connect(WHOLE))
        served.gate.set()
        assert all(map(is_answered, (whole, third, fourth, fifth)))
        idle = served.connect()
        assert sum(map(is_open, (whole, third, fourth, fifth, idle))) == 4
        assert is_open(idle), "one that has its answer waits for a head, and has done so for longer"


def test_a_client_that_leaves_gives_its_place_back():
    with Served(most=2, seconds=30) as served:
        served.gate.clear()
        for _ in range(4):
            client = served.connect(WHOLE)
            client.close()
            time.sleep(0.03)
        assert served.server.limits.open == set()
        assert (served.server.limits.waiting, served.server.limits.sending) == ({}, {})
        staying = served.connect(WHOLE)
        served.gate.set()
        assert is_answered(staying)


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHo"], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come(sent):
    with Served() as served:
        started = time.monotonic()
        client = served.connect(sent)
        (one,) = served.server.limits.open
        with contextlib.suppress(OSError):  # what trickles in is no reason to wait longer
            while sent and time.monotonic() < started + 2:
                client.sendall(b"o")
                time.sleep(0.05)
        assert read(client) == b""
        assert SECONDS * 0.9 < time.monotonic() - started < 1.5
        assert one.timers == {}


def test_a_body_that_does_not_come():
    """It costs its client an answer, and the connection."""
    with Served() as served:
        started = time.monotonic()
        client = served.connect(HEAD % 9 + b"half")
        answer = read(client)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer
        assert SECONDS * 0.9 < time.monotonic() - started < SECONDS + 2


def test_a_whole_request_may_wait_and_the_next_has_its_time_again():
    """The time for a head ends with it, and begins anew with the answer."""
    with Served() as served:
        served.gate.clear()
        client = served.connect(WHOLE[:10])
        for piece in (WHOLE[10:20], WHOLE[20:]):
            client.sendall(piece)
            time.sleep(0.02)
        time.sleep(2 * SECONDS)
        served.gate.set()
        assert is_answered(client)
        for _ in range(4):
            time.sleep(0.6 * SECONDS)
            client.sendall(WHOLE)
            assert is_answered(client)
        started = time.monotonic()
        assert read(client) == b""
        assert SECONDS * 0.8 < time.monotonic() - started < 1.5


def test_half_a_request_behind_another_has_its_time_from_the_answer():
    """It came while the other was being answered."""
    with Served() as served:
        served.gate.clear()
        client = served.connect(WHOLE + WHOLE[:20])
        time.sleep(2 * SECONDS)
        served.gate.set()
        assert is_answered(client)
        started = time.monotonic()
        time.sleep(0.5 * SECONDS)
        client.sendall(WHOLE[20:])
        assert is_answered(client)
        assert read(client) == b""
        assert SECONDS < time.monotonic() - started < 2


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
            time.sleep(0.6 * SECONDS)
            reading.sendall(WHOLE)
        assert all(len(read(client)) < LARGE for client in deaf)
        assert [one.timers for one in theirs] == [{}, {}]


@pytest.mark.parametrize("kept", [b"close", b"keep-alive"])
def test_the_last_of_an_answer_that_nobody_takes_is_given_up(kept):
    with Served(answer=None) as served:
        served.connect(WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: %s\r\n\r\n" % kept), receives=4096)
        (one,) = served.server.limits.open
        time.sleep(0.5 * SECONDS)
        assert one.transport.get_write_buffer_size() > 0
        time.sleep(SECONDS)
        assert served.server.limits.open == set()
        assert one.timers == {}


def test_a_body_that_breaks_the_protocol_behind_its_answer_costs_the_connection(caplog):
    with Served(seconds=30) as served:
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
        started = time.monotonic()
        served.server.should_exit = True
        assert read(client) == b""
        served.thread.join()
        assert time.monotonic() - started < 2 * SECONDS + 1


def test_the_end_waits_for_answers_so_long_and_no_longer():
    with Served(end_seconds=0.5) as served:
        served.gate.clear()
        client = served.connect(WHOLE)
        started = time.monotonic()
        served.server.should_exit = True
        assert read(client) == b""
        assert 0.4 < time.monotonic() - started < 1.5
        served.gate.set()
