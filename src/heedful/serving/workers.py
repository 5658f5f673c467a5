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
"""How long after its first failure a worker is started again. It doubles with every failure that follows."""
LONGEST_PAUSE = 300.0
"""The most seconds from a failure to the next start."""
MOST_FAILURES = 8
"""After so many failures in a row of every worker the server ends."""
LIVED_SECONDS = 60.0
"""A worker that dies sooner after it was ready has failed; one that dies later begins to count anew."""
END_SECONDS = 1.0
"""How long workers have to end by themselves. They have nothing to finish."""
SAME_SCORE = 1e-3
"""How far a worker's score of the sample may be from the first worker's, if not both compute on the CPU, where the same
model gives the same number: a GPU may add in another order."""


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
    about: dict[str, Any] | None = None
    """What its first process said of itself."""
    is_ready: bool = False
    since: float = -math.inf
    """When it was ready, or failed."""
    failures: int = 0
    """In a row: starts that failed, and deaths soon after one that did not."""
    problem: errors.HeedfulError | None = None
    """Why its last process is not there any more."""

    @property
    def due(self) -> float:
        """When its next process may be started."""
        return (
            self.since + min(PAUSE_SECONDS * 2 ** (self.failures - 1), LONGEST_PAUSE) if self.failures else self.since
        )

    @property
    def is_hopeless(self) -> bool:
        """Whether it has failed too often, or for a reason that does not pass."""
        is_lasting = isinstance(self.problem, errors.ConfigError | errors.CheckpointError)
        return not self.is_ready and (is_lasting or self.failures >= MOST_FAILURES)

    def start(self, program: str) -> None:
        """Start a process. Raises MachineError."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                self.life, life = _pair(ours, theirs)
                self.channel, channel = _pair(ours, theirs)
                descriptors = (life.fileno(), channel.fileno())
                self.process = subprocess.Popen(
                    [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}{descriptors}"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    process_group=0,
                )
            except OSError as error:
                raise errors.MachineError(f"worker {self.number} could not be started: {error}") from error
            ours.pop_all()
        send(self.life, 0, self.order)

    def fail(self, problem: errors.HeedfulError) -> None:
        """Note that its process could not be started, was not ready or has ended."""
        has_lived = self.is_ready and time.monotonic() - self.since >= LIVED_SECONDS
        self.end()
        self.since, self.failures, self.problem = time.monotonic(), 0 if has_lived else self.failures + 1, problem

    def hear(self, front: FrontProcess, first: "Worker") -> errors.HeedfulError | None:
        """Receive what its process says, and let it have requests if it is ready.

        Args:
            front: receives the requests.
            first: the worker that was ready first, which must score as this one does.

        Returns why it was not ready, or how it ended after that.
        """
        assert self.channel is not None or self.is_ready
        message = receive(self.life)
        if message is None:
            self.fail(errors.MachineError(self._ending() + ("" if self.is_ready else " while it loaded the model")))
            return self.problem
        status, content = message
        said = json.loads(content)
        if status == READY:
            self.about = self.about or said
            assert first.about is not None
            if _is_same(said, first.about):
                assert self.channel is not None
                front.add(self.channel)
                self.channel, self.is_ready, self.since = None, True, time.monotonic()
                return None
            said = {
                "kind": "CheckpointError",
                "text": "the model scores otherwise than when the server was started, so its files have changed; put them "
                "back, or start the server anew",
            }
        self.fail(getattr(errors, said["kind"])(said["text"]))
        return self.problem

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
        if status is None:
            return f"worker {self.number} closed its connections without ending"
        if status < 0:
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

        So a model that cannot be loaded is loaded, or downloaded, only once. Raises HeedfulError, and OSError if the process
        that receives requests dies.
        """
        for group in (self.all[:1], self.all[1:]):
            for worker in group:
                try:
                    worker.start(self.program)
                except errors.MachineError as error:
                    raise self._explained(error) from error
            while loading := [worker for worker in group if not worker.is_ready]:
                for worker in _with_news(loading, front):
                    problem = worker.hear(front, self.all[0])
                    if problem is not None:
                        raise self._explained(problem)
        return [worker.about for worker in self.all if worker.about is not None]

    def keep(self, front: FrontProcess) -> None:
        """Start workers again that die, forever.

        Raises OSError if the process that receives requests dies, HeedfulError if it is no use to start any worker again.
        """
        while True:
            for worker in self.all:
                if worker.process is None and worker.due <= time.monotonic():
                    self._start_again(worker)
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

    def _start_again(self, worker: Worker) -> None:
        try:
            worker.start(self.program)
        except errors.MachineError as error:
            worker.fail(error)
            self._go_on_without(worker, error)

    def _follow(self, worker: Worker, front: FrontProcess) -> None:
        was_ready = worker.is_ready
        problem = worker.hear(front, self.all[0])
        if problem is None:
            say(f"worker {worker.number} scores again")
        elif was_ready and not self._is_hopeless:
            say(f"{problem}; another takes its place")
        else:
            self._go_on_without(worker, problem)

    def _go_on_without(self, worker: Worker, problem: errors.HeedfulError) -> None:
        """Say why a worker is not back. Raises HeedfulError if it is no use to start any worker again."""
        if self._is_hopeless:
            raise self._explained(problem)
        say(harmless(f"worker {worker.number} is not back: {problem}"))

    @property
    def _is_hopeless(self) -> bool:
        return all(worker.is_hopeless for worker in self.all)

    def _explained(self, problem: errors.HeedfulError) -> errors.HeedfulError:
        if isinstance(problem, errors.MachineError | errors.MemoryFullError) and len(self.all) > 1:
            return type(problem)(
                f"{problem}; each of --workers {len(self.all)} holds a copy of the model: if memory is short, lower it"
            )
        return problem


def _pair(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    return ours.enter_context(one), theirs.enter_context(other)


def _is_same(about: dict[str, Any], first: dict[str, Any]) -> bool:
    """Whether two workers have the same model, by their scores of the sample; None is that of a model that cannot read it."""
    if about["score"] is None or first["score"] is None:
        return about["score"] is first["score"]
    tolerance = 0.0 if about["device"] == first["device"] == "cpu" else SAME_SCORE
    return math.isclose(about["score"], first["score"], rel_tol=tolerance, abs_tol=tolerance)


def _with_news(workers: Sequence[Worker], front: FrontProcess, until: float | None = None) -> list[Worker]:
    """Wait until workers say something or die, or a time has come. Raises OSError if the front dies."""
    by_socket = {worker.life: worker for worker in workers}
    seconds = None if until is None else max(0.0, until - time.monotonic())
    ready, _, _ = select.select([*by_socket, front.control], [], [], seconds)
    if front.control in ready:
        raise front.died()
    return [by_socket[one] for one in ready]
