"""A project that is served on a real socket, and clients as browsers are: one connection, a cookie, a CSRF token."""

import asyncio
import http.client
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from heedful.apps.label import Candidate, Item, Project, item_id
from heedful.apps.label.server.app import Application
from heedful.apps.label.server.policy import PolicyWorker
from heedful.apps.label.server.request import Site
from heedful.apps.label.server.run import make_server
from heedful.apps.label.server.security import access_of
from heedful.apps.serving.connections import bound
from heedful.configs.label import ProjectSettings

PROGRAM = (sys.executable, str(Path(__file__).parent / "fake_policy.py"))
SECRET = "runs/secret-policy/final"
"""What wrote the answers; it must never reach a browser before a label."""


def pair_item(i, **more):
    """A pair with text of all kinds, and sources that nobody may see."""
    prompt = f"题目 {i} 😀\u2028\u202eabc"
    candidates = (
        Candidate(f"first {i}: 答 👩‍👩‍👧", {"checkpoint": f"{SECRET}-a", "temperature": 0.7, "seed": 90210}),
        Candidate(f"second {i}: <b>x</b>", {"checkpoint": f"{SECRET}-b", "temperature": 0.9, "seed": 90211}),
    )
    return Item(item_id("pair", prompt, candidates), "pair", prompt, candidates, **more)


class Answer:
    """What came back."""

    def __init__(self, response):
        self.status = response.status
        self.headers = response.headers
        self.bytes = response.read()

    @property
    def json(self):
        return json.loads(self.bytes)

    @property
    def error(self):
        return self.json["error"]


class Client:
    """A browser, as far as the server can tell."""

    def __init__(self, port):
        self.port = port
        self.cookie = None
        self.csrf = ""
        self.sent = 0
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def ask(self, method, path, body=None, **headers):
        """Send a request; a header that is given as None is left out."""
        sent = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie}
        if method == "POST":
            sent |= {
                "Content-Type": "application/json",
                "Origin": f"http://127.0.0.1:{self.port}",
                "X-CSRF-Token": self.csrf,
            }
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes | None) else json.dumps(body, ensure_ascii=False).encode()
        for attempt in range(2):  # a connection that idled may have been closed
            try:
                self.connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
                for name, value in sent.items():
                    if value is not None:
                        self.connection.putheader(name, value)
                if content is not None and "Content-Length" not in sent:
                    self.connection.putheader("Content-Length", str(len(content)))
                self.connection.endheaders(content)
                return Answer(self.connection.getresponse())
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self.connection.close()
                if attempt:
                    raise
        raise AssertionError

    def get(self, path, **headers):
        return self.ask("GET", path, **headers)

    def post(self, path, body=None, **headers):
        return self.ask("POST", path, {} if body is None else body, **headers)

    def shown(self, item=None):
        """What a page says of the item that it shows."""
        item = item or self.get("/api/next").json["item"]
        return {"item": item["id"], "assignment": item["assignment"]}

    def label(self, answer, item=None, /, **more):
        """Send a label of the item that is shown, as a page does."""
        self.sent += 1
        body = {"nonce": f"label-{self.sent:06}", **self.shown(item), "answer": answer, "seconds": 2.5}
        return self.post("/api/label", {**body, "comment": "", "flags": [], **more})

    def join(self, token):
        answer = self.post("/api/join", {"token": token})
        if answer.status == 200:
            self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
            self.csrf = self.get("/api/me").json["csrf"]
        return answer


class Served:
    """A project behind a running server."""

    def __init__(self, project, *, worker=None, rules=None, allowed_hosts=(), public_url=None):
        self.project = project
        self.folder = project.folder
        access = access_of(project.folder, "127.0.0.1", allowed_hosts, public_url)
        self.app = Application(Site(project, access, worker), rules)
        self.site = self.app.site
        self.server = make_server(self.app)
        self.socket = bound("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.clients = []
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.socket])))

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.002)
        return self

    def __exit__(self, *_):
        for client in self.clients:
            client.connection.close()
        self.server.should_exit = True  # its thread ends within a moment; nobody waits for it but the session's end

    def anonymous(self):
        self.clients.append(Client(self.port))
        return self.clients[-1]

    def signed_in(self, name, role="annotator", **more):
        """A client of a new person."""
        person = self.project.add_person(name, role, **more)
        client = self.anonymous()
        client.join(self.project.invite(person.person_id))
        client.person = person
        return client


@pytest.fixture(scope="session")
def _threads():
    """Threads of servers, which have ended when the session does."""
    threads = []
    yield threads
    for thread in threads:
        thread.join()


@pytest.fixture
def served(tmp_path, _threads):
    """``served(items, **settings)`` serves a new project."""
    open_servers = []

    def serve(items=(), *, options=None, **settings):
        project = Project.create(tmp_path / f"项目{len(open_servers)}", ProjectSettings(name="标注 😀", **settings))
        project.add_items(list(items))
        server = Served(project, **(options or {})).__enter__()
        open_servers.append(server)
        _threads.append(server.thread)
        return server

    yield serve
    for server in open_servers:
        server.__exit__()
        server.project.close()


@pytest.fixture(name="pair_item")
def _pair_item():
    return pair_item


@pytest.fixture(name="until")
def _until():
    """``until(condition)`` waits for it."""

    def wait(condition):
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.01)

    return wait


@pytest.fixture
def new_worker(tmp_path):
    """``new_worker()`` is the process that writes answers, not yet started."""
    return lambda name="policy.yaml": PolicyWorker(tmp_path / name, tmp_path / "policy.log", PROGRAM)


@pytest.fixture
def policy(new_worker, until):
    """The process that writes answers, ready."""
    with new_worker() as worker:
        until(lambda: worker.is_ready)
        yield worker


@pytest.fixture
def new_client():
    """``new_client(port)`` is a browser for a server in a process of its own."""
    clients = []

    def make(port):
        clients.append(Client(port))
        return clients[-1]

    yield make
    for client in clients:
        client.connection.close()
