"""Handle Ctrl-C, SIGTERM and SIGHUP: end at once, or after work that must not be interrupted."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from heedful.errors import Terminated

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def handled_signals() -> list[int]:
    """Those of `SIGNALS` that this process neither ignores nor handles outside Python."""
    return [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


ECHO = 1.0
"""Seconds within which repeats of a signal count once: a closing terminal, or a wrapper, often sends it twice."""


class Stops:
    """While it is open, a signal raises KeyboardInterrupt or `Terminated`; inside `shield`, at the end of the block.

    A second signal raises at once, even inside `shield`. With ``waits``, the first one raises only in `poll`, where all
    processes of a run raise together. Only the main thread can handle signals; in other threads, and for signals that are
    ignored or handled outside Python, nothing changes. `close` restores the former handlers.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self._previous: dict[int, Any] = {}
        self._depth = 0
        self._waiting: int | None = None
        self._raised = False
        self._last: tuple[int, float] = (0, -ECHO)

    def open(self) -> None:
        """Handle signals from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = {number: signal.signal(number, self._handle) for number in handled_signals()}

    def close(self) -> None:
        """Restore the former handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Delay a signal until the end of the block."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._waiting is not None and not self._depth and not self._raised and not self._waits:
            self._raise(self._waiting)

    def poll(self, largest: Callable[[float], float]) -> None:
        """Raise if any process of the run got a signal; ``largest`` returns the largest number over all processes."""
        if not self._waits or self._raised:
            return
        number = int(largest(self._waiting or 0))
        if number:
            self._raise(number)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._last[0] == number and now - self._last[1] < ECHO:
            return
        self._last = (number, now)
        if (self._depth or self._waits) and self._waiting is None and not self._raised:
            self._waiting = number
        else:
            self._raise(number)

    def _raise(self, number: int) -> None:
        self._raised = True
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
