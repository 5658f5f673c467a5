"""The end of a server that ends by itself (``--until-done``): everything is labelled, and a page has said so."""

import threading
import time

import uvicorn

from heedful.label.project import Project

UNSEEN_SECONDS = 60.0
"""How long it waits for a page to ask what is next: whoever labelled the last item may have closed it."""
LOOK_EVERY = 0.1


class Closing:
    """Ends a server.

    Args:
        project: what is labelled.
        seconds: how long the last label can be taken back after a page was told that nothing is left.
    """

    def __init__(self, project: Project, seconds: float) -> None:
        self.project = project
        self.seconds = seconds
        self._lock = threading.Lock()
        self._over: float | None = None
        """When everything was found labelled."""
        self._told: float | None = None
        """When a page was told."""

    def tell(self) -> float | None:
        """Return for how many seconds the last label can be taken back; None if something is left to label."""
        is_over, now = self.project.is_over(), time.monotonic()
        with self._lock:
            if not is_over:
                return None
            self._told = now if self._told is None else self._told
            return max(0.0, self.seconds - (now - self._told))

    def watch(self, server: uvicorn.Server) -> None:
        """Have a server end when it may; returns when it does."""
        while not server.should_exit:
            server.should_exit = self._has_ended()
            time.sleep(LOOK_EVERY)

    def _has_ended(self) -> bool:
        is_over, now = self.project.is_over(), time.monotonic()
        with self._lock:
            if not is_over:
                self._over = self._told = None
                return False
            self._over = now if self._over is None else self._over
            told = self._told is not None and now - self._told >= self.seconds
            return told or now - self._over >= self.seconds + UNSEEN_SECONDS
