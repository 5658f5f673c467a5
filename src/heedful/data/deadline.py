"""A time limit for work in pure Python that might never end, such as rendering a template that somebody else wrote."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

TICK = 0.25
"""Seconds between two looks of the watching thread."""


class TimeUpError(Exception):
    """The work took longer than its time limit."""


class TimeLimit:
    """Ends work by raising `TimeUpError` in the thread that does it, between two of its Python instructions.

    Work that ends in time costs a few microseconds. A thread that watches is started when there is work, and ends when there
    is none. It counts its own ticks, so a process that is stopped for a while, or waits for a busy machine, loses no time.

    Args:
        seconds: the most that a piece of work may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._ticks_left: dict[int, int] = {}
        self._watched = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._ticks_left[thread] = max(1, round(self.seconds / TICK))
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="heedful-time-limit", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                if self._ticks_left.pop(thread) == 0:  # raised just as the work ended: it must not hit what comes next
                    _raise_in(thread, None)

    def _watch(self) -> None:
        while True:
            time.sleep(TICK)
            with self._lock:
                if not self._ticks_left:
                    self._watched = False
                    return
                for thread, left in self._ticks_left.items():
                    if left > 0:
                        self._ticks_left[thread] = left - 1
                    if left == 1:
                        _raise_in(thread, TimeUpError)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread as soon as it runs; None takes back one that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
