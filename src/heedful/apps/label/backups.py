"""Back up a project's database, also while people label, and restore a damaged one (docs/labelling-store.md)."""

import contextlib
import json
import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.apps.label.records import Event
from heedful.apps.label.settings_file import SETTINGS, read_settings
from heedful.apps.label.state import NewerError, State
from heedful.apps.label.store import (
    DATABASE,
    NOT_WRITTEN,
    Row,
    copy_database,
    damaged,
    event_of,
    iso,
    open_to_read,
    our_words,
    read_checked,
    row_of,
    write_database,
)
from heedful.configs.label import BackupConfig, RestoreConfig
from heedful.display import counted, harmless
from heedful.errors import ConfigError, DataError
from heedful.files import complete_or_absent, make_private
from heedful.lock import FolderLock

FOLDER = "backups"
KEPT = 5
"""Number of backups kept in a project."""
DAMAGED = "events.damaged.sqlite"
"""Name under which a damaged database is kept."""
RESTORING = "events.restoring.sqlite"
"""Its name during a restore: if this is killed, the damage is here, and `DAMAGED` is from an earlier restore."""
PARTS = ("", "-wal", "-shm")
"""Suffixes of a database's files."""
SHOWN = 20
"""Most lost events listed by number."""
MOST_UNREADABLE = 1000
"""Number of unreadable events in a row after which the search stops."""


def backups_of(folder: Path) -> list[Path]:
    """Return a project's own backups, the one with most events first."""
    return sorted((folder / FOLDER).glob("events-*.sqlite"), reverse=True)


def is_missing(folder: Path) -> bool:
    """True if a project's database is missing or empty, but had events before."""
    path = folder / DATABASE
    is_there = path.exists() and path.stat().st_size > 0
    return not is_there and bool(backups_of(folder) or any((folder / name).exists() for name in (DAMAGED, RESTORING)))


def refuse_missing(folder: Path) -> None:
    """Raise DataError if a project's database is gone."""
    if is_missing(folder):
        raise damaged(folder / DATABASE, "it is missing or empty, but had events")


