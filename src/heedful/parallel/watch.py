"""A thread that ends this process if another rank is lost while its main thread stands in a sum that NCCL never completes.

Gloo says at once that a connection is gone. NCCL's sums are kernels: the main thread waits for the GPU, and neither hears of
the loss nor can be woken. So each rank shows in the store (`heedful.parallel.roll_call`) that it lives, and looks whether
another one has failed or has died. If one has, and the main thread does not notice by itself, the process ends here, with a
message that names the rank.
"""

import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from heedful.display import harmless
from heedful.parallel import roll_call

LOOK = 1.0
"""Seconds between two looks."""
PATIENCE = 20
"""Looks for which the main thread stands still, after another rank is lost, before the process ends. torchrun kills ranks 30
seconds after it has asked them to end."""
SILENCE = 120
"""Looks without a sign of life after which a rank of another machine counts as dead. One of this machine is asked for by its
process id."""


class Watch(threading.Thread):
    """The thread. It ends with the process, with `stop`, or once this rank itself has said that it leaves.

    Args:
        store: a connection of its own, as the main thread may wait in another.
        rank: this one, which looks at the one before it, and at what all say.
        size: how many there are.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(name="heedful-watch", daemon=True)
        self.store, self.rank, self.size = store, rank, size
        self.neighbour = (rank - 1) % size
        self._ended = threading.Event()
        self._beats = 0
        self._theirs: dict[str, Any] = {}
        self._silent = 0
        self._without_store = 0
        self._machine = [socket.gethostname(), os.getppid()]
        self._show()  # whoever dies before the first look is missed too

    def run(self) -> None:
        still, stood = 0, None
        while not self._ended.wait(LOOK):
            found = self._loss()
            if found is None:
                still = 0
                continue
            if self._get(f"left/{self.rank}") is not None:
                return  # the main thread knows
            stands = _where_the_main_thread_is()
            still, stood = still + 1 if stands == stood else 0, stands
            if still >= PATIENCE:
                self._end_process(*found)

    def stop(self) -> None:
        """This rank ends well; the one that looks at it need not miss it."""
        self._ended.set()
        self._put(f"beat/{self.rank}", {"done": True})

    def _loss(self) -> tuple[str, int] | None:
        """What has become of another rank, and the exit status for it; None if all is well. It shows that this one lives."""
        if not self._show():
            self._without_store += 1
            gone = "the store of the ranks is gone: rank 0, or its machine, has died"
            return (gone, 4) if self._without_store > PATIENCE else None
        self._without_store = 0
        said = self._get("failed")
        if said is not None and said["rank"] != self.rank:
            return said["text"], said["status"]
        theirs = self._get(f"beat/{self.neighbour}")
        self._silent = 0 if theirs != self._theirs else self._silent + 1
        self._theirs = theirs or {}
        if theirs is None or theirs.get("done") or self._get(f"left/{self.neighbour}") is not None:
            return None
        if theirs["machine"] == self._machine and _is_dead(theirs["pid"]):
            why = "its process is gone"
        elif self._silent > SILENCE:
            why = f"no sign of life for {self._silent * LOOK:.0f} s"
        else:
            return None
        found = {"rank": self.neighbour, "text": f"rank {self.neighbour} of {self.size} has died ({why})", "status": 4}
        self._put("failed", found)  # for those that do not look at it
        return found["text"], found["status"]  # type: ignore[return-value]  # as written above

    def _show(self) -> bool:
        """Show that this rank lives. False if the store is not there."""
        self._beats += 1
        return self._put(f"beat/{self.rank}", {"beats": self._beats, "pid": os.getpid(), "machine": self._machine})

    def _end_process(self, text: str, status: int) -> None:
        """Say why, unless another rank does, and end. Nothing can be saved: the GPU is in the midst of a sum."""
        roll_call.go_on_with(self.store, silent=self.neighbour)
        roll_call.report(None)
        if roll_call.speaks():
            who = f"rank {self.rank}: " if self.rank else ""
            print(f"heedful: {who}RankError: {harmless(text)}", file=sys.stderr, flush=True)
        roll_call.end()
        os._exit(status)

    def _put(self, key: str, value: dict[str, Any]) -> bool:
        try:
            self.store.set(key, json.dumps(value))
        except RuntimeError:
            return False
        return True

    def _get(self, key: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.store.get(key)) if self.store.check([key]) else None
        except RuntimeError:
            return None


def start(rank: int, size: int) -> Watch:
    """Watch the other ranks from now on."""
    watch = Watch(roll_call.another_connection(), rank, size)
    watch.start()
    return watch


def _where_the_main_thread_is() -> tuple[int, int] | None:
    """Its innermost frame, and the instruction there; None if it has ended."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)


def _is_dead(pid: int) -> bool:
    """Whether a process of this machine is gone, or has ended and is not waited for."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
            in "ZX"
        )
    except OSError:
        return Path("/proc/self/stat").exists()
