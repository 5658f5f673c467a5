"""``heedful watch``: the page of ``heedful report`` on this machine, made anew when a file of the runs has changed."""

import contextlib
import errno
import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from heedful.apps.report.inspector import Tokenizers
from heedful.apps.report.page import build_page
from heedful.apps.report.runs import read_runs
from heedful.configs.report import ReportConfig, WatchConfig
from heedful.display import Screen, harmless
from heedful.errors import ConfigError, HeedfulError
from heedful.hosts import host_refusal

HOST = "127.0.0.1"
READ = ("metrics.jsonl", "samples.jsonl", "alarms.jsonl", "config.yaml", "environment.json", "summary.json")
"""Files of a run whose changes make the page anew, besides rollouts/."""
SECONDS = 3.0
"""At least so long a page is kept, whatever changes: a run may log many steps a second."""
TIMES = 10.0
"""At least so many times as long as it took to make it, so that training keeps the processor."""
WAIT_SECONDS = 30.0
"""For a request to arrive."""


@dataclass(frozen=True)
class ThisMachine:
    """The server answers to the names of this machine's loopback only."""

    hosts: tuple[str, ...] = ()
    any_address: bool = False


@dataclass
class Watched:
    """Runs, and the page about them as it was last made."""

    config: ReportConfig
    tokenizers: Tokenizers = field(default_factory=Tokenizers)
    made: float = 0.0
    took: float = 0.0
    """Seconds that making it took."""
    known: str = ""
    page: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def version(self) -> str:
        """What tells the files as they are now from those that the page was made of."""
        if self.known and time.monotonic() - self.made < max(SECONDS, TIMES * self.took):
            return self.known
        return version_of([Path(run) for run in self.config.runs])

    def current(self) -> str:
        """The page, made anew if a file has changed. Raises CheckpointError and DataError."""
        with self._lock:
            version = self.version()
            if version != self.known:
                began = time.monotonic()
                runs = read_runs([Path(run) for run in self.config.runs])
                self.page, _ = build_page(runs, self.config, self.tokenizers, version=version)
                self.known, self.made = version, time.monotonic()
                self.took = self.made - began
            return self.page


def version_of(runs: Sequence[Path]) -> str:
    """A sum of the sizes and times of what the page is made of."""
    paths = [path for run in runs for path in (*(run / name for name in READ), *sorted(run.glob("rollouts/*.parquet")))]
    facts = []
    for path in paths:
        with contextlib.suppress(OSError):
            state = path.stat()
            facts.append(f"{path} {state.st_size} {state.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def watch(config: WatchConfig) -> None:
    """Serve the page until Ctrl-C. Files of the runs are only read.

    Raises ConfigError if the port is taken, CheckpointError or DataError if a folder is no run or is damaged.
    """
    settings = ReportConfig(runs=config.runs, responses=config.responses, seed=config.seed)
    watched = Watched(settings)
    with bound(config.port, watched) as server:
        watched.current()
        Screen(soft_wrap=True).print(
            harmless(f"http://{HOST}:{server.server_port} shows {', '.join(config.runs)}; Ctrl-C ends it"),
            markup=False,
            highlight=False,
        )
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def bound(port: int, watched: Watched) -> ThreadingHTTPServer:
    """Return a server that listens at a port of this machine. Raises ConfigError."""

    class Answer(Handler):
        page = watched

    try:
        server = ThreadingHTTPServer((HOST, port), Answer)
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened at ({error.strerror})"
        raise ConfigError(f"--port {port} {why}; choose another, or --port 0 for a free one") from error
    server.daemon_threads = True
    return server


class Handler(BaseHTTPRequestHandler):
    """Answers with the page, or with the version of its files."""

    page: Watched
    timeout = WAIT_SECONDS
    server_version, sys_version = "heedful", ""

    def do_GET(self) -> None:
        """The page at /, the version at /version; all else is not there."""
        refusal = host_refusal({name.lower(): value for name, value in self.headers.items()}, ThisMachine())
        if refusal is not None:
            self._answer(*refusal)
            return
        try:
            if self.path == "/version":
                self._answer(200, self.page.version())
            elif self.path == "/":
                self._answer(200, self.page.current(), "text/html")
            else:
                self._answer(404, "there is only the page at /")
        except (HeedfulError, OSError) as error:  # a file was damaged or removed since
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{type(error).__name__}: {error}")

    def _answer(self, status: int, content: str, kind: str = "text/plain") -> None:
        body = content.encode("utf-8", "backslashreplace")
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Refresh"] = "3"  # seconds: the run may be started anew
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""
