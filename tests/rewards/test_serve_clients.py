"""heedful serve-reward with clients that idle, stall, leave, flood it and send what they should not."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx2
import pytest

from heedful.cli.main import main
from heedful.rewards.http import HTTPReward
from heedful.rewards.serve import public_name

HALF_HEAD = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Ty"
SECONDS = 30.0
"""The longest that /health may take on a machine that does much else."""
get, post = (partial(method, timeout=300, verify=False) for method in (httpx2.get, httpx2.post))


def head(length, *more):
    """The head of a request for scores."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = ["POST /score HTTP/1.1", "Host: localhost", "Content-Type: application/json", size, *more]
    return "\r\n".join([*lines, "", ""]).encode()


def request(count, words=60):
    """A whole request for the scores of ``count`` responses."""
    body = json.dumps({"prompts": ["a"] * count, "completions": ["b" * words] * count}).encode()
    return head(len(body)) + body


class Server:
    """``heedful serve-reward`` as a process of its own, with so many open files, at first or at most."""

    def __init__(self, forked, folder, *flags, soft, hard):
        def serve():
            os.closerange(3, 4096)  # what the tests have open
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            words = ["serve-reward", "--model", folder, "--port", "0", "--device", "cpu", "--dtype", "float32", *flags]
            sys.exit(main(words))

        self.process = forked(serve)
        while not self.process.said()[0]:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        self.said = self.process.said()[0]
        self.port = int(re.search(r":(\d+)/score", self.said).group(1))
        self.url = f"http://127.0.0.1:{self.port}"

    def connect(self, sent=b"", *, receives=None):
        """A connection on which something has been sent."""
        connection = socket.socket()
        if receives is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        try:
            connection.settimeout(300)
            connection.connect(("127.0.0.1", self.port))
            connection.sendall(sent)
        except OSError:
            connection.close()
            raise
        return connection

    def memory(self):
        """Its megabytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def end(self, number=signal.SIGINT):
        """Send a signal; the exit status, and what it said since then on both streams."""
        self.process.send_signal(number)
        out, err = self.process.communicate()
        return [self.process.returncode, out.removeprefix(self.said), err]


@pytest.fixture(scope="module")
def server(forked, folder):
    """One for the tests that end none: it may open few files, and let few requests wait."""
    one = Server(forked, folder, "--max-queue", "8", soft=128, hard=128)
    yield one
    one.process.kill()
    one.process.communicate()


def answer_on(connection, *, head_only=False):
    """What comes until the connection is closed, or only the status line."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
            if head_only and b"\r\n" in received:
                break
    return received


class HealthWatch(threading.Thread):
    """Asks for /health all the time."""

    def __init__(self, server):
        super().__init__()
        self.server, self.is_over = server, threading.Event()
        self.seconds, self.answers, self.requests = [], set(), [0]

    def run(self):
        while not self.is_over.wait(0.02):
            started, received = time.monotonic(), b""
            try:
                with self.server.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
                    while b"}" not in received and (piece := connection.recv(4096)):
                        received += piece
            except OSError as error:
                received = repr(error).encode()
            self.seconds.append(time.monotonic() - started)
            self.answers.add(received[:12].decode())
            if b"}" in received:
                self.requests.append(json.loads(received[received.find(b"{") :])["requests"])

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.join()


