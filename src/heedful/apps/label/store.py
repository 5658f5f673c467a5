"""The store of a project: one SQLite database, events.sqlite, with a row for each event and for each lease.

Event rows are only added, each with a SHA-256 of its content. Their sum (`State`) is kept in memory and read from the
database when a project is opened. One process writes (`Store`), any number of processes read (`Reader`).

Operations that wait at the same time share one transaction. Each caller returns once it is on disk (WAL, synchronous=FULL).
If writing fails, all of them get the error; a submission repeated with the same nonce is recorded once.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from heedful.apps.label.records import Event, to_line
from heedful.apps.label.state import NewerError, State
from heedful.configs.label import ProjectSettings
from heedful.errors import ConfigError, DataError, HeedfulError, MachineError
from heedful.faults import hit
from heedful.files import sync

T = TypeVar("T")
Row = tuple[int, str, str, str | None, str, str | None, str, str]
"""An event in the database: seq, event_id, at, person, kind, nonce, content (JSON), checksum."""
Operation = Callable[["Transaction"], Any]
Outcome = tuple[Any, Exception | None]
"""Result or exception of an operation."""
DATABASE = "events.sqlite"
MOST_AT_ONCE = 256
"""Most operations of one transaction."""
BUSY_SECONDS = 5.0
"""Seconds to wait while another program locks the database."""
LEASES = """
CREATE TABLE IF NOT EXISTS leases (
    kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, until REAL, PRIMARY KEY (kind, key)
) STRICT;
"""
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, event_id TEXT NOT NULL, at TEXT NOT NULL, person TEXT, kind TEXT NOT NULL,
    nonce TEXT, content TEXT NOT NULL, checksum TEXT NOT NULL
) STRICT;
CREATE TRIGGER IF NOT EXISTS events_never_change BEFORE UPDATE ON events
    BEGIN SELECT RAISE(ABORT, 'events are only ever added'); END;
CREATE TRIGGER IF NOT EXISTS events_are_never_deleted BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'events are only ever added'); END;
{LEASES}
"""


def iso(seconds: float) -> str:
    """Return a time as UTC, ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def steady() -> Callable[[], float]:
    """Return a clock that starts at the time of day and runs evenly, independent of changes to the system clock.

    It includes time in which the machine sleeps.
    """
    began, ticks = time.time(), _ticks()
    return lambda: began + _ticks() - ticks


def _ticks() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


# Events as rows


def row_of(event: Event) -> Row:
    """Return an event as a database row. Raises DataError for values that JSON cannot hold."""
    fields = (event.seq, event.event_id, event.at, event.person, event.kind, event.nonce)
    content = to_line(event.content)
    return (*fields, content, checksum_of(fields, content))


def checksum_of(fields: Sequence[Any], content: str) -> str:
    """Return the SHA-256, as 64 hexadecimal digits, of the other columns of an event: one line of JSON, and the content."""
    return hashlib.sha256(f"{to_line(fields)}\n{content}".encode()).hexdigest()


def event_of(row: Sequence[Any]) -> Event:
    """Return the event of a row. Raises DataError if the checksum does not match."""
    *fields, content, checksum = row
    if checksum_of(fields, content) != checksum:
        raise DataError(f"event {row[0]} does not match its checksum")
    seq, event_id, at, person, kind, nonce = fields
    return Event(seq, event_id, at, person, kind, json.loads(content), nonce)


def advance(state: State, database: sqlite3.Connection, path: Path) -> None:
    """Add the next events of a database to a state. Raises DataError if one is damaged or missing."""
    with our_words(path):
        try:
            for row in database.execute("SELECT * FROM events WHERE seq > ? ORDER BY seq", (state.seq,)):
                state.apply(event_of(row))
        except NewerError as error:
            raise NewerError(f"{path}: {error}") from error
        except DataError as error:
            raise damaged(path, str(error)) from error


# The database


def open_database(path: Path) -> sqlite3.Connection:
    """Open a database for writing; create it if missing. Raises DataError if it is damaged, else MachineError."""
    with our_words(path), contextlib.ExitStack() as on_failure:
        if not path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            sync(path.parent)
        database = on_failure.enter_context(contextlib.closing(_connect(path)))
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.executescript(SCHEMA)
        check_integrity(database, path)
        database.execute("DELETE FROM leases WHERE NOT json_valid(value)")  # leases have no checksums
        on_failure.pop_all()
    return database


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open an existing database read-only. Raises as `open_database`."""
    with our_words(path), contextlib.ExitStack() as on_failure:
        database = _connect(f"{path.absolute().as_uri()}?mode=ro")
        on_failure.enter_context(contextlib.closing(database))
        database.execute("SELECT count(*) FROM sqlite_schema")
        on_failure.pop_all()
    return database


