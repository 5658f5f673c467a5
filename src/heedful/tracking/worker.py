"""The process that feeds one tracker: it follows a run's metrics.jsonl, and may hang or be killed without harm to the run.

``python -c "from heedful.tracking.worker import main; main()" ORDERS`` with `Orders` as JSON. Its standard output has lines
for the user; what the tracker's client prints goes to ``tracking/NAME.log``. The run says on standard input that it has ended
(``finished`` or ``unfinished``). If that is closed without a word, the run's process is gone.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from heedful.files import to_json
from heedful.redact import redact
from heedful.tracking.clients import CLIENTS, About, NotReadyError
from heedful.tracking.progress import Destination, Progress, identity_of
from heedful.tracking.records import Records

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # there is no lock then

POLL = 0.5
"""Seconds between two looks at metrics.jsonl."""
LONGEST_PAUSE = 60.0
"""Seconds between two tries of what failed, at most; the pauses double up to this."""
TRIES_AT_THE_END = 3
"""How often what fails is tried once the run has ended."""
SILENCE = 60.0
"""Seconds without an answer after which it is said that a tracker hangs."""


@dataclass(frozen=True)
class Orders:
    """What a worker is to do."""

    tracker: str
    run: str
    """The run's folder; empty only to ask whether the tracker can be used."""
    to: Destination
    name: str
    offline: bool
    wait: float
    """Seconds that the worker has once the run has ended."""

    @classmethod
    def from_json(cls, text: str) -> "Orders":
        """What `to_json` wrote."""
        content = json.loads(text)
        return cls(**{**content, "to": Destination(**content["to"])})

    def to_json(self) -> str:
        """As the command line has it."""
        return json.dumps(asdict(self))


class ReplacedError(Exception):
    """The run's folder holds another run."""


