"""The processes in which a reward function runs: a worker that calls it, and a guard that ends the worker and its children.

The guard is what heedful starts (`heedful.rewards.process`). It forks the worker, and ends it with everything that it
started once heedful closes the guard's standard input or dies, the worker ends, or its memory is above the limit. Then the
guard's exit status says what became of the worker.

A request is a pickle of heedful's own data; an answer is JSON, which can only be data. Both are preceded by their length.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import pickle
import random
import select
import signal
import site
import socket
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heedful.errors import ConfigError, HeedfulError, RewardError
from heedful.rewards.mathematics import make_verifier
from heedful.rewards.returned import ResultError, read_scores
from heedful.rewards.rules import make_rule

LENGTH = 8
"""Bytes of the length before each request and answer."""
OUT_OF_MEMORY = 255
"""The guard's exit status if it ended the worker because of its memory."""
BY_SIGNAL = 128
"""Added to the number of the signal that ended the worker."""
NAMED = "heedful_reward:"
"""What the name of a module begins with that is a reward's own file."""
SECONDS = 0.1
"""Between two looks of the guard at the worker."""
SET_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's prctl."""
LONGEST_MESSAGE = 500
"""The most characters of an exception's text that are passed on."""


def main(channel: int, memory: int) -> None:
    """Fork the worker and guard it. Does not return.

    Args:
        channel: descriptor of the socket for requests and answers.
        memory: the most bytes that the worker and its children may hold.
    """
    _prctl(SET_CHILD_SUBREAPER, 1)  # whatever the worker leaves becomes the guard's child
    worker = os.fork()
    if worker == 0:
        status = 1
        try:
            _work(socket.socket(fileno=channel))
            status = 0
        finally:
            os._exit(status)
    os.close(channel)
    os._exit(_guard(worker, memory))


# The guard ------------------------------------------------------------------------------------------------------------


def _guard(worker: int, memory: int) -> int:
    """Wait for the end of the worker or of heedful, end what is left, and return the exit status."""
    heedful, status = os.getppid(), 0
    while True:
        if select.select([sys.stdin], [], [], SECONDS)[0] or os.getppid() != heedful:
            break
        ended, code = os.waitpid(worker, os.WNOHANG)
        if ended:
            status = BY_SIGNAL + os.WTERMSIG(code) if os.WIFSIGNALED(code) else min(os.WEXITSTATUS(code), BY_SIGNAL)
            break
        if _held(worker, "statm") > memory and _held(worker, "smaps_rollup") > memory:
            status = OUT_OF_MEMORY
            break
    _end(worker)
    return status


def _end(worker: int) -> None:
    """Kill the worker, its process group and whatever it started, also in sessions of their own, and wait for them."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    while True:
        for pid in [worker, *_descendants(os.getpid())]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _descendants(pid: int) -> list[int]:
    """A process's children and theirs; none where the system has no /proc."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children + [deeper for child in children for deeper in _descendants(child)]


def _held(worker: int, file: str) -> int:
    """Bytes of memory that the worker and its descendants hold: resident (statm), or with shared pages divided by those who
    share them (smaps_rollup, which is slower to read)."""
    total = 0
    for pid in [worker, *_descendants(worker)]:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{file}").read_text()
            if file == "statm":
                total += int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
            else:
                total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def _prctl(option: int, value: int) -> None:
    """Set an option of this process on Linux; nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# The worker -----------------------------------------------------------------------------------------------------------


def _work(channel: socket.socket) -> None:
    """Load the function that the first request names, then call it for each further one."""
    import resource  # which not every system has

    os.setsid()
    _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # if the machine runs out of memory, this process is the one to end
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    me = os.getpid()
    spec = pickle.loads(receive(channel))
    try:
        function = load_function(spec)
        parameters = [
            (p.name, p.kind.name, p.default is not p.empty) for p in inspect.signature(function).parameters.values()
        ]
    except HeedfulError as error:
        send(channel, json.dumps({"refused": type(error).__name__, "because": str(error)}).encode())
        return
    send(channel, json.dumps({"parameters": parameters, "files": imported_files()}).encode())
    while True:
        try:
            request = receive(channel)
        except EOFError:
            return
        answer = _called(function, pickle.loads(request), spec)
        if os.getpid() != me:  # the function forked, and the child came back as well
            os._exit(0)
        send(channel, json.dumps(answer).encode())


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
        return {"raised": f"raised {type(error).__name__}: {error!s:.{LONGEST_MESSAGE}}{_place(error, spec)}"}
    finally:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the function, say
            sys.stdout.flush()


def _place(error: BaseException, spec: str) -> str:
    """Where in the user's file an exception was raised."""
    file = str(Path(spec.partition(":")[2].rpartition(":")[0]).resolve())
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if str(Path(f.filename).resolve()) == file]
    return f" ({file}, line {lines[-1]})" if lines else ""


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``python:FILE.py:FUNCTION``, ``rule:NAME:ARGUMENT`` or ``verify:math`` names.

    Raises ConfigError or RewardError.
    """
    kind, _, rest = spec.partition(":")
    if kind == "rule":
        return make_rule(rest)
    if kind == "verify":
        return make_verifier(rest)
    file, _, name = rest.rpartition(":")
    path = Path(file)
    if not file or not name:
        raise ConfigError(f"--rewards: {spec} does not name a function; use python:FILE.py:FUNCTION")
    if not path.is_file():
        raise ConfigError(f"--rewards: the file {file} of {spec} does not exist")
    module_spec = importlib.util.spec_from_file_location(f"{NAMED}{path.resolve()}", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"--rewards: {file} is not a Python file; use python:FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses and pickle look up the module of a class
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        raise RewardError(f"--rewards: {file} cannot be imported: {type(error).__name__}: {error}") from error
    functions = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"--rewards: {file} has no function {name!r}; it has {', '.join(functions) or 'none'}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def imported_files() -> list[str]:
    """The files of the modules that this process has imported, but for Python's own, installed packages, heedful, and the
    files that rewards name."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).resolve().parents[1])}
    roots = [Path(folder).resolve() for folder in installed]
    modules = {name: module for name, module in sys.modules.copy().items() if not name.startswith(NAMED)}
    files = {Path(file).resolve() for module in modules.values() if (file := getattr(module, "__file__", None))}
    return sorted(str(file) for file in files if not any(file.is_relative_to(root) for root in roots))


# Both ends ------------------------------------------------------------------------------------------------------------


def send(channel: socket.socket, content: bytes) -> None:
    """Send a request or an answer."""
    channel.sendall(len(content).to_bytes(LENGTH, "big") + content)


def receive(channel: socket.socket) -> bytes:
    """Receive a request. Raises EOFError if the other end is closed."""
    return _exactly(channel, int.from_bytes(_exactly(channel, LENGTH), "big"))


def _exactly(channel: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        piece = channel.recv(min(count - len(content), 1 << 20))
        if not piece:
            raise EOFError
        content += piece
    return bytes(content)