def _connect(path: Path | str) -> sqlite3.Connection:
    database = sqlite3.connect(
        path, uri=isinstance(path, str), isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS
    )
    database.text_factory = lambda text: text.decode(errors="replace")  # so that the checksum detects invalid text
    return database


def check_integrity(database: sqlite3.Connection, path: Path) -> None:
    """Raise DataError if SQLite finds a file damaged."""
    (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise damaged(path, " ".join(found.split()))


def read_checked(path: Path) -> State:
    """Check a whole database and return its state. Raises DataError if it is damaged, or not a project's."""
    with contextlib.closing(open_to_read(path)) as database:
        with our_words(path):
            check_integrity(database, path)
        state = State()
        advance(state, database, path)
    return state


def damaged(path: Path, what: str) -> DataError:
    """Return the error for a database that is damaged."""
    return DataError(
        f"{path} is damaged: {what}; run `heedful label restore {path.parent}`: it combines the newest backup with all "
        "readable events, and reports losses"
    )


SEND_AGAIN = "the request is not confirmed, send it again later"
NOT_WRITTEN = "it was not written, try again later"


def in_our_words(error: Exception, path: Path, again: str = SEND_AGAIN) -> Exception:
    """Return a readable error for one of SQLite or of the system: the cause, and the fix (``again``)."""
    if isinstance(error, HeedfulError) or not isinstance(error, sqlite3.DatabaseError | OSError):
        return error
    if isinstance(error, OSError):
        return MachineError(f"{path}: {error.strerror or error}; {again}")
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged(path, str(error))
    reasons = {
        sqlite3.SQLITE_FULL: "the disk is full; make room",
        sqlite3.SQLITE_BUSY: f"another program has kept it locked for {BUSY_SECONDS:g} seconds; wait for it or stop it",
        sqlite3.SQLITE_READONLY: "it cannot be written; check the permissions of the file and its folder",
        sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check the permissions of the file and its folder",
    }
    reason = f"{reasons[code]} ({error})" if code in reasons else error
    return MachineError(f"{path}: {reason}; {again}")


@contextlib.contextmanager
def our_words(path: Path, again: str = SEND_AGAIN) -> Iterator[None]:
    """Convert errors of SQLite and of the system by `in_our_words`."""
    try:
        yield
    except (sqlite3.DatabaseError, OSError) as error:
        raise in_our_words(error, path, again) from error


def copy_database(source: sqlite3.Connection, path: Path) -> None:
    """Copy a database, also during writes; the file is complete or absent. Raises as `open_database`."""
    partial = path.with_name(f".{path.name}.heedful-partial")
    with our_words(path, NOT_WRITTEN), contextlib.ExitStack() as on_failure:
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT, 0o600))
        on_failure.callback(partial.unlink)
        with contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a -wal beside it
        sync(partial)
        partial.replace(path)
        on_failure.pop_all()
        sync(path.parent)


