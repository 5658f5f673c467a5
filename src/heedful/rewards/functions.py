"""Run a user's function in a process of its own, which is killed if it hangs or takes too much memory.

The process is a plain ``python``: `multiprocessing` would run the user's main script again before calling the function. It
answers one call after the other over a pipe: a request is a pickle of heedful's own data, an answer is JSON, which cannot
hold code. The second half of this file is the code of the process; it loads no torch.
"""

import asyncio
import contextlib
import inspect
import json
import os
import random
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from heedful import user_code
from heedful.configs.scoring import RewardOptions
from heedful.errors import ConfigError, HeedfulError, RewardError
from heedful.processes import (
    INTERVAL,
    LONGEST_START,
    be_the_first_to_end,
    descendants,
    end_with,
    ended_after,
    ending,
    imported_files,
    kill_group,
    resident,
    start,
)
from heedful.rewards.mathematics import make_verifier
from heedful.rewards.results import (
    CallError,
    OneScore,
    Problem,
    Remote,
    ResultError,
    RewardFunction,
    raised,
    read_scores,
)
from heedful.rewards.rules import make_rule

LEAST_SHARE = 2.0
"""Minimal timeout of a call with a part of the responses in seconds, or the whole timeout if that is shorter."""


class FunctionProcess(Remote):
    """The function of ``python:FILE.py:FUNCTION`` or ``rule:NAME:ARGUMENT``, called in a process that is kept between calls.

    The process starts with this object, and again at the next call if it has ended. It ends, with its child processes, when
    this object or heedful's process ends. Random generators are seeded before each call by its arguments.

    Args:
        spec: the reward as a string.
        limits: ``function_timeout`` and ``reward_memory_gb``.

    Raises ConfigError if there is no such function, and RewardError if its file cannot be imported.
    """

    def __init__(self, spec: str, limits: RewardOptions) -> None:
        self.spec, self.limits = spec, limits
        self._one_at_a_time = threading.Lock()
        self._start()

    def __call__(self, **arguments: Any) -> list[OneScore | Problem]:
        """Call the function. Raises CallError if it raises, takes too long or crashes, and ResultError for a wrong result."""
        return self._call(self.limits.function_timeout, **arguments)

    def for_share(self, share: float) -> RewardFunction:
        """The same function in the same process with this share of the timeout, for a part of the responses."""
        timeout = self.limits.function_timeout
        return partial(self._call, max(timeout * share, min(timeout, LEAST_SHARE)))

    def stop(self) -> None:
        """End the process; the next call starts another."""
        self._kill()

    close = stop

    def _call(self, timeout: float, /, **arguments: Any) -> list[OneScore | Problem]:
        with self._one_at_a_time:
            if self._process.poll() is not None:  # it was stopped, or died between two calls
                self._kill()
                self._start()
            answer = self._ask(arguments, timeout)
        if "raised" in answer:
            raise CallError(answer["raised"])
        if "wrong" in answer:
            raise ResultError(answer["wrong"])
        return [Problem(score) if isinstance(score, str) else score for score in answer["scores"]]

    def _start(self) -> None:
        """Start the process and load the function."""
        self._process, self._channel = start(__name__)
        self._kill = weakref.finalize(self, _kill, self._process)
        try:
            answer = self._ask(self.spec, max(self.limits.function_timeout, LONGEST_START))
        except CallError as error:
            raise RewardError(f"--rewards: {self.spec} cannot be loaded: its file {error}") from error
        if "refused" in answer:
            self._kill()
            raise {"ConfigError": ConfigError, "RewardError": RewardError}[answer["refused"]](answer["because"])
        self.files = tuple(answer["files"])
        """The files of code imported by its own file, without installed packages."""
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    name, getattr(inspect.Parameter, kind), default=None if has_default else inspect._empty
                )
                for name, kind, has_default in answer["parameters"]
            ]
        )

    def _ask(self, request: Any, timeout: float) -> dict[str, Any]:
        """The answer to a request. Raises CallError, after which the process has ended."""
        deadline, memory = time.monotonic() + timeout, self.limits.reward_memory_gb * 1e9
        try:
            self._channel.send((request, timeout))
            while not self._channel.poll(INTERVAL):
                if self._process.poll() is not None and not self._channel.poll():
                    raise EOFError  # one of its child processes holds its end of the channel
                if time.monotonic() > deadline:
                    raise CallError(
                        f"did not end within {timeout:.3g} s and was stopped; if it needs longer, raise --reward-timeout "
                        f"{self.limits.function_timeout:g} (the time for all responses of a step; a part of them gets its "
                        "share)"
                    )
                pids = [self._process.pid, *descendants(self._process.pid)]
                if resident(pids) > memory and resident(pids, shared=True) > memory:
                    raise CallError(
                        f"held more than --reward-memory-gb {self.limits.reward_memory_gb:g} and was stopped; raise it if it "
                        "needs more"
                    )
            answer: dict[str, Any] = json.loads(self._channel.recv_bytes())
            return answer
        except (EOFError, ConnectionError):
            raise CallError(self._ending()) from None
        except BaseException:  # Ctrl-C, say: the answer that comes now belongs to no call
            self._kill()
            raise

    def _ending(self) -> str:
        """How a process ended that closed its end of the channel."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._kill()
        return ending(self._process.returncode)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its descendants, and wait for it."""
    kill_group(process.pid)
    process.wait()


# The code of the process ----------------------------------------------------------------------------------------------


def serve(channel: int, heedful: int) -> None:
    """Load the function named by the first request, then call it for each further one, until heedful closes the channel.

    Args:
        channel: descriptor of the pipe for requests and answers.
        heedful: id of heedful's process; this process ends with it.
    """
    requests = Connection(channel)
    threading.Thread(target=end_with, args=(heedful,), daemon=True).start()
    be_the_first_to_end()
    me = os.getpid()
    spec, timeout = requests.recv()
    try:
        with ended_after(timeout):
            function = load_function(spec)
        parameters = [
            (p.name, p.kind.name, p.default is not p.empty) for p in inspect.signature(function).parameters.values()
        ]
        answer: dict[str, Any] = {"parameters": parameters, "files": imported_files()}
    except HeedfulError as error:
        answer = {"refused": type(error).__name__, "because": str(error)}
    while True:
        requests.send_bytes(json.dumps(answer).encode())
        try:
            arguments, timeout = requests.recv()
        except EOFError:
            return
        with ended_after(timeout):
            answer = _called(function, arguments)
        if os.getpid() != me:  # the function forked, and the child came back as well
            os._exit(0)


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Call the function with random generators seeded by the arguments: the same responses get the same scores."""
    seed = zlib.crc32(repr(arguments).encode(errors="backslashreplace"))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    try:
        found = function(**arguments)
        return {"scores": read_scores(asyncio.run(found) if inspect.iscoroutine(found) else found)}
    except ResultError as error:
        return {"wrong": str(error)}
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: only the function can raise them here
        return {"raised": raised(error, arguments)}
    finally:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the function, say
            sys.stdout.flush()


def load_function(spec: str) -> Callable[..., Any]:
    """The function named by ``python:FILE.py:FUNCTION``, ``rule:NAME:ARGUMENT`` or ``verify:math``.

    Raises ConfigError or RewardError.
    """
    kind, _, rest = spec.partition(":")
    if kind == "rule":
        return make_rule(rest)
    if kind == "verify":
        return make_verifier(rest)
    function: Callable[..., Any] = user_code.load("--rewards", spec, RewardError)
    return function
