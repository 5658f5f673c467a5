"""Projects of formats 1 and 2, which had a journal and a database with the same events: both become one database, once.

Both files are kept beside it, in `OLD`. Events keep their numbers. In the old format, journal.jsonl has one event per line of
JSON, with its CRC-32 as the last key ``crc`` (format 1 has none); labels.sqlite has the same lines, and a table ``desk`` with
leases, drafts, invitations and sessions.
"""

import contextlib
import json
import re
import sqlite3
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from heedful.display import say
from heedful.errors import DataError
from heedful.label.records import Event
from heedful.label.settings_file import raise_format
from heedful.label.state import NewerError, State
from heedful.label.store import DATABASE, open_to_read, row_of, write_database

JOURNAL = "journal.jsonl"
OLD_DATABASE = "labels.sqlite"
OLD = "older-heedful"
"""The folder in which the old files are kept."""
CHECKSUM = re.compile(r',"crc":"([0-9a-f]{8})"}\Z')


def is_old(folder: Path) -> bool:
    """True if a project has files of the old format and no database of this one."""
    return not (folder / DATABASE).exists() and any((folder / name).is_file() for name in (JOURNAL, OLD_DATABASE))


def migrate(folder: Path) -> None:
    """Make the database of a project of the old format, set its files aside, and say so; a project of this format stays.

    Raises DataError, and changes nothing, if an event is damaged in both files, or if a newer heedful wrote one.
    """
    if is_old(folder):
        state, leases = read_old(folder)
        raise_format(folder)  # first: an older heedful refuses the project from here on
        write_database(folder / DATABASE, [row_of(event) for event in state.events], leases)
        say(
            f"{folder}: an older heedful wrote this project; its {state.seq} events are now in {DATABASE}, and the old files "
            f"in {OLD}/"
        )
    for path in (folder / JOURNAL, *folder.glob(f"{OLD_DATABASE}*")):
        if path.is_file():
            (folder / OLD).mkdir(mode=0o700, exist_ok=True)
            path.replace(folder / OLD / path.name)


def read_old(folder: Path) -> tuple[State, list[Any]]:
    """Return the state of a project of the old format, and the rows of its leases. Raises DataError as `migrate`."""
    stored, leases = _read_database(folder / OLD_DATABASE)
    events = _sound_events(stored) | _sound_events(_lines(folder / JOURNAL))
    state = State()
    for seq in range(1, max(events, default=0) + 1):
        if seq not in events:
            raise DataError(
                f"{folder}: event {seq} is damaged in both {JOURNAL} and {OLD_DATABASE}; run `heedful label rebuild "
                f"{folder}` with the older heedful that wrote the project, which says what is lost, then open it again"
            )
        try:
            state.apply(events[seq])
        except NewerError as error:
            raise NewerError(f"{folder / JOURNAL}: {error}") from error
    return state, leases


def _lines(path: Path) -> list[str]:
    content = path.read_bytes() if path.is_file() else b""
    return content[: content.rfind(b"\n") + 1].decode(errors="replace").split("\n")[:-1]


def _read_database(path: Path) -> tuple[list[str], list[Any]]:
    """The lines and the leases of an old database, as far as they can be read."""
    lines: list[str] = []
    leases: list[Any] = []
    if path.is_file():
        unreadable = contextlib.suppress(sqlite3.DatabaseError, DataError, OSError)
        with unreadable, contextlib.closing(open_to_read(path)) as database:
            leases = database.execute("SELECT kind, key, value, until FROM desk").fetchall()
            lines.extend(line for (line,) in database.execute("SELECT line FROM events ORDER BY seq"))
    return lines, leases


def _sound_events(lines: Iterable[str]) -> dict[int, Event]:
    """The events of lines that are not damaged, by their numbers."""
    found: dict[int, Event] = {}
    for line in lines:
        given = CHECKSUM.search(line, max(0, len(line) - 20))
        text = line if given is None else line[: given.start()] + "}"
        if given is not None and f"{zlib.crc32(text.encode()):08x}" != given[1]:
            continue
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            event = Event(**json.loads(text))
            if type(event.seq) is int and isinstance(event.content, dict):
                found[event.seq] = event
    return found
