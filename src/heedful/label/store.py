"""The store of a project: a SQLite database and a journal with the same events, written by one thread of one process.

Every operation is done by the writer thread. Operations that wait at the same time share one transaction and one append to
the journal; each caller goes on when both are on the disk. If that fails, all of them get the error; whoever
sends the same thing again, with the same nonce, has it recorded once.
"""

import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from heedful.errors import ConfigError, DataError, HeedfulError, MachineError
from heedful.faults import hit
from heedful.label.desk import Desk
from heedful.label.journal import JOURNAL, Journal, advance, event_line, read_event, remedy
from heedful.label.records import Event
from heedful.label.state import State

T = TypeVar("T")
DATABASE = "labels.sqlite"
MOST_AT_ONCE = 256
"""Most operations of one transaction."""
BUSY_SECONDS = 5.0
"""How long to wait for another program, such as a backup, that has locked the database."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY, line TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS desk (
    kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, until REAL, PRIMARY KEY (kind, key)
) STRICT;
"""
"""``events`` has what the journal has. ``desk`` has what is not kept for ever: leases, drafts, invitations, sessions."""


def iso(seconds: float) -> str:
    """Return a time as UTC, ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def steady() -> Callable[[], float]:
    """Return a clock that begins with the time of day and then runs on evenly, whatever the system's clock is set to.

    Time for which the machine sleeps counts.
    """
    began, ticks = time.time(), _ticks()
    return lambda: began + _ticks() - ticks


def _ticks() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Transaction:
    """What an operation sees and changes. An operation checks first and changes last.

    ``now`` is what leases, sessions and invitations end by; ``at`` is the time of day for events, None for that of ``now``.
    """

    def __init__(self, state: State, desk: Desk, now: float, at: str | None = None) -> None:
        self.state = state
        self.desk = desk
        self.now = now
        self.at = at
        self.lines: list[tuple[int, str]] = []

    def add(self, kind: Any, person: str | None, content: Mapping[str, Any], nonce: str | None = None) -> Event:
        """Append an event and return it as it will be read back."""
        seq = self.state.seq + 1
        line = event_line(Event(seq, uuid.uuid4().hex, self.at or iso(self.now), person, kind, content, nonce))
        event = read_event(line)
        self.state.apply(event)
        self.lines.append((seq, line))
        return event


@dataclass
class _Waiting:
    work: Callable[[Transaction], Any]
    done: "Future[Any]"


class Store:
    """An open store. `do` runs operations in the writer thread, `look` reads. Raises what `open_database` raises."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.time_of_day = clock
        self._clock = steady() if clock is time.time else clock
        self._lock = threading.Lock()
        """Held while the state changes and until that is on the disk."""
        self._gate = threading.Lock()
        """Held for a moment to join the queue, so that nobody joins it after its end."""
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._journal = Journal(folder / JOURNAL)
        try:
            self._database = open_database(folder / DATABASE)
            try:
                _make_equal(self._database, self._journal, folder)
                self._reload()
            except sqlite3.DatabaseError as error:
                self._database.close()
                raise database_error(error, folder / DATABASE) from error
            except BaseException:
                self._database.close()
                raise
        except BaseException:
            self._journal.close()
            raise
        self._journal.lines = []
        self._closed = False
        self._thread = threading.Thread(target=self._write_for_ever, name="label-store", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[Transaction], T]) -> T:
        """Run an operation and return what it returns, once all that it changed is on the disk.

        Raises what the operation raises, and MachineError if the disk does not take it.
        """
        waiting = _Waiting(work, Future())
        with self._gate:
            if self._closed:
                raise ConfigError(f"the project {self.folder} is closed")
            self._queue.put(waiting)
        result: T = waiting.done.result()
        return result

    def look(self, work: Callable[[State, Desk, float], T]) -> T:
        """Return what a function finds in the state. It sees no operation half done, and changes nothing."""
        with self._lock:
            if not self._is_sound:
                try:
                    self._reload()
                except (sqlite3.DatabaseError, OSError) as error:
                    raise _as_ours(error, self.folder) from error
            return work(self._state, self._desk, self._clock())

    def close(self) -> None:
        """Finish what is waiting and close the files. A second time does nothing."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        self._database.close()
        self._journal.close()

    def _reload(self) -> None:
        """Read everything from the database."""
        self._is_sound = False
        state, desk = State(), Desk()
        lines = [line for (line,) in self._database.execute("SELECT line FROM events ORDER BY seq")]
        advance(state, lines, self.folder / JOURNAL)  # which has the same lines, or is about to get them
        for kind, key, value, until in self._database.execute("SELECT kind, key, value, until FROM desk"):
            desk.load(kind, key, value, until)
        self._state, self._desk = state, desk
        self._behind = lines[self._journal.count :]
        """Lines that are in the database and not yet in the journal, because it could not be written."""
        self._is_sound = True

    def _write_for_ever(self) -> None:
        while True:
            batch: list[_Waiting] = []
            first = self._queue.get()
            if first is None:
                return
            batch.append(first)
            ends = False
            while len(batch) < MOST_AT_ONCE and not self._queue.empty():
                one = self._queue.get()
                if one is None:
                    ends = True
                    break
                batch.append(one)
            with self._lock:
                answers = self._write(batch)
            for tell in answers:
                tell()
            if ends:
                return

    def _write(self, batch: list[_Waiting]) -> list[Callable[[], None]]:
        """Do a batch of operations; return what tells their callers."""
        while True:
            answers: list[Callable[[], None]] = []
            try:
                if not self._is_sound:
                    self._reload()
                transaction = Transaction(self._state, self._desk, self._clock(), iso(self.time_of_day()))
                self._desk.tell_time(transaction.now)
                for waiting in batch:
                    changes = (len(transaction.lines), len(self._desk.changes))
                    try:
                        result = waiting.work(transaction)
                    except Exception as error:
                        if changes != (len(transaction.lines), len(self._desk.changes)):
                            raise _HalfDoneError(waiting, error) from error
                        answers.append(_failing(waiting, error))
                    else:
                        answers.append(_succeeding(waiting, result))
                self._commit(transaction)
                return answers
            except _HalfDoneError as half:
                self._is_sound = False
                half.waiting.done.set_exception(half.error)
                batch = [waiting for waiting in batch if waiting is not half.waiting]
            except Exception as error:
                failure = _as_ours(error, self.folder)
                self._is_sound = False
                return [_failing(waiting, failure) for waiting in batch]

    def _commit(self, transaction: Transaction) -> None:
        desk = self._desk.take_changes()
        if transaction.lines or desk:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany("INSERT INTO events VALUES (?, ?)", transaction.lines)
                for (kind, key), row in desk.items():
                    self._database.execute("DELETE FROM desk WHERE kind = ? AND key = ?", (kind, key))
                    if row is not None:
                        self._database.execute("INSERT INTO desk VALUES (?, ?, ?, ?)", (kind, key, *row.columns()))
                hit("label.began")
            self._behind += [line for _, line in transaction.lines]
            hit("label.committed")
        if self._behind:
            self._journal.append(self._behind)
            self._behind = []
            hit("label.synced")


class _HalfDoneError(Exception):
    """An operation failed after it had changed something."""

    def __init__(self, waiting: _Waiting, error: Exception) -> None:
        super().__init__()
        self.waiting = waiting
        self.error = error


def _failing(waiting: _Waiting, error: Exception) -> Callable[[], None]:
    return lambda: waiting.done.set_exception(error)


def _succeeding(waiting: _Waiting, result: Any) -> Callable[[], None]:
    return lambda: waiting.done.set_result(result)


def _as_ours(error: Exception, folder: Path) -> Exception:
    """Return the error that a caller gets for one of the disk or the database."""
    if isinstance(error, sqlite3.DatabaseError):
        return database_error(error, folder / DATABASE)
    if isinstance(error, OSError) and not isinstance(error, HeedfulError):
        return MachineError(f"{folder}: {error.strerror or error}; what was sent is not confirmed, send it again later")
    return error


def database_error(error: sqlite3.DatabaseError, path: Path) -> HeedfulError:
    """Return what SQLite says, as an error that says what to do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DataError(
            f"{path} is damaged ({error}); `heedful label rebuild {path.parent}` makes it anew from {JOURNAL}"
        )
    reasons = {
        sqlite3.SQLITE_FULL: "the disk is full; make room",
        sqlite3.SQLITE_BUSY: f"another program has kept it locked for {BUSY_SECONDS:g} seconds; wait for it or end it",
        sqlite3.SQLITE_READONLY: "it cannot be written to; look at the permissions of the file and its folder",
        sqlite3.SQLITE_CANTOPEN: "it cannot be opened; look at the permissions of the file and its folder",
    }
    return MachineError(
        f"{path}: {reasons.get(code, error)} ({error}); what was sent is not confirmed, send it again later"
    )


