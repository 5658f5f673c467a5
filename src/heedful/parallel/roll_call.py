"""Who is there: how ranks find each other, and how those that are left find out who is not.

All ranks know a small key-value store, which torchrun (or, without it, rank 0) serves. A rank that leaves the run early says
so there, with its error if it has one; a rank that says nothing has died or hangs.
"""

import json
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from heedful.errors import ConfigError, RankError

GRACE = 5.0
"""Seconds that a rank waits for the others to say why a collective failed."""
LAST_WORDS = 30.0
"""Seconds that other ranks leave to rank 0 to save what was learned and say so, before their processes end."""


TRANSPORTS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "imed out")
"""What errors of torch's collectives say, if it is not said who they are of."""


class _Store:
    """The store, this rank and how many there are; nothing before `open_store`."""

    store: dist.Store | None = None
    serves = False
    """Whether the store ends with this process; torchrun's does not."""
    rank = 0
    size = 1
    silent: frozenset[int] = frozenset()
    """The ranks that have died or hang, so far as this one knows."""


def open_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT. Raises ConfigError if it is not named or cannot be reached."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port.isdigit():
        raise ConfigError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} do not say where the ranks meet; start them with torchrun "
            "--nproc-per-node N -m heedful ..., which sets both"
        )
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        found = _meet(host, int(port), size, serves=serves, timeout=timeout)
    except RuntimeError as error:
        said = "the port is taken" if "EADDRINUSE" in str(error) else "it cannot be reached in time"
        raise ConfigError(
            f"rank {rank} does not meet the others at {host}:{port}: {said} ({str(error).splitlines()[0]}); choose another "
            "port with torchrun --master-port, or let it choose one with --standalone (one machine)"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _Store.store, _Store.serves = dist.PrefixStore(f"heedful/{attempt}", found), serves
    _Store.rank, _Store.size = rank, size
    return _Store.store


def _meet(host: str, port: int, size: int, *, serves: bool, timeout: timedelta) -> dist.Store:
    """The store, once it answers. Raises RuntimeError, also if another program listens there and says nothing.

    For that, torch waits without end; so a thread waits for torch.
    """
    found: list[dist.Store | RuntimeError] = []

    def connect() -> None:
        try:
            found.append(dist.TCPStore(host, port, size, is_master=serves, timeout=timeout))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + GRACE)
    if not found:
        raise RuntimeError("another program listens there, and does not answer")
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def report(error: BaseException | None) -> None:
    """Say that this rank leaves the run, by an error or, with None, because others have left. The first report counts."""
    if _Store.store is None or _said(_Store.rank) is not None:
        return
    status = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "status", 1)
    said: dict[str, Any] = {"status": status, "error": None}
    if error is not None:
        said["error"] = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    _put(f"left/{_Store.rank}", said)
    if error is not None:
        text = f"rank {_Store.rank} of {_Store.size}: {said['error']}"
        _put("failed", {"rank": _Store.rank, "text": text, "status": status})


def another_connection() -> dist.Store:
    """The store, for another thread."""
    assert _Store.store is not None
    return _Store.store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs


def go_on_with(store: dist.Store, *, silent: int) -> None:
    """Use another connection from now on, as the main thread may wait in the first; ``silent`` is a rank that is lost."""
    _Store.store, _Store.silent = store, _Store.silent | {silent}


def lost(error: Exception) -> RankError:
    """The error to raise because a collective failed: it names the ranks that failed, or do not answer."""
    report(None)
    deadline = time.monotonic() + GRACE
    others = [number for number in range(_Store.size) if number != _Store.rank]
    while True:
        said = {number: words for number in others if (words := _said(number)) is not None}
        failed = {number: words for number, words in said.items() if words["error"] is not None}
        if failed or len(said) == len(others) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if failed:
        number, words = min(failed.items())
        return RankError(f"rank {number} of {_Store.size}: {words['error']}", status=words["status"])
    silent = [number for number in others if number not in said]
    _Store.silent = frozenset(silent)
    first_line = str(error).splitlines()[0]
    if not silent:
        return RankError(f"the ranks have lost each other, and none has failed: {first_line}")
    names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} of {_Store.size}"
    why = "hangs, or is slower than --distributed-timeout-minutes allows" if "imed out" in str(error) else "has died"
    return RankError(f"{names} {why} ({first_line})")


def all_said(kind: str) -> bool:
    """Wait a while until all ranks have reported an error. True if all errors are of this kind, which is not RankError."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        said = [_said(number) for number in range(_Store.size)]
        kinds = [str(words["error"]).partition(":")[0] for words in said if words is not None]
        if len(kinds) == _Store.size or any(other != kind for other in kinds):
            return kind != RankError.__name__ and all(other == kind for other in kinds)
        time.sleep(0.05)
    return False


def failure_elsewhere() -> tuple[str, int] | None:
    """What another rank said when it failed, and its exit status; None if none has."""
    for number in range(_Store.size if _Store.store is not None else 0):
        words = _said(number)
        if number != _Store.rank and words is not None and words["error"] is not None:
            return f"rank {number} of {_Store.size}: {words['error']}", words["status"]
    return None


def speaks() -> bool:
    """True if it is for this rank to tell the user why the run ends: no lower one does.

    Before ranks have met, that is the first of each machine.
    """
    if _Store.store is None:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and _Store.rank > 0:
        if any(_said(number) is not None for number in range(_Store.rank)):
            return False
        time.sleep(0.05)
    return True


def end() -> None:
    """Rank 0 has said its last words; the others wait until then, for a while, if it is there.

    If it serves the store, it then waits for them: one that finds no store would take it to have died.
    """
    if _Store.store is None:
        return
    if _Store.rank == 0:
        _put("ended", {})
        others = set(range(1, _Store.size)) - _Store.silent if _Store.serves else set()
        deadline = time.monotonic() + GRACE
        while any(_get(f"gone/{number}") is None for number in others) and time.monotonic() < deadline:
            time.sleep(0.02)
        return
    deadline = time.monotonic() + LAST_WORDS
    while _said(0) is not None and _get("ended") is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _put(f"gone/{_Store.rank}", {})


def _said(number: int) -> dict[str, Any] | None:
    return _get(f"left/{number}")


def _put(key: str, value: dict[str, Any]) -> None:
    assert _Store.store is not None
    try:
        _Store.store.set(key, json.dumps(value))
    except RuntimeError:  # whoever served it is gone, and with it those who would have read
        return


def _get(key: str) -> dict[str, Any] | None:
    assert _Store.store is not None
    try:
        return json.loads(_Store.store.get(key)) if _Store.store.check([key]) else None
    except RuntimeError:
        return None
