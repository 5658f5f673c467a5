"""The processes that score, as the one that started them sees them: whichever dies is started again."""

import contextlib
import json
import math
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from heedful import errors
from heedful.display import harmless, say
from heedful.serving.channel import READY, receive, send
from heedful.serving.process import FrontProcess

PAUSE_SECONDS = 2.0
"""The least time from one start of a worker to the next. It doubles with every start that fails."""
LONGEST_PAUSE = 300.0
"""The most seconds between two starts of a worker."""
END_SECONDS = 1.0
"""How long workers have to end by themselves. They have nothing to finish."""
SAME_SCORE = 1e-3
"""How far a worker's score of the sample may be from that of the worker whose place it takes: both have one model."""


@dataclass
class Worker:
    """The place of a worker, in which one process follows another.

    Args:
        number: from 1.
        order: what each of its processes is told.
    """

    number: int
    order: bytes
    process: "subprocess.Popen[bytes] | None" = None
    life: socket.socket = field(init=False)
    """Says that the process is ready; each side sees by it that the other has ended."""
    channel: socket.socket | None = None
    """Where it takes requests, until the process that receives them has this end."""
    started: float = -math.inf
    failures: int = 0
    """Starts that failed, in a row."""
    about: dict[str, Any] | None = None
    """What its first process said of itself."""
    is_ready: bool = False

    @property
    def due(self) -> float:
        """When its next process may be started."""
        return self.started + min(PAUSE_SECONDS * 2**self.failures, LONGEST_PAUSE)

    def start(self, program: str) -> None:
        """Start a process."""
        self.started = time.monotonic()
        self.life, life = socket.socketpair()
        self.channel, channel = socket.socketpair()
        with life, channel:
            descriptors = (life.fileno(), channel.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}{descriptors}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                process_group=0,
            )
        send(self.life, 0, self.order)

    def hear(self, front: FrontProcess) -> errors.HeedfulError | str | None:
        """Receive what its process says, and let it have requests if it is ready.

        Returns why it was not ready, or how it ended after that.
        """
        assert self.channel is not None or self.is_ready
        message = receive(self.life)
        if message is None:
            was_ready, ending = self.is_ready, self._ending()
            self.end()
            return ending if was_ready else errors.MachineError(f"{ending} while it loaded the model")
        status, content = message
        said = json.loads(content)
        if status == READY:
            self.about = self.about or said
            if _is_same(said["score"], self.about["score"]):
                assert self.channel is not None
                front.add(self.channel)
                self.channel, self.failures, self.is_ready = None, 0, True
                return None
            said = {
                "kind": "CheckpointError",
                "text": "the model scores otherwise than when the server was started, so its files have changed; put them "
                "back, or start the server anew",
            }
        self.end()
        problem: errors.HeedfulError = getattr(errors, said["kind"])(said["text"])
        return problem

    def end(self) -> None:
        """End its process at once."""
        self.is_ready = False
        if self.process is None:
            return
        self.life.close()
        if self.channel is not None:
            self.channel.close()
        self.process.kill()
        self.process.wait()
        self.process = None

    def _ending(self) -> str:
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        status = self.process.poll()
        if status is not None and status < 0:
            return f"worker {self.number} was ended by {signal.Signals(-status).name}"
        return f"worker {self.number} ended by itself, with status {status}"


class Workers:
    """Processes that score side by side; used as a context.

    Each has a process group of its own, so Ctrl-C in a terminal does not reach it. All end with the context, and with the
    process that made them, however that one ends.

    Args:
        program: Python that ends in the name of what each runs: a function of the file descriptors of its life and of its
            channel.
        orders: what each is told.
    """

    def __init__(self, program: str, orders: Sequence[bytes]) -> None:
        self.program = program
        self.all = [Worker(number, order) for number, order in enumerate(orders, 1)]

    def __enter__(self) -> "Workers":
        return self

    def start(self, front: FrontProcess) -> list[dict[str, Any]]:
        """Start all, and return what they say of themselves. The first is ready before the others start.

        So a model that cannot be loaded is loaded, or downloaded, only once. Raises HeedfulError.
        """
        for group in (self.all[:1], self.all[1:]):
            for worker in group:
                worker.start(self.program)
            while loading := [worker for worker in group if not worker.is_ready]:
                for worker in _with_news(loading):
                    problem = worker.hear(front)
                    if isinstance(problem, errors.HeedfulError):
                        raise self._explained(problem)
        return [worker.about for worker in self.all if worker.about is not None]

    def keep(self, front: FrontProcess) -> None:
        """Start workers again that die, forever.

        Raises OSError if the process that receives requests dies, HeedfulError if no worker can be started any more.
        """
        while True:
            for worker in self.all:
                if worker.process is None and worker.due <= time.monotonic():
                    worker.start(self.program)
            missing = [worker.due for worker in self.all if worker.process is None]
            running = [worker for worker in self.all if worker.process is not None]
            for worker in _with_news(running, front, min(missing, default=None)):
                self._follow(worker, front)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = [(worker, worker.process) for worker in self.all if worker.process is not None]
        try:
            for worker, _ in running:
                worker.life.close()
            deadline = time.monotonic() + END_SECONDS
            with contextlib.suppress(subprocess.TimeoutExpired):
                for _, process in running:
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for worker, _ in running:
                worker.end()

    def _follow(self, worker: Worker, front: FrontProcess) -> None:
        was_ready = worker.is_ready
        problem = worker.hear(front)
        if problem is None:
            say(f"worker {worker.number} scores again")
            return
        if was_ready:
            say(f"{problem}; another takes its place")
            return
        assert isinstance(problem, errors.HeedfulError)
        worker.failures += 1
        if all(other.failures for other in self.all):
            raise self._explained(problem)
        say(harmless(f"worker {worker.number} is not back: {problem}"))

    def _explained(self, problem: errors.HeedfulError) -> errors.HeedfulError:
        if isinstance(problem, errors.MachineError | errors.MemoryFullError) and len(self.all) > 1:
            return type(problem)(
                f"{problem}; each of --workers {len(self.all)} holds a copy of the model: if memory is short, lower it"
            )
        return problem


def _is_same(score: float | None, earlier: float | None) -> bool:
    if score is None or earlier is None:
        return score is earlier
    return math.isclose(score, earlier, rel_tol=SAME_SCORE, abs_tol=SAME_SCORE)


def _with_news(
    workers: Sequence[Worker], front: FrontProcess | None = None, until: float | None = None
) -> list[Worker]:
    """Wait until workers say something or die, or a time has come. Raises OSError if the front dies."""
    by_socket = {worker.life: worker for worker in workers}
    sockets = [*by_socket, *([] if front is None else [front.control])]
    seconds = None if until is None else max(0.0, until - time.monotonic())
    ready, _, _ = select.select(sockets, [], [], seconds)
    if front is not None and front.control in ready:
        raise front.died()
    return [by_socket[one] for one in ready]