def write_database(path: Path, rows: Sequence[Row], leases_rows: Sequence[Sequence[Any]]) -> None:
    """Write a database from event and lease rows; the file is complete or absent. Raises as `open_database`."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.executescript(SCHEMA)
        database.execute("BEGIN")
        database.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        database.executemany("INSERT INTO leases VALUES (?, ?, ?, ?)", leases_rows)
        database.execute("COMMIT")
        copy_database(database, path)


# Temporary rows: leases on items, drafts, invitations, sessions

WITH_END = ("lease", "invitation", "session")
"""Kinds of rows with an end, which record their start."""
SLACK = 60.0
"""Seconds by which the clock may be set back without ending leases."""


@dataclass(frozen=True)
class Lease:
    """An item that a person holds."""

    item_id: str
    repeat: bool
    until: float
    """Seconds since 1970. Later the lease still holds unless somebody else has taken the item."""
    token: str = ""
    """Random, drawn when the item is given; older pages of the item have another one."""


@dataclass(frozen=True)
class LeaseRow:
    """A lease, draft, invitation or session: its content, and its end in seconds since 1970 (None: no end)."""

    value: Any
    until: float | None = None


class Leases:
    """Rows by kind (``lease``, ``draft``, ``invitation``, ``session``) and key. Changes are part of the open transaction."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self.now: float | None = None
        """Start time of new rows; None before the first `set_time`."""

    def set_time(self, now: float) -> None:
        """Set the time. If the clock was set back, rows that started in the future start now.

        So sessions and invitations keep their lifetime. Leases from the future have ended: their items can go to others, and
        a late label still counts if nobody else has the item.
        """
        is_back, self.now = self.now is None or now < self.now, now
        if not is_back:
            return
        for kind in WITH_END:
            for key, row in self.rows(kind).items():
                end, began = row.until or 0.0, row.value["from"]
                if began > now + SLACK:
                    self.put(kind, key, LeaseRow(row.value, now if kind == "lease" else now + end - began))

    def get(self, kind: str, key: str) -> LeaseRow | None:
        """Return a row, or None if there is none."""
        found = self._database.execute("SELECT value, until FROM leases WHERE kind = ? AND key = ?", (kind, key))
        row = found.fetchone()
        return None if row is None else LeaseRow(json.loads(row[0]), row[1])

    def rows(self, kind: str) -> dict[str, LeaseRow]:
        """Return the rows of a kind by key."""
        found = self._database.execute("SELECT key, value, until FROM leases WHERE kind = ? ORDER BY rowid", (kind,))
        return {key: LeaseRow(json.loads(value), until) for key, value, until in found}

    def put(self, kind: str, key: str, row: LeaseRow) -> None:
        """Set a row; one with an end records its start (``from``). Raises DataError for values that JSON cannot hold."""
        value = row.value if row.until is None else {**row.value, "from": self.now or 0.0}
        self._database.execute(
            "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", (kind, key, to_line(value), row.until)
        )

    def drop(self, kind: str, key: str) -> None:
        """Remove a row if it is there."""
        self._database.execute("DELETE FROM leases WHERE kind = ? AND key = ?", (kind, key))

    def by_person(self) -> dict[str, Lease]:
        """Return the lease of each person."""
        return {person: _lease(row) for person, row in self.rows("lease").items()}

    def of(self, person_id: str) -> Lease | None:
        """Return a person's lease, or None."""
        row = self.get("lease", person_id)
        return None if row is None else _lease(row)

    def hold(self, person_id: str, lease: Lease) -> None:
        """Set a person's lease, instead of an earlier one."""
        value = {"item": lease.item_id, "repeat": lease.repeat, "token": lease.token}
        self.put("lease", person_id, LeaseRow(value, lease.until))

    def drafts(self, person_id: str, item_id: str) -> list[dict[str, Any]]:
        """Return a person's drafts of an item, the newest last: ``tab``, number there (``save``), ``draft``."""
        row = self.get("draft", to_line([person_id, item_id]))
        return [] if row is None else list(row.value["tabs"])

    def keep_drafts(self, person_id: str, item_id: str, drafts: Sequence[Mapping[str, Any]]) -> None:
        """Replace a person's drafts of an item."""
        key = to_line([person_id, item_id])
        if drafts:
            self.put("draft", key, LeaseRow({"tabs": drafts}))
        else:
            self.drop("draft", key)


def _lease(row: LeaseRow) -> Lease:
    return Lease(row.value["item"], row.value["repeat"], float(row.until or 0), row.value.get("token", ""))


# Writing


@dataclass
class Transaction:
    """State seen and changed by an operation, or only read by a question. An operation checks first and changes last."""

    settings: ProjectSettings
    state: State
    leases: "Leases"
    now: float
    """The time for the end of leases, sessions and invitations."""
    at: str
    """The time of day, for events."""
    database: sqlite3.Connection | None = None
    """None for a question."""

    def add(self, kind: Any, person: str | None, content: Mapping[str, Any], nonce: str | None = None) -> Event:
        """Append an event and return it as it reads back."""
        assert self.database is not None
        event = Event(self.state.seq + 1, uuid.uuid4().hex, self.at, person, kind, content, nonce)
        row = row_of(event)
        self.database.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        event = dataclasses.replace(event, content=json.loads(row[6]))
        self.state.apply(event)
        return event


class _HalfDoneError(Exception):
    """An operation failed after adding an event."""


