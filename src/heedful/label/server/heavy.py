"""What an owner asks for about everything at once (an import, an export, statistics), without stopping those who label."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def heavy() -> Iterator[None]:
    """Do work on many objects: one such work at a time, and without Python's search for unreachable objects.

    The search stops all threads, with a million objects for a second. What is there afterwards is left out of later searches.
    """
    with _ONE_AT_A_TIME:
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()
