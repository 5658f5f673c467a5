"""How the ranks of a run end together: one that fails tells the others why; one that tells nothing has died or hangs.

All ranks know a small key-value store, which torchrun (or, without it, rank 0) serves. A rank that leaves the run writes its
error there. torchrun alone tells ranks nothing of each other: it prints which failed first, ends the others, and exits with
1. Here rank 0 learns the reason, saves what was learned, and every rank exits with the status of the one that failed.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from heedful.distributed import ranks
from heedful.errors import ConfigError, HeedfulError, RankError

T = TypeVar("T")

GRACE = 5.0
"""Seconds that a rank waits for the others to tell why a collective failed."""
LAST_WORDS = 30.0
"""Seconds that other ranks leave to rank 0 to save what was learned and say so, before their processes end."""
TRANSPORTS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "imed out")
"""What errors of torch's collectives say, where they could be other errors too."""


class _Job:
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
    found: list[dist.Store | RuntimeError] = []

    def connect() -> None:
        try:
            found.append(dist.TCPStore(host, int(port), size, is_master=serves, timeout=timeout))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)  # torch waits without end if another program listens there
    thread.start()
    thread.join(timeout.total_seconds() + GRACE)
    store = found[0] if found else RuntimeError("another program listens there, and does not answer")
    if isinstance(store, RuntimeError):
        reason = "the port is taken" if "EADDRINUSE" in str(store) else "it cannot be reached in time"
        raise ConfigError(
            f"rank {rank} does not meet the others at {host}:{port}: {reason} ({str(store).splitlines()[0]}); choose another "
            "port with torchrun --master-port, or let it choose one with --standalone (one machine)"
        ) from store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _Job.store, _Job.serves, _Job.rank, _Job.size = dist.PrefixStore(f"heedful/{attempt}", store), serves, rank, size
    return _Job.store


def report(error: BaseException | None) -> None:
    """Tell that this rank leaves the run, by an error or, with None, because others have left. The first report counts."""
    if _Job.store is None or _report_of(_Job.rank) is not None:
        return
    status = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "status", 1)
    text = None if error is None else f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    _put(f"left/{_Job.rank}", {"status": status, "error": text})


def lost(error: Exception) -> RankError:
    """The error to raise because a collective failed: it names the ranks that failed, or do not answer."""
    report(None)
    others = [number for number in range(_Job.size) if number != _Job.rank]

    def all_known() -> bool:
        reports = _reports(others)
        return len(reports) == len(others) or any(words["error"] for words in reports.values())

    _wait(GRACE, all_known)
    reports = _reports(others)
    failed = _failure(reports)
    if failed is not None:
        return RankError(*failed)
    silent = [number for number in others if number not in reports]
    _Job.silent = frozenset(silent)
    first_line = str(error).splitlines()[0]
    if not silent:
        return RankError(f"lost connection between ranks; no rank reported an error: {first_line}")
    names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} of {_Job.size}"
    why = "hangs, or is slower than --distributed-timeout-minutes allows" if "imed out" in str(error) else "has died"
    return RankError(f"{names} {why} ({first_line})")


def all_stop(error: BaseException) -> bool:
    """Tell that this rank stops by an error, and wait a little: True if all others stop by the same, and can act together.

    All of them get the same answer, unless one comes so late that the others have gone.
    """
    if ranks.size() == 1 or _Passes.are_open:
        return False
    report(error)
    kind = type(error).__name__

    def kinds() -> list[str]:
        return [str(words["error"]).partition(":")[0] for words in _reports(range(_Job.size)).values()]

    _wait(GRACE, lambda: len(kinds()) == _Job.size or any(other != kind for other in kinds()))
    return kind != RankError.__name__ and kinds() == [kind] * _Job.size


def failure_elsewhere() -> tuple[str, int] | None:
    """What another rank told when it failed, and its exit status; None if none has."""
    if _Job.store is None:
        return None
    return _failure(_reports([number for number in range(_Job.size) if number != _Job.rank]))


def speaks() -> bool:
    """True if it is for this rank to tell the user why the run ends: no lower one does.

    Before ranks have met, that is the first of each machine.
    """
    if _Job.store is None:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    return _Job.rank == 0 or not _wait(GRACE, lambda: bool(_reports(range(_Job.rank))))


def end() -> None:
    """Let rank 0 say its last words: the others wait until it has, for a while, as torchrun ends all once one has ended.

    If rank 0 serves the store, it then waits for them: one that finds no store would take it to have died.
    """
    if _Job.store is None:
        return
    if _Job.rank == 0:
        _put("ended", {})
        others = set(range(1, _Job.size)) - _Job.silent if _Job.serves else set()
        _wait(GRACE, lambda: all(_get(f"gone/{number}") is not None for number in others))
        return
    if _report_of(0) is not None:
        _wait(LAST_WORDS, lambda: _get("ended") is not None)
    _put(f"gone/{_Job.rank}", {})


def _failure(reports: dict[int, dict[str, Any]]) -> tuple[str, int] | None:
    """The error of the lowest rank that has failed, with its exit status."""
    failed = [(number, words) for number, words in sorted(reports.items()) if words["error"] is not None]
    return (f"rank {failed[0][0]} of {_Job.size}: {failed[0][1]['error']}", failed[0][1]["status"]) if failed else None


def _reports(numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What those of some ranks that have left have told."""
    return {number: words for number in numbers if (words := _report_of(number)) is not None}


def _report_of(number: int) -> dict[str, Any] | None:
    return _get(f"left/{number}")


def _wait(seconds: float, is_ready: Callable[[], bool]) -> bool:
    """Wait for something, at most so long. Returns whether it has come."""
    deadline = time.monotonic() + seconds
    while not is_ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _put(key: str, value: dict[str, Any]) -> None:
    assert _Job.store is not None
    try:
        _Job.store.set(key, json.dumps(value))
    except RuntimeError:  # the process that served it is gone, and with it those who would have read
        return


def _get(key: str) -> dict[str, Any] | None:
    assert _Job.store is not None
    try:
        return json.loads(_Job.store.get(key)) if _Job.store.check([key]) else None
    except RuntimeError:
        return None


# Ranks whose models are divided: each pass needs all of them, so what one cannot finish none can ---------------------------


class _Passes:
    """Whether this rank is in the midst of passes that the others make with it."""

    are_open = False


@contextlib.contextmanager
def in_lockstep() -> Iterator[None]:
    """Around passes through divided models. After an error they stay open: the other ranks still wait."""
    _Passes.are_open = True
    yield
    _Passes.are_open = False


def others_wait() -> bool:
    """True if other ranks wait in the midst of passes that this one has not finished, and so cannot do again."""
    return _Passes.are_open


def check_present(error: Exception) -> None:
    """Raise RankError if an error in a pass through divided models is that another rank has left."""
    if not _Passes.are_open or not isinstance(error, RuntimeError) or isinstance(error, HeedfulError):
        return
    if any(word in str(error) for word in TRANSPORTS):
        raise lost(error) from error


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Around passes through divided models outside `AdaptiveMicroBatch`: RankError if another rank leaves in their midst."""
    try:
        yield
    except Exception as error:
        check_present(error)
        raise
