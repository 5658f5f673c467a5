"""A user's function in a process of its own, which is ended if it hangs, crashes, or takes too much memory.

The process is a plain ``python``: one of `multiprocessing`, or of a pool of them, would run the user's main script again
before it could call the function. It answers one call after the other over a pipe: a request is a pickle of heedful's own
data, an answer is JSON, which can only be data. The second half of this file is what it runs; it loads no torch.
"""

import asyncio
import contextlib
import faulthandler
import inspect
import json
import multiprocessing
import os
import random
import signal
import site
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from heedful import user_code
from heedful.configs.scoring import RewardOptions
from heedful.errors import ConfigError, HeedfulError, RewardError
from heedful.rewards.mathematics import make_verifier
from heedful.rewards.results import CallError, OneScore, Problem, Remote, ResultError, RewardFunction, read_scores
from heedful.rewards.rules import make_rule

START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from heedful.rewards.functions import serve
serve(int(sys.argv[2]), int(sys.argv[3]))
"""
"""The program of the process, which finds the same modules as this one."""
LONGEST_START = 60.0
"""Seconds that importing a file may take at least, however short the timeout of a call is."""
LEAST_SHARE = 2.0
"""Seconds that a call with a part of the responses has at least, or the whole timeout if that is shorter."""
INTERVAL = 0.1
"""Seconds between two looks at the memory of a process that works, and, in it, at whether heedful is still there."""
SPARE = 5.0
"""Seconds after its time is up at which a process ends itself, if nobody has."""


class FunctionProcess(Remote):
    """The function of ``python:FILE.py:FUNCTION`` or ``rule:NAME:ARGUMENT``, called in a process that is kept between calls.

    Its process starts with it, and again at the call after one that ended it. The process, with what it started, ends with
    this object, or with the program that holds it. Random generators are seeded before each call by its arguments.

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
        """Call the function. Raises CallError if it raises, takes too long or does not survive, and ResultError."""
        return self._call(self.limits.function_timeout, **arguments)

    def for_share(self, share: float) -> RewardFunction:
        """The same function in the same process, with this share of the time, for a part of the responses of a call."""
        timeout = self.limits.function_timeout
        return partial(self._call, max(timeout * share, min(timeout, LEAST_SHARE)))

    def stop(self) -> None:
        """End the process; a further call starts another."""
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
        self._channel, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,  # the terminal is the user's
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for heedful, which then ends it
            )
        self._kill = weakref.finalize(self, _kill, self._process)
        try:
            answer = self._ask(self.spec, max(self.limits.function_timeout, LONGEST_START))
        except CallError as error:
            raise RewardError(f"--rewards: {self.spec} cannot be loaded: its file {error}") from error
        if "refused" in answer:
            self._kill()
            raise {"ConfigError": ConfigError, "RewardError": RewardError}[answer["refused"]](answer["because"])
        self.files = tuple(answer["files"])
        """The files of code that its own file has imported; those of installed packages are not among them."""
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
                    raise EOFError  # something that it started holds its end of the channel
                if time.monotonic() > deadline:
                    raise CallError(
                        f"did not end within {timeout:.3g} s and was stopped; if it needs longer, raise --reward-timeout "
                        f"{self.limits.function_timeout:g} (the time for all responses of a step; a part of them has its "
                        "share)"
                    )
                pids = [self._process.pid, *_descendants(self._process.pid)]
                if _resident(pids) > memory and _resident(pids, shared=True) > memory:
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
        """What became of a process that closed its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._kill()
        status = self._process.returncode
        if status < 0:
            return f"crashed: its process was ended by {signal.Signals(-status).name}"
        return f"ended its process (exit status {status})"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and what it started, and wait for it."""
    _kill_all(process.pid)
    process.wait()


def _kill_all(leader: int) -> None:
    """Kill a process group and its leader's descendants. What has left both, as a daemon does, stays."""
    for kill, pid in (*((os.kill, pid) for pid in _descendants(leader)), (os.killpg, leader)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """A process's children and theirs; none where the system has no /proc."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # this thread ended meanwhile: the others may have children too
                children += map(int, (task / "children").read_text().split())
    return children + [deeper for child in children for deeper in _descendants(child)]


def _resident(pids: list[int], *, shared: bool = False) -> int:
    """Bytes of memory that processes hold; with ``shared``, pages are divided by those who share them, which is slower."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            if shared:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
            else:
                pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
                total += int(pages) * os.sysconf("SC_PAGE_SIZE")
    return total


# What the process runs ------------------------------------------------------------------------------------------------


def serve(channel: int, heedful: int) -> None:
    """Load the function that the first request names, then call it for each further one, until heedful closes the channel.

    Args:
        channel: descriptor of the pipe for requests and answers.
        heedful: id of the process that asks, without which this one ends.
    """
    import resource  # which not every system has

    requests = Connection(channel)
    threading.Thread(target=_end_with, args=(heedful,), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # if the machine runs out of memory, this process is the one to end
        Path("/proc/self/oom_score_adj").write_text("1000")
    me = os.getpid()
    spec, timeout = requests.recv()
    try:
        with _ended_after(timeout):
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
        with _ended_after(timeout):
            answer = _called(function, arguments, spec)
        if os.getpid() != me:  # the function forked, and the child came back as well
            os._exit(0)


def _end_with(heedful: int) -> None:
    """End this process and what it started once heedful's process has gone."""
    while os.getppid() == heedful:
        time.sleep(INTERVAL)
    _kill_all(os.getpid())


@contextlib.contextmanager
def _ended_after(timeout: float) -> Iterator[None]:
    """End this process if the body takes longer than heedful waits for it. Nothing else can if heedful has gone and the body
    holds the interpreter."""
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(timeout + SPARE, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _called(function: Callable[..., Any], arguments: dict[str, Any], spec: str) -> dict[str, Any]:
    """Call the function with random generators that depend only on the arguments: the same responses, the same scores."""
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
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the function raised them, nobody else
        return {"raised": f"raised {user_code.describe(error, spec)}"}
    finally:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the function, say
            sys.stdout.flush()


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``python:FILE.py:FUNCTION``, ``rule:NAME:ARGUMENT`` or ``verify:math`` names.

    Raises ConfigError or RewardError.
    """
    kind, _, rest = spec.partition(":")
    if kind == "rule":
        return make_rule(rest)
    if kind == "verify":
        return make_verifier(rest)
    function: Callable[..., Any] = user_code.load("--rewards", spec, RewardError)
    return function


def imported_files() -> list[str]:
    """The files of the modules that this process has imported, but for Python's own, installed packages, heedful, and the
    files that rewards name."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).resolve().parents[1])}
    roots = [Path(folder).resolve() for folder in installed]
    modules = {name: module for name, module in sys.modules.copy().items() if not name.startswith(user_code.MODULE)}
    files = {Path(file).resolve() for module in modules.values() if (file := getattr(module, "__file__", None))}
    return sorted(str(file) for file in files if not any(file.is_relative_to(root) for root in roots))
