"""Failure handling of ranks: a failing rank reports its error to the others; a silent one has died or hangs.

All ranks share a small key-value store, served by torchrun (or, without it, by rank 0). A rank that leaves the run
writes its error there. torchrun itself only prints which rank failed first, kills the others, and exits with 1. Here
rank 0 learns the reason and saves a checkpoint, and every rank exits with the status of the failed one.
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
"""Seconds that a rank waits for the others' error reports after a failed collective."""
LAST_WORDS = 30.0
"""Seconds that other ranks wait for rank 0 to save a checkpoint and report it, before they exit."""
TRANSPORTS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "imed out")
"""Texts by which errors of torch's collectives are recognised."""


class _Job:
    """The store, this rank and the number of ranks; empty before `open_store`."""

    store: dist.Store | None = None
    serves = False
    """Whether this process serves the store; with torchrun it does not."""
    rank = 0
    size = 1
    silent: frozenset[int] = frozenset()
    """Ranks known to have died or to hang."""


def open_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT. Raises ConfigError if the address is unset, invalid or unreachable."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port.isdigit():
        raise ConfigError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} are not a valid address of rank 0; start the ranks with torchrun "
            "--nproc-per-node N -m heedful ..., which sets both"
        )
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    found: list[dist.Store | RuntimeError] = []

    def connect() -> None:
        try:
            found.append(dist.TCPStore(host, int(port), size, is_master=serves, timeout=timeout))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)  # torch waits forever if another program listens there
    thread.start()
    thread.join(timeout.total_seconds() + GRACE)
    store = found[0] if found else RuntimeError("another program listens there and does not answer")
    if isinstance(store, RuntimeError):
        reason = "the port is taken" if "EADDRINUSE" in str(store) else "it cannot be reached in time"
        raise ConfigError(
            f"rank {rank} cannot connect to the others at {host}:{port}: {reason} ({str(store).splitlines()[0]}); choose "
            "another port with torchrun --master-port, or let it choose one with --standalone (one machine)"
        ) from store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _Job.store, _Job.serves, _Job.rank, _Job.size = dist.PrefixStore(f"heedful/{attempt}", store), serves, rank, size
    return _Job.store


def report(error: BaseException | None) -> None:
    """Report that this rank leaves the run by an error or, with None, because others left. Only the first report
    counts."""
    if _Job.store is None or _report_of(_Job.rank) is not None:
        return
    status = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "status", 1)
    text = None if error is None else f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    _put(f"left/{_Job.rank}", {"status": status, "error": text})


def lost(error: Exception) -> RankError:
    """The error to raise for a failed collective: names the ranks that failed or do not answer."""
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
    """Report that this rank stops by an error, and wait briefly: True if all ranks stop by the same error and can act
    together.

    All ranks get the same answer, unless one is so late that the others have left.
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
    """Error message and exit status of another failed rank, or None."""
    if _Job.store is None:
        return None
    return _failure(_reports([number for number in range(_Job.size) if number != _Job.rank]))


def speaks() -> bool:
    """True if this rank reports the end of the run to the user: no lower rank does.

    Before ranks are connected, it is the first rank of each machine.
    """
    if _Job.store is None:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    return _Job.rank == 0 or not _wait(GRACE, lambda: bool(_reports(range(_Job.rank))))


def end() -> None:
    """Exit order: the other ranks wait for rank 0's report, for a while, since torchrun kills all once one exits.

    If rank 0 serves the store, it then waits for them: without a store they would conclude that it died.
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
    """The error of the lowest failed rank, with its exit status."""
    failed = [(number, words) for number, words in sorted(reports.items()) if words["error"] is not None]
    return (f"rank {failed[0][0]} of {_Job.size}: {failed[0][1]['error']}", failed[0][1]["status"]) if failed else None


def _reports(numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The reports of those of the ranks that have left."""
    return {number: words for number in numbers if (words := _report_of(number)) is not None}


def _report_of(number: int) -> dict[str, Any] | None:
    return _get(f"left/{number}")


def _wait(seconds: float, is_ready: Callable[[], bool]) -> bool:
    """Wait until ``is_ready``, at most ``seconds``. Returns whether it is."""
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
    except RuntimeError:  # the store's process is gone, so nobody would read it
        return


def _get(key: str) -> dict[str, Any] | None:
    assert _Job.store is not None
    try:
        return json.loads(_Job.store.get(key)) if _Job.store.check([key]) else None
    except RuntimeError:
        return None


# Sharded models: each pass needs all ranks, so if one cannot finish it, none can --------------------------------------


class _Passes:
    """Whether this rank is in a collective pass."""

    are_open = False


@contextlib.contextmanager
def in_lockstep() -> Iterator[None]:
    """Context of passes through sharded models. After an error it stays open: the other ranks still wait."""
    _Passes.are_open = True
    yield
    _Passes.are_open = False


def others_wait() -> bool:
    """True if other ranks wait in a pass that this one has not finished, so it cannot be repeated."""
    return _Passes.are_open


def check_present(error: Exception) -> None:
    """Raises RankError if an error in a pass through sharded models was caused by another rank that left."""
    if not _Passes.are_open or not isinstance(error, RuntimeError) or isinstance(error, HeedfulError):
        return
    if any(word in str(error) for word in TRANSPORTS):
        raise lost(error) from error


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Context of passes through sharded models outside `AdaptiveMicroBatch`: RankError if another rank leaves."""
    try:
        yield
    except Exception as error:
        check_present(error)
        raise