def keep_backup(folder: Path) -> Path | None:
    """Back a project's database up into its own folder, unless its newest backup has the same events; keep the last `KEPT`.

    Backups of another history (after a restore from an older backup) get the suffix ``.other`` and are never used by default.
    Returns the backup; None if there are no events yet.
    """
    with contextlib.closing(open_to_read(folder / DATABASE)) as database, our_words(folder / DATABASE, NOT_WRITTEN):
        last = database.execute("SELECT seq, checksum FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        if last is None:
            return None
        path = folder / FOLDER / _name(*last)
        if not path.exists():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            copy_database(database, path)
        for kept in backups_of(folder):
            of_its_last = database.execute("SELECT seq, checksum FROM events WHERE seq = ?", (kept.name.split("-")[1],))
            if kept.name not in [_name(*row) for row in of_its_last]:
                kept.replace(kept.with_suffix(".other"))
    for old in backups_of(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def _name(last: int, checksum: str) -> str:
    """The name of a backup, from the number and checksum of its last event."""
    return f"events-{last:09}-{checksum[:8]}.sqlite"


def back_up(config: BackupConfig) -> Path:
    """Back up a project, also while it is served, and print the path: in its folder, or as a separate project."""
    read_settings(config.project)
    refuse_missing(config.project)
    if config.output is None:
        path = keep_backup(config.project)
        if path is None:
            raise ConfigError(f"{config.project} has no events yet, so there is nothing to back up")
    else:
        path = config.output / DATABASE
        _copy_project(config.project, config.output)
    state = read_checked(path)
    print(
        harmless(
            f"{path}: {counted(state.seq, 'event')}, {counted(len(state.labels(also_withdrawn=True)), 'label')}, all checked"
        )
    )
    return path


def _copy_project(project: Path, output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} exists and is not an empty folder; name another one")
    output.parent.mkdir(parents=True, exist_ok=True)
    with complete_or_absent(output) as partial:
        partial.chmod(0o700)
        with contextlib.closing(open_to_read(project / DATABASE)) as database:
            copy_database(database, partial / DATABASE)
        (partial / SETTINGS).write_bytes((project / SETTINGS).read_bytes())
    make_private(output)


def restore(config: RestoreConfig) -> list[str]:
    """Restore a damaged project, and print what was kept and what is lost.

    Takes the events of the newest sound backup (or of the given one), then all later ones still readable in the damaged
    database. A missing event keeps its number as an event ``lost``. The damaged file is kept.
    """
    folder = config.project
    read_settings(folder)
    refusal = f"the project {folder} is open in another process ({{owner}}); stop that process first"
    with FolderLock(folder, refusal):
        said = _restore(folder, config.backup)
        make_private(folder)
    for line in said:
        print(harmless(line))
    return said


def _restore(folder: Path, given: Path | None) -> list[str]:
    path = folder / DATABASE
    said = []
    if not path.exists() and not is_missing(folder) and given is None:
        return [f"{folder} has no events yet; nothing to do"]
    if path.exists() and not is_missing(folder):
        try:
            said.append(f"{DATABASE} is sound: {counted(read_checked(path).seq, 'event')}; nothing to do")
            _rename(folder, RESTORING, DAMAGED)  # if an earlier restore was killed before this
            return said
        except NewerError:
            raise
        except DataError as error:
            said.append(f"{error}".partition("; run `heedful")[0])
    backup, base = _sound_backup(folder, given)
    _rename(folder, DATABASE, RESTORING)
    state, rows = State(), [row_of(event) for event in base.events]
    for event in base.events:
        state.apply(event)
    if backup is not None:
        made = iso(backup.stat().st_mtime)[:19].replace("T", " ")
        said.append(f"{base.seq} events are from the backup {backup} ({made} UTC)")
    leases, gone = list[Any](), 0
    last: int | None = None
    if (folder / RESTORING).exists():
        found, last, readable = _still_readable(folder / RESTORING, base.seq)
        lost = _add(state, rows, found, max(last or 0, *found, 0))
        kept = state.seq - base.seq - len(lost)
        said.append(f"{kept} events after them were read from the damaged file, which is now {DAMAGED}")
        if lost:
            shown = ", ".join(map(str, lost[:SHOWN])) + (" ..." if len(lost) > SHOWN else "")
            said.append(f"{len(lost)} events are lost, or depend on a lost one: {shown}")
        leases = [row for row in readable if _has_its_own(state, row)]
        gone = len(readable) - len(leases)
    if last is None:
        said.append(f"events after {state.seq}, if any, are lost; their number is unknown")
    write_database(path, rows, leases)
    _rename(folder, RESTORING, DAMAGED)
    what = "leases, drafts, invitations and sessions"
    but = f", except {gone} of lost items or people" if gone else ""
    said.append(
        f"{what} were kept{but}" if leases else f"{what} are lost: invite people again (`heedful label invite`)"
    )
    labels = len(state.labels(also_withdrawn=True))
    return [*said, f"{DATABASE} has {counted(state.seq, 'event')} again, with {counted(labels, 'label')} that count"]


def _sound_backup(folder: Path, given: Path | None) -> tuple[Path | None, State]:
    """The backup to start from, and its state; damaged backups of a project are skipped."""
    if given is not None:
        path = given / DATABASE if given.is_dir() else given
        if not path.is_file():
            raise ConfigError(f"--backup {given}: there is no such file, and no {DATABASE} in a folder of that name")
        return path, read_checked(path)
    for path in backups_of(folder):
        try:
            return path, read_checked(path)
        except NewerError:
            raise
        except DataError:
            path.replace(path.with_suffix(".damaged"))
    return None, State()


def _rename(folder: Path, old: str, new: str) -> None:
    """Rename the files of a database and replace existing ones. If killed, the next call does the rest."""
    if (folder / old).exists():
        for part in PARTS:
            (folder / f"{new}{part}").unlink(missing_ok=True)
    for part in PARTS:
        if (folder / f"{old}{part}").exists():
            (folder / f"{old}{part}").replace(folder / f"{new}{part}")


def _has_its_own(state: State, row: Sequence[Any]) -> bool:
    """True if the person and the item of a lease row exist; a row without them would block assignment."""
    kind, key, value, _ = row
    try:
        match kind:
            case "lease":
                person, items = key, [json.loads(value)["item"]]
            case "draft":
                person, *items = json.loads(key)
            case _:
                person, items = json.loads(value)["person"], []
        return person in state.people and all(item in state.items for item in items)
    except (ValueError, TypeError, LookupError):  # rows have no checksums
        return False


def _still_readable(path: Path, after: int) -> tuple[dict[int, Row], int | None, list[Any]]:
    """Readable parts of a damaged database: sound event rows after a number, each read separately; the number of the last
    event, None if unknown; and the lease rows.
    """
    found: dict[int, Row] = {}
    last: int | None = None
    leases: list[Any] = []
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        seq, last_found = after, after
        while seq - last_found < MOST_UNREADABLE:
            seq += 1
            with contextlib.suppress(sqlite3.DatabaseError, DataError, ValueError):
                row = database.execute("SELECT * FROM events WHERE seq = ?", (seq,)).fetchone()
                if row is not None and event_of(row).seq == seq:
                    found[seq], last_found = row, seq
        with contextlib.suppress(sqlite3.DatabaseError):
            if database.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",):  # else it is unreliable
                (last,) = database.execute("SELECT max(seq) FROM events").fetchone()
        with contextlib.suppress(sqlite3.DatabaseError):
            leases = database.execute("SELECT * FROM leases").fetchall()
    return found, last, leases


def _add(state: State, rows: list[Row], found: Mapping[int, Row], last: int) -> list[int]:
    """Add events up to a number to a state and its rows; return the numbers of missing or inconsistent ones."""
    lost = []
    for seq in range(state.seq + 1, last + 1):
        row = found.get(seq)
        try:
            if row is not None:
                state.apply(event_of(row))
        except NewerError:
            raise
        except DataError:
            row = None
        if row is None:
            lost.append(seq)
            event = Event(seq, uuid.uuid4().hex, iso(time.time()), None, "lost", {})
            state.apply(event)
            row = row_of(event)
        rows.append(row)
    return lost
