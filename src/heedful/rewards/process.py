"""A reward function in a process of its own, which is ended if it hangs, crashes, or takes too much memory."""

import contextlib
import copy
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from heedful.configs.scoring import RewardOptions
from heedful.errors import ConfigError, RewardError
from heedful.rewards.returned import Elsewhere, OneScore, Problem, ResultError
from heedful.rewards.worker import BY_SIGNAL, LENGTH, OUT_OF_MEMORY

START = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from heedful.rewards.worker import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""
"""The program of a guard, which finds the same modules as this process."""
LONGEST_START = 60.0
"""Seconds that importing a file may take at least, however short the timeout of a call is."""
LEAST_SHARE = 2.0
"""Seconds that a call with a part of the responses has at least, or the whole timeout if that is shorter."""
LONGEST_END = 10.0
"""Seconds to wait for the end of a process that was told to end."""
MOST_BYTES = 1 << 28
"""The longest answer that is read."""
PIECE = 1 << 20


class CallError(Exception):
    """A call of a reward function that gave no scores. The text says why; it follows the reward's name."""


class FunctionProcess(Elsewhere):
    """The function of ``python:FILE.py:FUNCTION`` or ``rule:NAME:ARGUMENT``, called in a process that is kept between calls.

    Its process starts with it, and again at the call after one that ended it. All of it ends with this object, or with the
    program that holds it, however that ends. Random generators are seeded before each call by its arguments.

    Args:
        spec: the reward as a string.
        limits: ``function_timeout`` and ``reward_memory_gb``.

    Raises ConfigError if there is no such function, and RewardError if its file cannot be imported.
    """

    def __init__(self, spec: str, limits: RewardOptions) -> None:
        self.timeout = limits.function_timeout
        self._worker = _Worker(spec, limits)
        self.__signature__ = self._worker.start()
        self.files = self._worker.files
        """The files of code that its own file has imported; those of installed packages are not among them."""

    def __call__(self, **arguments: Any) -> list[OneScore | Problem]:
        """Call the function. Raises CallError if it raises, takes too long or does not survive, and ResultError."""
        answer = json.loads(self._worker.ask(arguments, self.timeout))
        if "raised" in answer:
            raise CallError(answer["raised"])
        if "wrong" in answer:
            raise ResultError(answer["wrong"])
        return [Problem(score) if isinstance(score, str) else score for score in answer["scores"]]

    def for_share(self, share: float) -> "FunctionProcess":
        """The same function in the same process, with this share of the time, for a part of the responses of a call."""
        other = copy.copy(self)
        other.timeout = max(self.timeout * share, min(self.timeout, LEAST_SHARE))
        return other

    def stop(self) -> None:
        """End the process; a further call starts another."""
        self._worker.end()

    close = stop


class _Worker:
    """The other end of `heedful.rewards.worker`."""

    _channel: socket.socket
    files: tuple[str, ...]
    """What the function's file has imported, as `heedful.rewards.worker.imported_files` tells it."""

    def __init__(self, spec: str, limits: RewardOptions) -> None:
        self.spec, self.limits = spec, limits
        self._guard: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    def start(self) -> inspect.Signature:
        """Start the process and load the function. Returns its signature."""
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-P",
            "-c",
            START,
            str(theirs.fileno()),
            str(int(self.limits.reward_memory_gb * 1e9)),
        ]
        with theirs:
            self._guard = subprocess.Popen(
                [*command, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for heedful, which then ends it
            )
        self._channel = ours
        self._finalizer = weakref.finalize(self, _end, self._guard, ours)
        try:
            answer = json.loads(self._exchange(self.spec, max(self.limits.function_timeout, LONGEST_START)))
        except CallError as error:
            raise RewardError(f"--rewards: {self.spec} cannot be loaded: its file {error}") from error
        if "refused" in answer:
            self.end()
            raise {"ConfigError": ConfigError, "RewardError": RewardError}[answer["refused"]](answer["because"])
        self.files = tuple(answer["files"])
        return inspect.Signature(
            [
                inspect.Parameter(
                    name,
                    getattr(inspect.Parameter, kind),
                    default=None if has_default else inspect.Parameter.empty,
                )
                for name, kind, has_default in answer["parameters"]
            ]
        )

    def ask(self, arguments: dict[str, Any], timeout: float) -> bytes:
        """The worker's answer. Raises CallError."""
        with self._one_at_a_time:
            if self._guard is not None and self._guard.poll() is not None:  # it died between two calls
                self.end()
            if self._guard is None:
                self.start()
            return self._exchange(arguments, timeout)

    def end(self) -> None:
        """End the process with all that it started."""
        if self._guard is not None:
            self._finalizer()
            self._guard = None

    def _exchange(self, request: Any, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        try:
            content = pickle.dumps(request)
            self._send(len(content).to_bytes(LENGTH, "big") + content, deadline)
            size = int.from_bytes(self._receive(LENGTH, deadline), "big")
            if size > MOST_BYTES:
                raise RewardError(f"reward {self.spec} returned {size} bytes, more than {MOST_BYTES}")
            return self._receive(size, deadline)
        except TimeoutError:
            self.end()
            raise CallError(
                f"did not end within {timeout:.3g} s and was stopped; if it needs longer, raise --reward-timeout "
                f"{self.limits.function_timeout:g} (the time for all responses of a step; a part of them has its share)"
            ) from None
        except (EOFError, ConnectionError):
            raise CallError(self._ending()) from None
        except BaseException:  # Ctrl-C, say: the answer that comes now belongs to no call
            self.end()
            raise

    def _send(self, content: bytes, deadline: float) -> None:
        rest = memoryview(content)
        while rest:
            self._channel.settimeout(_left(deadline))
            rest = rest[self._channel.send(rest[:PIECE]) :]

    def _receive(self, count: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < count:
            self._channel.settimeout(_left(deadline))
            piece = self._channel.recv(min(count - len(content), PIECE))
            if not piece:
                raise EOFError
            content += piece
        return bytes(content)

    def _ending(self) -> str:
        """What became of a worker that closed its end, by the status of its guard."""
        assert self._guard is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(LONGEST_END)
        status = self._guard.returncode
        self.end()
        if status == OUT_OF_MEMORY:
            return (
                f"held more than --reward-memory-gb {self.limits.reward_memory_gb:g} and was stopped; raise it if it needs "
                "more"
            )
        if status is not None and BY_SIGNAL < status < OUT_OF_MEMORY:
            return f"crashed: its process was ended by {signal.Signals(status - BY_SIGNAL).name}"
        return f"ended its process (exit status {status}{' or above' if status == BY_SIGNAL else ''})"


def _left(deadline: float) -> float:
    """Seconds up to a deadline. Raises TimeoutError behind it."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _end(guard: "subprocess.Popen[bytes]", channel: socket.socket) -> None:
    """Tell a guard to end its worker, and wait until it has."""
    channel.close()
    assert guard.stdin is not None
    guard.stdin.close()
    try:
        guard.wait(LONGEST_END)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.kill(guard.pid, signal.SIGKILL)
        guard.wait()
