"""One writer per folder: a lock that the system releases at any end of its process, kill -9 included."""

import contextlib
import errno
import json
import os
import platform
import time
from pathlib import Path

from filelock import FileLock, Timeout

from heedful.errors import ConfigError
from heedful.files import to_json

LOCK = ".lock"
WAIT = 0.2
"""Seconds to try to get a lock: another process may be testing it (`is_locked`) or just releasing it."""
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""Error numbers of a file system without locks."""


class FolderLock:
    """A lock on a folder, held until `release`, the end of a ``with`` block or of the process.

    Args:
        folder: a folder that exists.
        refusal: the error's message, with ``{owner}`` for the owner; None means the message for an output folder.

    Raises ConfigError, naming the owner, if another process holds the lock. On a file system without locks,
    `keeps_others_out` is False.
    """

    def __init__(self, folder: Path, refusal: str | None = None) -> None:
        self.path = folder / LOCK
        self.keeps_others_out = True
        self._is_held = True
        self._lock = _file_lock(self.path)
        try:
            self._lock.acquire(timeout=WAIT, poll_interval=WAIT / 4)
        except Timeout:
            refusal = refusal or (
                f"--output {folder} is being written by another run ({{owner}}); wait for it, end it, or choose "
                "another folder"
            )
            raise ConfigError(refusal.replace("{owner}", owner(folder))) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.keeps_others_out = False
        facts = {"process": os.getpid(), "host": platform.node(), "since": time.time()}
        with contextlib.suppress(OSError):  # Windows, where nobody may write to a locked file
            self.path.write_text(to_json(facts), encoding="utf-8")

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._is_held:
            self._is_held = False
            with contextlib.suppress(OSError):
                self.path.unlink()
            self._lock.release()


def _file_lock(path: Path) -> FileLock:
    # filelock's fallback, a soft lock, would stay after a kill.
    return FileLock(path, thread_local=False, fallback_to_soft=False)


def is_locked(folder: Path) -> bool:
    """True if a process holds the lock of a folder, or if this process has no permission to test it."""
    if not (folder / LOCK).is_file():
        return False
    lock = _file_lock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except (Timeout, PermissionError):
        return True
    except OSError:  # no locks here
        return False
    lock.release()
    return False


def owner(folder: Path) -> str:
    """Who holds the lock of a folder, in words."""
    try:
        facts = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        minutes = max(0, round((time.time() - facts["since"]) / 60))
        return f"process {facts['process']} on {facts['host']}, for {minutes} minutes"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its process is not known"
