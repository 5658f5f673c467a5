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
    is none. It counts time in which the process computes, so one that is stopped for a while, or waits for a busy machine,
    loses none. A single instruction, such as a product of huge numbers, is not interrupted, but the next one is;
    `heedful.data.template_limits` keeps a template's instructions short.

    Args:
        seconds: the most that a piece of work may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._seconds_left: dict[int, float] = {}
        self._began: dict[int, float] = {}
        self._watched = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._seconds_left[thread], self._began[thread] = self.seconds, time.monotonic()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="heedful-time-limit", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                time_is_up = self._seconds_left.pop(thread) <= 0
                if time_is_up:  # raised just as the work ended: it must not hit what comes next
                    _raise_in(thread, None)

    def _watch(self) -> None:
        seen = time.monotonic(), time.process_time()
        while True:
            time.sleep(TICK)
            now = time.monotonic(), time.process_time()
            passed, seen = min(now[0] - seen[0], now[1] - seen[1]), now
            with self._lock:
                if not self._seconds_left:
                    self._watched = False
                    return
                for thread, left in self._seconds_left.items():
                    self._seconds_left[thread] = now_left = left - min(passed, now[0] - self._began[thread])
                    if left > 0 >= now_left:
                        _raise_in(thread, TimeUpError)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread as soon as it runs; None takes back one that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
