"""The journal of a project: one event per line of JSON, only ever appended to, on the disk before anybody is told.

Each line ends with a checksum, the key ``crc``: the CRC-32 of the line without that key, as eight hexadecimal digits. Lines
without it, which older versions wrote, are read too.
"""

import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heedful.errors import DataError
from heedful.faults import hit
from heedful.files import sync
from heedful.label.identity import to_line
from heedful.label.records import Event
from heedful.label.state import NewerError, State

JOURNAL = "journal.jsonl"
CHECKSUM = re.compile(r',"crc":"([0-9a-f]{8})"}\Z')
"""The end of a line. No line without a checksum ends so, because its last key is another."""


def event_line(event: Event) -> str:
    """Return an event as it is in the journal and in the database. Raises DataError for what JSON cannot hold."""
    line = to_line({name: getattr(event, name) for name in Event.__dataclass_fields__})
    return f'{line[:-1]},"crc":"{_checksum(line)}"}}'


def read_event(line: str) -> Event:
    """Return the event of a line. Raises DataError for anything else, and if the line's checksum is not its own."""
    given = CHECKSUM.search(line, max(0, len(line) - 20))
    if given is not None:
        line = line[: given.start()] + "}"
        if _checksum(line) != given[1]:
            raise DataError("the line was damaged: its checksum is not that of its text")
    try:
        fields: Any = json.loads(line)
        event = Event(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"not an event of a labelling project: {error}") from error
    if type(event.seq) is not int or not isinstance(event.content, dict):
        raise DataError("not an event of a labelling project: its number or its content is none")
    return event


def _checksum(line: str) -> str:
    return f"{zlib.crc32(line.encode()):08x}"


def remedy(path: Path) -> str:
    """Return what to do about a damaged line of a journal."""
    return (
        f"run `heedful label rebuild {path.parent}`: it puts damaged lines aside, takes from the database what they held, "
        "and keeps all others"
    )


def read_lines(path: Path, offset: int = 0, before: int = 0) -> tuple[list[str], int]:
    """Return the whole lines of a journal from a byte offset, and the offset behind them.

    A last line without its end is left out. ``before`` is how many lines come before the offset. Raises DataError for bytes
    that are no text.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return [], offset
    whole = content[: content.rfind(b"\n") + 1]
    try:
        lines = whole.decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        number = before + whole[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{number}: not UTF-8 text; the line was damaged; {remedy(path)}") from error
    return lines, offset + len(whole)


def advance(state: State, lines: Sequence[str], path: Path) -> None:
    """Apply the next lines of a journal to a state. Raises DataError, naming the line, for one that cannot be next."""
    for line in lines:
        place = f"{path}:{state.seq + 1}"
        try:
            state.apply(read_event(line))
        except NewerError as error:
            raise DataError(f"{place}: {error}") from error
        except DataError as error:
            raise DataError(f"{place}: {error}; {remedy(path)}") from error


class Journal:
    """An open journal. What `append` returned from is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines, self._end = read_lines(path)
        """The lines that were there; whoever has read them may empty the list."""
        self.count = len(self.lines)
        """How many lines are on the disk."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(self._file).st_size > self._end:  # the last line was cut by a crash; nobody was told of it
                os.ftruncate(self._file, self._end)
            os.fsync(self._file)
            sync(path.parent)
        except OSError:
            os.close(self._file)
            raise

    def append(self, lines: Sequence[str]) -> None:
        """Write lines to the end and to the disk. After an OSError nothing of them is there."""
        content = memoryview("".join(f"{line}\n" for line in lines).encode())
        size = len(content)
        try:
            os.lseek(self._file, self._end, os.SEEK_SET)
            _write(self._file, content[: size // 2])
            hit("label.half")
            _write(self._file, content[size // 2 :])
            hit("label.written")
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += size
        self.count += len(lines)

    def close(self) -> None:
        """Close the file. A second time does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _write(file: int, content: memoryview) -> None:
    while content:
        content = content[os.write(file, content) :]