def statuses(server, requests):
    """The statuses of requests that are sent at the same time, or the kinds of errors."""

    def status(sent):
        try:
            with server.connect(sent) as connection:
                line = answer_on(connection, head_only=True)
        except OSError as error:
            return type(error).__name__
        return int(line.split()[1]) if line else "closed"

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(status, requests))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_the_command_serves_until_a_signal_ends_it_whatever_clients_do(forked, folder, reward, number):
    """The whole way: the model's scores, then half a head, half a body, requests that are scored and that wait, an answer
    that nobody reads, and the end: it waits for no score and has no traceback. A low soft limit of open files is raised."""
    one = Server(forked, folder, soft=64, hard=resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    try:
        assert folder in one.said
        over_http = HTTPReward(f"{one.url}/score")(prompts=["问", "b"], completions=["答", "c"], truncated=[False] * 2)
        assert over_http == pytest.approx(reward(["问", "b"], ["答", "c"], [False] * 2), abs=1e-6)
        kinds = [b"", HALF_HEAD, head(1000) + b"{", head(None) + b"5\r\n{", *[request(3000)] * 4]
        connections = [one.connect(sent) for sent in kinds]
        connections += [one.connect(request(1) * 2000, receives=4096), *(one.connect() for _ in range(100))]
        until(one, 5)
        ended = one.end(number)
        is_interrupt = number == signal.SIGINT
        assert ended == ([0, "the server has ended\n", ""] if is_interrupt else [143, "", "heedful: terminated\n"])
        assert [answer_on(connection)[:12] for connection in connections[4:8]] == [b"HTTP/1.1 503"] * 4
        for connection in connections:
            connection.close()
    finally:
        one.process.kill()


def waiting(server):
    """How many requests wait or are being scored."""
    return get(f"{server.url}/health").json()["requests"]


def until(server, count):
    """Wait until so many requests wait or are being scored."""
    while waiting(server) != count:
        time.sleep(0.002)


def test_health_and_memory_under_load(server):
    """150 idle and 100 busy connections, stalled uploads, abandoned requests and a body without end, all at once."""
    before = server.memory()
    with HealthWatch(server) as watch, contextlib.ExitStack() as stack:
        hold = stack.enter_context
        for _ in range(150):
            hold(server.connect(HALF_HEAD))
        stalled = [hold(server.connect(head(50_000_000))) for _ in range(20)]
        for connection in stalled:
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.send(b"x" * 2**20)
        busy = hold(server.connect(request(3000)))
        while waiting(server) < 1:
            time.sleep(0.02)
        for _ in range(30):  # abandoned
            server.connect(request(100)).close()
        while waiting(server) > 1:  # the server has not yet seen that they left
            time.sleep(0.02)
        endless = threading.Thread(target=send_endlessly, args=(server,))
        endless.start()
        found = statuses(server, [request(10)] * 100)
        peak = server.memory()
        endless.join()
        assert answer_on(busy, head_only=True).startswith(b"HTTP/1.1 200")
    # There are fewer connections than clients, so some are closed before they have asked: the more, the slower they ask.
    assert set(found) <= {200, 429, "closed", "ConnectionResetError", "BrokenPipeError"}
    assert max(watch.requests) == 9, "eight wait while one is scored"
    assert found.count(200) >= 8, "more only if that one was answered before all of them had asked"
    assert watch.answers <= {"HTTP/1.1 200", "ConnectionRe"}, "a slow /health is one of those that are closed too"
    assert max(watch.seconds) < SECONDS
    assert peak - before < 400, "the bodies in flight are at most 256 MB"
    assert server.process.said()[1] == ""


def send_endlessly(server, limit=2**32):
    """Send a body without an end; the bytes that could be sent, and the answer."""
    sent = 0
    with server.connect(head(None)) as connection:
        piece = b"%x\r\n" % 2**20 + b" " * 2**20 + b"\r\n"
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while sent < limit:
                connection.sendall(piece)
                sent += 2**20
        with contextlib.suppress(ConnectionResetError):
            return sent, answer_on(connection)
    return sent, b""


def test_an_oversized_body_is_not_read_without_end(server):
    sent, _ = send_endlessly(server)
    assert sent < 2**29
    with server.connect(head(80_000_000, "Expect: 100-continue")) as connection:  # nothing of it is asked for
        answer = answer_on(connection)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer
    with server.connect(head(80_000_000) + b" " * 80_000_000) as connection:  # sent before anybody listens
        assert answer_on(connection, head_only=True).startswith(b"HTTP/1.1 413")


@pytest.mark.exhaustive
def test_a_large_request_does_not_hold_up_health(server):
    """60 MB of JSON, which are read in one go, and a text of 20 MB that is refused before it is tokenised."""
    many = b'{"prompts": ["x"], "completions": ["y"], "columns": {"n": [' + b"1234567," * 7_400_000 + b"0]}}"
    long = json.dumps({"prompts": ["x"], "completions": ["ab c" * 5_000_000]}).encode()
    plain = {"Content-Type": "application/json"}
    with HealthWatch(server) as watch:
        assert post(f"{server.url}/score", content=many, headers=plain).status_code == 200
        answer = post(f"{server.url}/score", content=long, headers=plain)
    assert answer.status_code == 400
    assert "completions[0] has 20000000 characters; the reward model can read at most 100000" in answer.text
    assert (watch.answers, max(watch.seconds) < SECONDS) == ({"HTTP/1.1 200"}, True)


class Slow:
    """A reward that takes its time, and remembers whom it was asked about."""

    def __init__(self):
        self.go = threading.Semaphore(0)
        self.asked = []

    def __call__(self, prompts, completions, truncated):
        self.asked.append(prompts[0])
        self.go.acquire(timeout=300)
        return [1.0] * len(completions)

    def wait_for(self, count):
        while len(self.asked) < count:
            time.sleep(0.01)


class Address:
    """What `Server.connect` needs of a server in this process."""

    def __init__(self, url):
        self.url = url
        self.port = int(url.rpartition(":")[2])

    connect = Server.connect


def named(name):
    body = json.dumps({"prompts": [name], "completions": ["b"]}).encode()
    return head(len(body)) + body


def test_requests_beyond_the_queue_are_told_to_come_back(serving):
    slow = Slow()
    with serving(slow, max_characters=1000, max_queue=2) as url:
        one = Address(url)
        waiting = [one.connect(named("0"))]
        slow.wait_for(1)
        for i in (1, 2):
            waiting.append(one.connect(named(str(i))))
            until(one, i + 1)
        with one.connect(head(100_000)) as connection:  # before its body has come
            answer = answer_on(connection)
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in answer
        assert b"connection: close" in answer
        assert b"2 requests" in answer
        with one.connect(named("small")) as connection:
            assert answer_on(connection, head_only=True).startswith(b"HTTP/1.1 429")
        slow.go.release(3)
        for connection in waiting:
            assert answer_on(connection, head_only=True).startswith(b"HTTP/1.1 200")
            connection.close()
    assert slow.asked == ["0", "1", "2"]


def test_requests_whose_client_has_gone_are_not_scored(serving):
    slow = Slow()
    with serving(slow, max_characters=1000) as url:
        one = Address(url)
        first = one.connect(named("first"))
        slow.wait_for(1)
        leaving = [one.connect(named(f"gone {i}")) for i in range(5)]
        staying = one.connect(named("stays"))
        until(one, 7)
        for connection in leaving:
            connection.close()
        until(one, 2)
        slow.go.release(2)
        for connection in (first, staying):
            assert answer_on(connection, head_only=True).startswith(b"HTTP/1.1 200")
            connection.close()
    assert slow.asked == ["first", "stays"]


def test_requests_whose_client_has_gone_do_not_gather_without_end(serving):
    """They stay in the queue while one request is scored, but only so many."""
    slow = Slow()
    with serving(slow, max_characters=1000, max_queue=1) as url:
        one = Address(url)
        first = one.connect(named("first"))
        slow.wait_for(1)
        for i in range(9):
            with one.connect(named(f"gone {i}")):
                until(one, 2)
            until(one, 1)
        with one.connect(named("one more")) as connection:
            assert answer_on(connection, head_only=True).startswith(b"HTTP/1.1 429")
        slow.go.release(2)
        assert answer_on(first, head_only=True).startswith(b"HTTP/1.1 200")
        first.close()
        answer = b"HTTP/1.1 429"
        while answer.startswith(b"HTTP/1.1 429"):  # those that have gone leave one by one
            with one.connect(named("later")) as connection:
                answer = answer_on(connection, head_only=True)
        assert answer.startswith(b"HTTP/1.1 200")
    assert slow.asked == ["first", "later"]


def test_bodies_in_flight_are_bounded(serving):
    """Those that stall hold what they have sent until their time is over; what would be too much is sent away."""
    with serving(Slow(), max_characters=1000, max_request_mb=1, max_held_mb=2, receive_timeout=3) as url:
        one = Address(url)
        holding = [one.connect(head(1_000_000) + b" " * 900_000) for _ in range(2)]
        time.sleep(0.5)
        with one.connect(head(500_000)) as connection:
            assert answer_on(connection).startswith(b"HTTP/1.1 429")
        with one.connect(head(None) + b"%x\r\n" % 500_000 + b" " * 500_000) as connection:
            assert answer_on(connection).startswith(b"HTTP/1.1 429")
        for connection in holding:
            assert answer_on(connection).startswith(b"HTTP/1.1 408")
            connection.close()
        with one.connect(head(900_000) + b" " * 900_000) as connection:
            assert answer_on(connection, head_only=True).startswith(b"HTTP/1.1 400"), "received, and no JSON"


def ask(url, **headers):
    """POST a request for a score with these headers; a header that is None is left out."""
    given = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    body = json.dumps({"prompts": ["a"], "completions": ["b"]}).encode()
    return post(f"{url}/score", content=body, headers=given)


def ones(prompts, completions, truncated):
    return [1.0] * len(completions)


def test_other_sites_do_not_reach_it(serving):
    """A name of theirs that points here (DNS rebinding), a page of theirs, and forms, which cannot send JSON."""
    with serving(ones, max_characters=1000, allowed_hosts=("GPU-box",)) as url:
        port = url.rpartition(":")[2]
        for host in ("evil.example", f"evil.example:{port}", "203.0.113.9", "[bad", "localhost.evil.example"):
            refused = ask(url, host=host)
            assert (refused.status_code, "does not accept the host" in refused.json()["error"]) == (421, True), host
            assert get(f"{url}/health", headers={"host": host}).status_code == 421
        for host in (f"localhost:{port}", "127.0.0.1", "127.8.8.8", f"[::1]:{port}", "gpu-BOX:80", "a.localhost."):
            assert ask(url, host=host).status_code == 200, host
        for origin in ("https://evil.example", "null", "http://localhost:1", f"file://{url[7:]}x"):
            refused = ask(url, origin=origin)
            assert (refused.status_code, "Origin" in refused.json()["error"]) == (403, True), origin
        assert ask(url, origin=url).status_code == 200
        for kind in ("text/plain", "", "application/x-www-form-urlencoded", "application/jsonp"):
            refused = ask(url, content_type=kind)
            assert (refused.status_code, "application/json" in refused.json()["error"]) == (415, True), kind
        assert ask(url, content_type="Application/JSON; charset=utf-8").status_code == 200
    # At every address any address in digits will do: nobody can point one of those anywhere else. Names still must be said.
    with serving(ones, max_characters=1000, host="0.0.0.0") as url:
        assert ask(url, host="203.0.113.9:8001").status_code == 200
        assert ask(url, host="evil.example").status_code == 421


def test_a_token(serving):
    """/health asks for none, and tells nothing that is worth one."""
    with serving(ones, max_characters=1000, token="s3cret") as url:
        for given in ({}, {"authorization": "Bearer wrong!"}, {"authorization": "s3cret"}, {"authorization": "Bearer"}):
            refused = ask(url, **given)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert "Authorization: Bearer TOKEN" in refused.json()["error"]
            assert "s3cret" not in refused.text
        assert ask(url, authorization="Bearer s3cret").status_code == 200
        assert get(f"{url}/health").json() == {"status": "ok", "model": "m", "requests": 0}


def test_health_gives_a_name_and_no_path(server, folder, tmp_path, monkeypatch):
    assert get(f"{server.url}/health").json() == {"status": "ok", "model": "run/final", "requests": 0}
    assert str(Path(folder).parent.parent) not in get(f"{server.url}/health").text
    for place, name in (
        ("alice/models/judge", "judge"),
        ("alice/runs/好/final", "好/final"),
        ("alice/runs/r/checkpoints/step-20", "r/checkpoints/step-20"),
    ):
        (tmp_path / place).mkdir(parents=True)
        assert public_name(str(tmp_path / place)) == name
        monkeypatch.chdir(tmp_path / place)
        assert public_name(".") == name
    assert public_name("modelscope:org/judge") == "modelscope:org/judge"


@pytest.mark.parametrize("token", ["", "two words", "秘密"])
def test_a_token_that_cannot_be_sent_is_refused(capsys, monkeypatch, token):
    monkeypatch.setenv("MY_TOKEN", token)
    assert main(["serve-reward", "--model", "没有", "--port", "0", "--token-env", "MY_TOKEN"]) == 2
    message = capsys.readouterr().err
    assert "ConfigError: --token-env MY_TOKEN: " in message
    assert not token or token not in message


@pytest.mark.exhaustive
def test_too_few_files_are_refused_before_the_model_is_loaded():
    run = f"ulimit -n 128; exec {sys.executable} -m heedful serve-reward --model 没有 --port 0"
    done = subprocess.run(["sh", "-c", run], capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 2
    said = "ConfigError: the system allows this process 128 open files (ulimit -n), and --max-queue 64 needs 168"
    assert said in done.stderr