class Store:
    """An open store. `do` runs operations in one thread, `look` reads. Raises what `open_database` and `advance` raise."""

    def __init__(self, folder: Path, settings: ProjectSettings, clock: Callable[[], float] = time.time) -> None:
        self.path = folder / DATABASE
        self.settings = settings
        self.time_of_day = clock
        self._clock = steady() if clock is time.time else clock
        self._lock = threading.Lock()
        """Held while the state changes, until the change is on disk."""
        self._gate = threading.Lock()
        """Held briefly to join or empty the queue."""
        self._queue: deque[tuple[Operation, Future[Any]]] = deque()
        self._database = open_database(self.path)
        self._state: State | None = None
        """None if it must be read from the database."""
        try:
            self._sound_state()
        except BaseException:
            self._database.close()
            raise
        self._leases = Leases(self._database)
        self._writer = ThreadPoolExecutor(1, "label-store")

    def do(self, work: Callable[[Transaction], T]) -> T:
        """Run an operation and return its result once its changes are on disk.

        Raises the operation's errors, and MachineError if writing fails.
        """
        done: Future[T] = Future()
        with self._gate:
            try:
                self._writer.submit(self._write_what_waits)
            except RuntimeError as error:
                raise ConfigError(f"the project {self.path.parent} is closed") from error
            self._queue.append((work, done))
        return done.result()

    def look(self, work: Callable[[Transaction], T]) -> T:
        """Return the result of a read-only function. It never sees a half-done operation."""
        with self._lock, our_words(self.path):
            return work(self._transaction(None))

    def close(self) -> None:
        """Finish waiting operations and close the database. A second call does nothing."""
        self._writer.shutdown(wait=True)
        with contextlib.suppress(sqlite3.Error):  # already closed, or being read
            self._database.execute("PRAGMA journal_mode = DELETE")  # so that a closed project is one file
        self._database.close()

    def _sound_state(self) -> State:
        """The state, read again if the last transaction failed."""
        if self._state is None:
            state = State()
            advance(state, self._database, self.path)
            self._state = state
        return self._state

    def _transaction(self, database: sqlite3.Connection | None) -> Transaction:
        state, now, at = self._sound_state(), self._clock(), iso(self.time_of_day())
        return Transaction(self.settings, state, self._leases, now, at, database)

    def _write_what_waits(self) -> None:
        """Run the waiting operations and resolve their callers. Called once for each; the first call does them all."""
        with self._gate:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MOST_AT_ONCE))]
        with self._lock:
            outcomes = self._write([work for work, _ in batch]) if batch else []
        for (_, done), (result, error) in zip(batch, outcomes, strict=True):
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

    def _write(self, works: Sequence[Operation]) -> list[Outcome]:
        try:
            return self._commit(works)
        except _HalfDoneError as half:  # caused by a bug; run the others without it
            self._state = None
            if len(works) > 1:
                return [outcome for work in works for outcome in self._write([work])]
            return [(None, half.__cause__ if isinstance(half.__cause__, Exception) else half)]
        except Exception as error:
            self._state = None
            return [(None, in_our_words(error, self.path))] * len(works)

    def _commit(self, works: Sequence[Operation]) -> list[Outcome]:
        """Run operations in one transaction. An exception undoes only its own operation."""
        outcomes, database, time_before = list[Outcome](), self._database, self._leases.now
        database.execute("BEGIN IMMEDIATE")
        try:
            transaction = self._transaction(database)
            self._leases.set_time(transaction.now)
            for work in works:
                before = transaction.state.seq
                database.execute("SAVEPOINT operation")
                try:
                    outcomes.append((work(transaction), None))
                except sqlite3.Error:
                    raise
                except Exception as error:
                    if transaction.state.seq != before:
                        raise _HalfDoneError from error
                    outcomes.append((None, error))
                    database.execute("ROLLBACK TO operation")
                database.execute("RELEASE operation")
            hit("label.began")
            database.execute("COMMIT")
        except BaseException:
            self._leases.now = time_before  # the rollback also undoes `set_time`
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        hit("label.committed")
        return outcomes


# Reading


class Reader:
    """Reads a store's database, also during writes. Has the methods of a `Store`, but is read-only.

    Leases are not read: they belong to the writing process. A project without a database has no events yet.
    """

    def __init__(self, folder: Path, settings: ProjectSettings, clock: Callable[[], float]) -> None:
        self.path = folder / DATABASE
        self.settings = settings
        self.time_of_day = clock
        self._lock = threading.Lock()
        self._state = State()
        no_leases = sqlite3.connect(":memory:", check_same_thread=False)
        no_leases.executescript(LEASES)
        self._leases = Leases(no_leases)
        self.look(lambda _: None)

    def do(self, _work: Operation) -> NoReturn:
        """Refuse to change anything. Raises ConfigError."""
        raise ConfigError(
            f"the project {self.path.parent} was opened read-only; open it without read_only to change it"
        )

    def look(self, work: Callable[[Transaction], T]) -> T:
        """Return the result of a function on the current events of the database."""
        with self._lock:
            if self.path.exists():
                self._catch_up()
            now = self.time_of_day()
            return work(Transaction(self.settings, self._state, self._leases, now, iso(now)))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _catch_up(self) -> None:
        last = [(event.event_id,) for event in self._state.events[-1:]]
        with contextlib.closing(open_to_read(self.path)) as database:
            with our_words(self.path):
                there = database.execute("SELECT event_id FROM events WHERE seq = ?", (self._state.seq,)).fetchall()
            if there != last:  # the file was replaced
                self._state = State()
            advance(self._state, database, self.path)
