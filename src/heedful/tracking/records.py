"""The lines of a run's metrics.jsonl that a tracker has not had yet."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from heedful.files import read_record


class Place(NamedTuple):
    """Where a line stands: its step, and which of the step's lines it is (training is 0, an evaluation may be 1).

    A run that goes on from a checkpoint writes some lines again, at other bytes of the file but at the same places, so
    that places tell what a tracker has.
    """

    step: int
    line: int


START = Place(-1, -1)
"""Before everything."""


@dataclass(frozen=True)
class Record:
    """One line of metrics.jsonl."""

    place: Place
    metrics: dict[str, float]
    """NaN where the file has null, for a number that was not finite."""
    milliseconds: int = field(default_factory=lambda: int(time.time() * 1000))
    """When it was read: the same however often it is sent."""


class Records:
    """Reads the lines behind a place, as they are written. A last line without its line feed is left for later.

    Args:
        path: metrics.jsonl.
        sent: the last place that a tracker has.
    """

    def __init__(self, path: Path, sent: Place) -> None:
        self._path, self._sent, self._offset, self._last = path, sent, 0, START

    def read(self, most: int) -> list[Record]:
        """The next lines, at most so many; none if there are none yet."""
        records: list[Record] = []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while len(records) < most and (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                record = self._parse(line)
                if record is not None and record.place > self._sent:
                    records.append(record)
        return records

    def _parse(self, line: bytes) -> Record | None:
        content = read_record(line)
        step = None if content is None else content.pop("step", None)
        if content is None or not isinstance(step, int):
            return None  # a line torn by a kill, which the run that goes on cuts off
        self._last = Place(step, self._last.line + 1 if step == self._last.step else 0)
        return Record(self._last, {name: math.nan if x is None else float(x) for name, x in content.items()})


def count(path: Path, upto: Place | None = None) -> int:
    """How many records a file has, or how many up to a place."""
    return sum(upto is None or record.place <= upto for record in Records(path, START).read(1 << 62))
