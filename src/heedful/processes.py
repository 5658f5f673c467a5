"""Processes of heedful's own that run a user's code: what watches them from outside, and from inside."""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from heedful import user_code

LONGEST_START = 60.0
"""Minimal timeout for importing a file in seconds, even if the timeout of a call is shorter."""
INTERVAL = 0.1
"""Seconds between two checks of a working process's memory, and, inside it, of heedful's process."""
SPARE = 5.0
"""Seconds after its timeout at which a process ends itself, if heedful has not killed it."""


def start(module: str) -> "tuple[subprocess.Popen[bytes], Connection[Any, Any]]":
    """Start a process that runs ``serve(channel, heedful)`` of a module with this process's module path, and a pipe to it."""
    program = f"import json, sys\nsys.path[:] = json.loads(sys.argv[1])\nfrom {module} import serve\n"
    program += "serve(int(sys.argv[2]), int(sys.argv[3]))\n"
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,  # the terminal is the user's
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for heedful, which then ends it
        )
    return process, ours


def ending(status: int) -> str:
    """How a process ended, as the end of a sentence."""
    if status < 0:
        return f"crashed: its process was ended by {signal.Signals(-status).name}"
    return f"ended its process (exit status {status})"


def kill_group(leader: int) -> None:
    """Kill a process group and its leader's descendants. Processes that have left both, such as daemons, stay."""
    for kill, pid in (*((os.kill, pid) for pid in descendants(leader)), (os.killpg, leader)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """A process's descendants; none on systems without /proc."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # this thread ended meanwhile: the others may have children too
                children += map(int, (task / "children").read_text().split())
    return children + [deeper for child in children for deeper in descendants(child)]


def resident(pids: Sequence[int], *, shared: bool = False) -> int:
    """Resident memory of processes in bytes. ``shared`` divides shared pages among the processes (PSS), which is slower."""
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


# Inside of the process -------------------------------------------------------------------------------------------------


def be_the_first_to_end() -> None:
    """Leave no core dump, and be the process that ends if the machine runs out of memory."""
    import resource  # which not every system has

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_with(heedful: int) -> None:
    """End this process and its descendants once heedful's process is gone."""
    while os.getppid() == heedful:
        time.sleep(INTERVAL)
    kill_group(os.getpid())


@contextlib.contextmanager
def ended_after(timeout: float) -> Iterator[None]:
    """End this process if the body takes longer than heedful's timeout. Needed if heedful is gone and the body never
    releases the interpreter."""
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(timeout + SPARE, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def imported_files() -> list[str]:
    """The files of this process's modules, except Python's own, installed packages, heedful, and the files that settings
    name."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).resolve().parent)}
    roots = [Path(folder).resolve() for folder in installed]
    modules = {name: module for name, module in sys.modules.copy().items() if not name.startswith(user_code.MODULE)}
    files = {Path(file).resolve() for module in modules.values() if (file := getattr(module, "__file__", None))}
    return sorted(str(file) for file in files if not any(file.is_relative_to(root) for root in roots))