def open_database(path: Path) -> sqlite3.Connection:
    """Open a database, made if there is none. Raises DataError if it is damaged, MachineError if it cannot be used."""
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.executescript(SCHEMA)
    except sqlite3.DatabaseError as error:
        database.close()
        raise database_error(error, path) from error
    return database


def _make_equal(database: sqlite3.Connection, journal: Journal, folder: Path) -> None:
    """Give the journal what only the database has, and the database what only the journal has.

    Raises DataError if they contradict each other, or if an event of the journal is none.
    """
    stored = [line for (line,) in database.execute("SELECT line FROM events ORDER BY seq")]
    for number, (one, other) in enumerate(zip(stored, journal.lines, strict=False), 1):
        if one != other:
            try:
                read_event(other)
            except DataError as error:
                raise DataError(f"{journal.path}:{number}: {error}; {remedy(journal.path)}") from error
            raise DataError(
                f"{folder}: event {number} differs between {DATABASE} and line {number} of {JOURNAL}; "
                f"`heedful label rebuild {folder}` makes the database anew from the journal and keeps the old one"
            )
    shared = min(len(stored), len(journal.lines))
    if len(stored) > shared:
        journal.append(stored[shared:])
    if len(journal.lines) > shared:
        advance(State(), journal.lines, journal.path)
        fill(database, journal.lines, [], begin=shared)


def fill(database: sqlite3.Connection, lines: Sequence[str], desk: Sequence[tuple], *, begin: int = 0) -> None:
    """Write the lines of a journal, from the one at index ``begin`` on, and rows of a desk into a database."""
    with database:
        database.execute("BEGIN IMMEDIATE")
        database.executemany("INSERT INTO events VALUES (?, ?)", enumerate(lines[begin:], begin + 1))
        database.executemany("INSERT INTO desk VALUES (?, ?, ?, ?)", desk)
