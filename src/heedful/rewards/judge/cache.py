"""Judges' answers on disk, so that a question is paid for once. SQLite keeps it whole, whatever kills a process."""

import hashlib
import os
import sqlite3
from pathlib import Path
from types import TracebackType

from heedful.errors import ConfigError, MachineError

PURPOSE = 0x6865656A
"""SQLite's application_id of the file, by which it is known."""
PATIENCE = 30.0
"""Seconds to wait for another process that writes to the file."""


class Cache:
    """Answers by their question. Open it with ``with``, in the thread that uses it.

    Raises MachineError if the file cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "Cache":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.execute(f"PRAGMA application_id = {PURPOSE}")
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT) WITHOUT ROWID")
        except (OSError, sqlite3.Error) as error:
            raise self._error(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def get(self, question: bytes) -> str | None:
        """The answer to a question, if there was one."""
        try:
            found = self._file.execute("SELECT answer FROM answers WHERE key = ?", (question,)).fetchone()
        except sqlite3.Error as error:
            raise self._error(error) from error
        return None if found is None else str(found[0])

    def put(self, question: bytes, answer: str) -> None:
        """Keep an answer."""
        try:
            self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (question, answer))
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> MachineError:
        return MachineError(f"--judge-cache {self.path} cannot be used: {error}; name another file, or leave it out")


def question_key(url: str, body: bytes) -> bytes:
    """The key of a request: a hash of its address and of all that it holds, so of model, rubric, texts and settings."""
    return hashlib.sha256(url.encode() + b"\0" + body).digest()


def check_cache(path: Path | None) -> None:
    """Refuse a file that is no cache or cannot be written, without making one. Raises ConfigError."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--judge-cache {path} is a folder; name a file, such as {path / 'judge.sqlite'}")
    if path.exists():
        try:
            file = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=PATIENCE)
            try:
                purpose = file.execute("PRAGMA application_id").fetchone()[0]
                file.execute("SELECT 1 FROM answers LIMIT 1")
            finally:
                file.close()
        except sqlite3.Error as error:
            raise ConfigError(
                f"--judge-cache {path} holds no judges' answers, or is damaged ({error}); name another file"
            ) from error
        if purpose != PURPOSE:
            raise ConfigError(f"--judge-cache {path} is a data base of something else; name another file")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not os.access(there, os.W_OK) or (there != path and not there.is_dir()):
        raise ConfigError(f"--judge-cache {path} cannot be written: {there} forbids it; name another file")
