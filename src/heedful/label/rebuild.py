"""Make a project's database anew from its journal, and say how it compares with the old one."""

import dataclasses
import re
import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from heedful.errors import DataError, HeedfulError
from heedful.files import make_private, private_opener, sync, write_bytes
from heedful.label.journal import JOURNAL, Journal, advance, event_line, read_event
from heedful.label.records import Event, Person
from heedful.label.settings_file import read_settings
from heedful.label.state import NewerError, State
from heedful.label.store import DATABASE, fill, iso, open_database
from heedful.lock import FolderLock

REPLACED = "labels.replaced.sqlite"
"""Where the old database is kept if it was damaged or contradicted the journal."""
DAMAGED = "journal.damaged.jsonl"
"""Where damaged lines of the journal are put, as they were."""
BETWEEN = re.compile(rb'(?<=})[^{]?(?={"seq":)', re.DOTALL)
"""Where an event begins that is on the line of another."""
SHOWN = 20
"""Most lines that are named one by one."""
PARTS = ("", "-wal", "-shm")
"""What is added to a database's name for its files."""


def rebuild(folder: Path) -> list[str]:
    """Make labels.sqlite from journal.jsonl, and return what to tell about it.

    Damaged lines of the journal are put into `DAMAGED`; what they held is taken from the database if it has it. A database
    that is sound and equal stays as it is. Otherwise the new one takes its place; the old one is kept beside it, and leases,
    drafts, invitations and sessions are taken over if they can be read. What only a sound database has is first appended to
    the journal: it was saved, and nobody was told. Raises ConfigError if the project is open elsewhere, and DataError, with
    its line, if a newer heedful wrote it.
    """
    read_settings(folder)
    with FolderLock(folder, f"the project {folder} is open in another process ({{owner}}); end that process first"):
        old, desk, damage = _read(folder / DATABASE)
        said = _repair(folder, old, is_sound=not damage)
        journal = Journal(folder / JOURNAL)
        try:
            return said + _rebuild(folder, journal, old, desk, damage)
        finally:
            journal.close()
            make_private(folder)


@dataclass(frozen=True)
class _Line:
    """A line with an event, of the journal or the database."""

    number: int
    raw: bytes
    event: Event


@dataclass
class _Repair:
    """What becomes of a damaged journal."""

    aside: list[tuple[int, str, bytes]]
    """Lines to put aside: number, reason, and what they are."""
    lines: list[bytes] = field(default_factory=list)
    taken: int = 0
    """How many lines came from the database."""
    lost: list[int] = field(default_factory=list)
    """Numbers of events that nobody has."""
    people: list[str] = field(default_factory=list)
    """People of whom only what they did is known."""


def _repair(folder: Path, stored: Sequence[str], *, is_sound: bool) -> list[str]:
    """Put damaged lines of the journal aside, and write it anew with what the database has of them.

    Events keep their numbers. The number of one that nobody has is that of an event ``lost``; what cannot be without it, such
    as labels of a lost item, is put aside too. Returns what to tell; nothing if every line is as it should be.
    """
    path = folder / JOURNAL
    *whole, rest = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    found, aside = _sound(whole)
    is_whole = [line.raw for line in found.values()] == whole and [*found] == [*range(1, len(found) + 1)]
    found |= {seq: line for seq, line in _sound([rest], len(whole) + 1)[0].items() if seq not in found}
    copies = _sound([line.encode() for line in stored])[0]
    agrees = (
        is_sound
        and not is_whole
        and all(seq not in copies or copies[seq].raw == line.raw for seq, line in found.items())
    )
    repair = _Repair(aside)
    _merge(repair, path, found, copies, max([*found, *(copies if agrees else ())], default=0))
    if is_whole and not repair.aside:
        return []
    repair.aside.sort()
    if repair.aside:
        with open(folder / DAMAGED, "ab", opener=private_opener) as file:
            file.write(b"".join(raw + b"\n" for _, _, raw in repair.aside))
        sync(folder / DAMAGED)
    write_bytes(path, b"".join(line + b"\n" for line in repair.lines))
    sync(folder)
    return _told(repair)


