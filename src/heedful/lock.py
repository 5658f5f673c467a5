"""One writer per folder: a lock that the system releases when its process ends, however it ends."""

import contextlib
import errno
import json
import os
import platform
import time
from pathlib import Path

from heedful.errors import ConfigError
from heedful.files import to_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # there is no lock then

LOCK = ".lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What the system says of a lock that somebody has; anything else means that it has no locks here."""
TRIES = 4
"""A lock is tried so often, 50 ms apart: somebody may be looking at it (`is_locked`), or just letting it go."""


class FolderLock:
    """A lock on a folder, held until `release`, the end of a ``with`` block or of the process. Raises ConfigError, naming the
    owner.

    ``refusal`` is what its message says, with ``{owner}`` where the owner is named. Where there are no locks,
    `keeps_others_out` is false.
    """

    def __init__(self, folder: Path, refusal: str | None = None) -> None:
        self.path = folder / LOCK
        self.keeps_others_out = fcntl is not None
        for tries in range(1, TRIES + 1):
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            self._file: int | None = file
            if fcntl is None:
                return
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.path.exists() and os.fstat(file).st_ino == self.path.stat().st_ino:
                    break  # else the former owner has removed the file meanwhile
                os.close(file)
            except OSError as error:
                if error.errno not in HELD:  # a file system without locks
                    self.keeps_others_out = False
                    break
                os.close(file)
            if tries == TRIES:
                refusal = refusal or (
                    f"--output {folder} is being written by another run ({{owner}}); wait for it, end it, or choose "
                    "another folder"
                )
                raise ConfigError(refusal.replace("{owner}", owner(folder)))
            time.sleep(0.05)
        os.ftruncate(file, 0)
        os.write(file, to_json({"process": os.getpid(), "host": platform.node(), "since": time.time()}).encode())

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others write. A second time does nothing."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                if os.fstat(file).st_ino == self.path.stat().st_ino:
                    self.path.unlink()
            os.close(file)


def is_locked(folder: Path) -> bool:
    """True if a process holds the lock of a folder."""
    if fcntl is None or not (folder / LOCK).is_file():
        return False
    file = os.open(folder / LOCK, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in HELD
    finally:
        os.close(file)
    return False


def owner(folder: Path) -> str:
    """Who holds the lock of a folder, in words."""
    try:
        facts = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        minutes = max(0, round((time.time() - facts["since"]) / 60))
        return f"process {facts['process']} on {facts['host']}, for {minutes} minutes"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its process is not known"
