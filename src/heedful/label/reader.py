"""A project as readers see it, from its journal only: they need no lock, no database, and no right to write."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from heedful.errors import ConfigError
from heedful.label.desk import Desk
from heedful.label.journal import JOURNAL, advance, read_lines
from heedful.label.state import State

T = TypeVar("T")


class Reader:
    """Reads what a store has written, also while it writes. Stands where a `Store` does, but changes nothing."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self.path = folder / JOURNAL
        self.time_of_day = clock
        self._lock = threading.Lock()
        self._begin()
        self._catch_up()

    def do(self, _work: Callable[[Any], Any]) -> NoReturn:
        """Refuse to change anything. Raises ConfigError."""
        raise ConfigError(
            f"the project {self.path.parent} was opened to read only; open it without read_only to change it"
        )

    def look(self, work: Callable[[State, Desk, float], T]) -> T:
        """Return what a function finds in the events that the journal has by now."""
        with self._lock:
            self._catch_up()
            return work(self._state, Desk(), self.time_of_day())

    def close(self) -> None:
        """Nothing is open."""

    def _begin(self) -> None:
        self._state = State()
        self._offset = 0

    def _catch_up(self) -> None:
        if self.path.is_file() and self.path.stat().st_size < self._offset:
            self._begin()  # another journal was put in its place
        lines, self._offset = read_lines(self.path, self._offset, self._state.seq)
        advance(self._state, lines, self.path)
