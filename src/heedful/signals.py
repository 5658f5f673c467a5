"""Requests to end, by Ctrl-C, SIGTERM or SIGHUP: at once, or as soon as what must not be cut short is done."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from heedful.errors import Terminated

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


ECHO = 1.0
"""Seconds within which the same signal counts once: a terminal that closes, or a wrapper, often sends it twice."""


class Stops:
    """While it is open, a signal raises KeyboardInterrupt or `Terminated`; inside `shield`, when that ends.

    A second signal raises at once, also inside. With ``waits``, the first one raises only in `poll`, in which all processes
    of a run raise together. Only the main thread can handle signals; in another, and for signals that are
    ignored or handled outside Python, nothing changes. The handlers that were there before are put back.
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
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, self._handle)

    def close(self) -> None:
        """Put the handlers back that were there."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Let a signal wait until this ends."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._waiting is not None and not self._depth and not self._raised and not self._waits:
            self._raise(self._waiting)

    def poll(self, largest: Callable[[float], float]) -> None:
        """Raise if a signal has come to any process of the run; ``largest`` gives the largest number of all."""
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