def _sound(lines: Sequence[bytes], first: int = 1) -> tuple[dict[int, _Line], list[tuple[int, str, bytes]]]:
    """Lines by the number of their event, and those that are damaged, with the reason.

    Events between which only the end of the line was damaged are both sound.
    """
    found: dict[int, _Line] = {}
    damaged: list[tuple[int, str, bytes]] = []
    for number, line in enumerate(lines, first):
        for raw in [line] if _event(line) is not None else BETWEEN.split(line):
            event = _event(raw)
            if event is None:
                damaged.append((number, "the line was damaged", raw))
            elif event.seq in found:
                damaged.append((number, f"event {event.seq} is on line {found[event.seq].number} already", raw))
            else:
                found[event.seq] = _Line(number, raw, event)
    return found, damaged


def _event(raw: bytes) -> Event | None:
    try:
        return read_event(raw.decode())
    except (UnicodeDecodeError, DataError):
        return None


def _merge(repair: _Repair, path: Path, found: Mapping[int, _Line], copies: Mapping[int, _Line], last: int) -> None:
    """Go through the numbers of events, and take for each the journal's line, else the database's, else none."""
    state = State()
    nobodies = _nobodies([line.event for line in (*found.values(), *copies.values())])
    for seq in range(1, last + 1):
        line, copy = found.get(seq), copies.get(seq)
        reason = None if line is None else _refusal(state, line, path)
        if line is not None and reason is None:
            repair.lines.append(line.raw)
            continue
        if line is not None:
            repair.aside.append((line.number, reason or "", line.raw))
        if copy is not None and _refusal(state, copy, path) is None:
            repair.lines.append(copy.raw)
            repair.taken += 1
            continue
        repair.lost.append(seq)
        lost = Event(seq, uuid.uuid4().hex, iso(time.time()), None, "lost", {})
        person = next((one for one, first in nobodies.items() if first > seq and one not in state.people), None)
        if person is not None:
            repair.people.append(person)
            content = dataclasses.asdict(Person(person, person, "annotator", "removed"))
            lost = dataclasses.replace(lost, kind="person", content=content)
        state.apply(lost)
        repair.lines.append(event_line(lost).encode())


def _told(repair: _Repair) -> list[str]:
    shown = repair.aside[:SHOWN]
    said = [f"{JOURNAL}:{number}: {reason}; the line is now in {DAMAGED}" for number, reason, _ in shown]
    if len(repair.aside) > SHOWN:
        said.append(f"{len(repair.aside) - SHOWN} more lines are now in {DAMAGED}")
    if repair.taken:
        said.append(f"{repair.taken} events that {JOURNAL} lacked were taken from {DATABASE}")
    if missing := max(len(repair.lost), len(repair.aside) - repair.taken):
        numbers = ", ".join(map(str, repair.lost[:SHOWN])) or "at the end"
        said.append(f"{missing} events are lost, because {DATABASE} does not have them either: {numbers}")
    if repair.people:
        said.append(
            f"names of people are lost: {', '.join(repair.people)} stand for them, with their labels; name them on the page "
            "People, and set their standing"
        )
    return said


def _refusal(state: State, line: _Line, path: Path) -> str | None:
    """Apply the event of a line; return why it cannot be next, and None if it was applied. Raises NewerError."""
    try:
        state.apply(line.event)
    except NewerError as error:
        raise DataError(f"{path}:{line.number}: {error}") from error
    except DataError as error:
        return str(error)
    return None


def _nobodies(events: Sequence[Event]) -> dict[str, int]:
    """People who did something and whose own events are gone, with the number of the first thing that they did."""
    known = {event.content.get("person_id") for event in events if event.kind == "person"}
    first: dict[str, int] = {}
    for event in sorted(events, key=lambda one: one.seq):
        if isinstance(event.person, str) and event.person not in known:
            first.setdefault(event.person, event.seq)
    return first


def _rebuild(folder: Path, journal: Journal, old: list[str], desk: list[tuple], damage: str) -> list[str]:
    path, new, said = folder / DATABASE, folder / f".{DATABASE}.heedful-partial", []
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
        for (line,) in database.execute("SELECT line FROM events ORDER BY seq"):
            lines.append(line)  # one by one: what comes before a damaged page is kept
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