class Worker:
    """Feeds one tracker until the run has ended and all is sent, or its time is over."""

    def __init__(self, orders: Orders, user: IO[str]) -> None:
        self._orders, self._user = orders, user
        self._run, self._folder = Path(orders.run), Path(orders.run) / "tracking"
        self._path = self._folder / f"{orders.tracker}.json"
        self._client = CLIENTS[orders.tracker]()
        self._ended, self._finished = threading.Event(), False
        self._busy_since: float | None = None
        self._said: set[str] = set()

    def work(self) -> int:
        """Feed the tracker. Returns the exit status: 0 if it has everything."""
        threading.Thread(target=self._watch, daemon=True).start()
        self._take_over()
        self._progress = Progress.at(self._path, self._orders.to, self._orders.name)
        self._note_progress()
        failed = 0
        is_open = False
        while True:
            has_ended = self._ended.is_set()  # before the file is read: all of it is there then
            self._busy_since = time.monotonic()
            try:
                if not is_open:
                    self._open()
                    is_open = True
                sent = self._send()
                if not sent and has_ended:
                    self._close()
                    return 0
                failed = 0
            except Exception as error:
                if self._is_replaced():
                    return self._leave(is_open=is_open)
                failed += 1
                self._fail(error)
                if has_ended and failed >= TRIES_AT_THE_END:
                    return 1
                self._busy_since = None
                if has_ended:
                    time.sleep(1)
                else:
                    self._ended.wait(min(LONGEST_PAUSE, 2.0**failed))
                continue
            self._busy_since = None
            if not sent:
                self._ended.wait(POLL)

    def _take_over(self) -> None:
        """Wait until no earlier process, of a run that was killed, sends the same. All that waits meanwhile is in a file."""
        if fcntl is None:
            return
        self._lock = (self._folder / f".{self._orders.tracker}.lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def _is_replaced(self) -> bool:
        """Whether the folder holds another run by now, as after --overwrite."""
        try:
            return identity_of(self._run) != self._orders.to.run
        except OSError:  # of a network disk, say
            return False

    def _check_replaced(self) -> None:
        """Between what is read of the run and what becomes of it. Raises ReplacedError."""
        if self._is_replaced():
            raise ReplacedError

    def _leave(self, *, is_open: bool) -> int:
        """End without touching the run that has taken the folder."""
        self._say("the folder holds another run now, so nothing more of this one is sent")
        if is_open:
            with contextlib.suppress(Exception):
                self._client.close({}, self._progress.sent.step, finished=False)
        return 1

    def _note_progress(self) -> None:
        if not self._is_replaced():
            self._progress.write(self._path)

    def _open(self) -> None:
        progress, orders = self._progress, self._orders
        config = config_of(self._run)
        self._check_replaced()
        about = About(
            self._folder, orders.to.run, orders.to.project, orders.name, orders.offline, config, progress.known
        )
        self._client.open(about)
        progress.known, progress.where, progress.later = self._client.known, self._client.where, self._client.later
        self._note_progress()
        self._records = Records(self._run / "metrics.jsonl", progress.sent)
        self._unsent = self._records.read(0)
        self._say(progress.where)

    def _send(self) -> bool:
        """Send what is new, a part of it at a time. Returns whether there was anything."""
        self._unsent = self._unsent or self._records.read(self._client.most)
        self._check_replaced()
        if not self._unsent:
            return False
        self._client.send(self._unsent)
        self._progress.sent, self._unsent = self._unsent[-1].place, []
        self._note_progress()
        return True

    def _close(self) -> None:
        summary = redact(_json(self._run / "summary.json")) if self._finished else {}
        self._check_replaced()
        self._client.close(summary, self._progress.sent.step, finished=self._finished)
        self._progress.complete = True
        self._note_progress()

    def _fail(self, error: Exception) -> None:
        self._progress.failures += 1
        self._note_progress()
        kind, text = (
            type(error).__name__,
            redact(str(error)),
        )  # a client's error may repeat an address with its password
        print(f"{kind}: {text}", file=sys.stderr, flush=True)
        reason = " ".join(text.split()) or kind
        if kind not in self._said:
            self._said.add(kind)
            self._say(
                f"failed: {reason:.300} ({kind}); the run goes on without it, and what it lacks is sent again; "
                f"{self._folder / self._orders.tracker}.log has more"
            )

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the run's process is gone
            print(redact(text.replace("\n", " ")), file=self._user, flush=True)

    def _watch(self) -> None:
        """Listen to the run, say once if the tracker hangs, and end this process once its time is over."""
        deadline: float | None = None
        while True:
            if deadline is None and select.select([sys.stdin], [], [], 1.0)[0]:
                self._finished = sys.stdin.readline().strip() == "finished"
                self._ended.set()
                deadline = time.monotonic() + self._orders.wait
            elif deadline is not None:
                time.sleep(max(0.0, min(1.0, deadline - time.monotonic())))
            busy, now = self._busy_since, time.monotonic()
            if busy is not None and now - busy > SILENCE and "hangs" not in self._said:
                self._said.add("hangs")
                self._say(f"has not answered for {SILENCE:.0f} s; the run goes on without it")
            if deadline is not None and now >= deadline:
                os._exit(1)


def config_of(run: Path) -> dict[str, Any]:
    """What a tracker shows as a run's configuration: its settings, versions, and hashes of data and models; no secrets."""
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    facts = _json(run / "environment.json")
    about = {name: facts[name] for name in ("command", "versions", "revision", "data", "models") if name in facts}
    config: dict[str, Any] = redact({**settings, "heedful": about})
    return config


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def main() -> None:
    """Do what the last argument says, and exit."""
    orders = Orders.from_json(sys.argv[-1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, after which this process ends by itself
    with contextlib.suppress(OSError):
        os.nice(5)
    user = os.fdopen(os.dup(1), "w", encoding="utf-8")
    if not orders.run:
        os.dup2(2, 1)
        try:
            CLIENTS[orders.tracker]().check(offline=orders.offline)
        except NotReadyError as error:
            print(to_json({"refused": str(error)}), file=user, flush=True)
        os._exit(0)
    folder = Path(orders.run) / "tracking"
    folder.mkdir(exist_ok=True)
    log = os.open(folder / f"{orders.tracker}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = Worker(orders, user).work()
    sys.stdout.flush()
    os._exit(status)  # what a client does at the exit of its process may hang
