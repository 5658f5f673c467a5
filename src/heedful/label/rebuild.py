"""Make a project's database anew from its journal, and say how it compares with the old one."""

import sqlite3
from pathlib import Path

from heedful.errors import HeedfulError
from heedful.files import sync
from heedful.label.journal import JOURNAL, Journal, advance
from heedful.label.settings_file import read_settings
from heedful.label.state import State
from heedful.label.store import DATABASE, fill, open_database
from heedful.lock import FolderLock

REPLACED = "labels.replaced.sqlite"
"""Where the old database is kept if it was damaged or contradicted the journal."""
PARTS = ("", "-wal", "-shm")
"""What is added to a database's name for its files."""


def rebuild(folder: Path) -> list[str]:
    """Make labels.sqlite from journal.jsonl, and return what to tell about it.

    A database that is sound and equal stays as it is. Otherwise the new one takes its place; the old one is kept beside it,
    and leases, drafts, invitations and sessions are taken over if they can be read. What only a sound database has is first
    appended to the journal: it was saved, and nobody was told. Raises ConfigError if the project is open elsewhere, and
    DataError, with its line, if the journal is damaged.
    """
    read_settings(folder)
    with FolderLock(folder, f"the project {folder} is open in another process ({{owner}}); end that process first"):
        journal = Journal(folder / JOURNAL)
        try:
            return _rebuild(folder, journal)
        finally:
            journal.close()


def _rebuild(folder: Path, journal: Journal) -> list[str]:
    path, new, said = folder / DATABASE, folder / f".{DATABASE}.heedful-partial", []
    old, desk, damage = _read(path)
    lines = journal.lines
    advance(State(), lines, folder / JOURNAL)
    if not damage and len(old) > len(lines) and old[: len(lines)] == lines:
        advance(State(), old, path)
        journal.append(old[len(lines) :])
        said.append(f"{len(old) - len(lines)} events of {DATABASE} were not in {JOURNAL}, and are now")
        lines = old
    _remove(new)
    database = open_database(new)
    try:
        fill(database, lines, desk)
        database.execute("PRAGMA journal_mode = DELETE")
    finally:
        database.close()
    if not damage and old == lines and path.is_file():
        _remove(new)
        return [*said, f"{DATABASE} is sound, and equal to what {JOURNAL} gives: {len(lines)} events; nothing to do"]
    if path.is_file():
        _remove(folder / REPLACED)
        for part in PARTS:
            if Path(f"{path}{part}").is_file():
                Path(f"{path}{part}").replace(f"{folder / REPLACED}{part}")
        reason = f"was damaged ({damage})" if damage else _difference(old, lines)
        said.append(f"the old {DATABASE} {reason}; it is now {REPLACED}")
        if damage:
            what = "leases, drafts, invitations and sessions"
            lost = f"{what} could not be read, or there were none: invite people anew"
            said.append(f"{what} were taken over" if desk else lost)
    new.replace(path)
    sync(folder)
    return [*said, f"{DATABASE} was made anew from {JOURNAL}: {len(lines)} events"]


def _read(path: Path) -> tuple[list[str], list[tuple], str]:
    """The lines and the desk of a database, and what is wrong with it; an empty text if nothing is."""
    if not path.is_file():
        return [], [], ""
    lines: list[str] = []
    desk: list[tuple] = []
    try:
        database = open_database(path)
    except HeedfulError as error:
        return [], [], f"{error}".partition("; `heedful")[0]
    try:
        found = database.execute("PRAGMA integrity_check").fetchone()[0]
        desk = database.execute("SELECT kind, key, value, until FROM desk").fetchall()
        lines = [line for (line,) in database.execute("SELECT line FROM events ORDER BY seq")]
        damage = "" if found == "ok" else found
    except sqlite3.DatabaseError as error:
        damage = str(error)
    finally:
        database.close()
    return lines, desk, damage


def _difference(old: list[str], new: list[str]) -> str:
    differs = next((i for i, (a, b) in enumerate(zip(old, new, strict=False), 1) if a != b), None)
    return f"had {len(old)} of {len(new)} events" if differs is None else f"differed from event {differs} on"


def _remove(path: Path) -> None:
    for part in PARTS:
        Path(f"{path}{part}").unlink(missing_ok=True)
