"""The command line: parse and call, no logic. ``heedful --help`` loads neither torch nor transformers."""

import atexit
import contextlib
import difflib
import errno
import gc
import os
import select
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from heedful import __version__
from heedful.cli.command_table import COMMANDS, GROUPS, SHOWN, Command, InstalledCommand, installed_commands
from heedful.configs.trainers import imported
from heedful.errors import ConfigError, HeedfulError, Terminated, is_out_of_memory
from heedful.redact import WithoutSecrets, remember_command

SPINS, SPINS_OF_SHORT_PAUSES = 1000, 2000
"""Number of polls of a waiting GNU OpenMP thread before it sleeps. Between two polls it executes a pause instruction, which
takes only 13 ns on Intel's servers since Sapphire Rapids: there it needs more polls, or it sleeps too soon."""
OF_THE_MACHINE = 3
"""The exit status if the machine lacks something: a full disk, no memory left."""
SECONDS_TO_CLEAR_UP = 10.0
"""Time limit for cleaning up at the end of a process that must not wait for other ranks or a tracker."""
WIDEST_NAME = max(len(name) for names in SHOWN.values() for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        arguments: the command and its flags; None reads them from ``sys.argv``.

    The status is 0 for success, 2 for a user's mistake, 3 if the machine lacks something (a full disk, no memory left), 4
    for a run that stopped after its start and can be resumed, 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP; all
    but the first come with a message on standard error. Ctrl-C is the normal end of a server (serve-reward, label serve): 0.
    SIGTERM and SIGHUP are handled only in the main thread and only while the command runs.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    told = cast(TextIO, WithoutSecrets(sys.stderr))
    if arguments is None:
        sys.stderr = told  # also for a traceback, should there be one
    try:
        with contextlib.redirect_stderr(told):
            status = _outcome(words, is_program=arguments is None)
    except Exception:
        if arguments is None and _must_end_at_once(1):
            traceback.print_exc()
            _end_at_once(1)
        raise
    if arguments is None and _must_end_at_once(status):
        _end_at_once(status)
    return status


def _outcome(words: list[str], *, is_program: bool) -> int:
    """Run a command, print the message of an error, and return the exit status. A bug of heedful itself is raised."""
    with _terminable():
        try:
            try:
                remember_command(words)
                return _run(words, is_program=is_program)
            finally:
                remember_command([])
                sys.stdout.flush()  # a flush into a closed pipe at exit would print a traceback
        except KeyboardInterrupt as interrupt:
            return _end(interrupt, "interrupted", 130)
        except Terminated as ended:
            return _end(ended, "terminated", ended.status)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _is_unread():
                return 0
            message = _message(error)
            if message is None:
                _end(error, None, 1)
                raise
            from heedful.display import harmless  # it loads rich

            return _end(error, harmless(message), error.status if isinstance(error, HeedfulError) else OF_THE_MACHINE)


def _is_rank() -> bool:
    """True if torchrun, or another launcher, has started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _end(error: BaseException, message: str | None, status: int) -> int:
    """Print the reason for the end of the command, and return its exit status. Only one of several ranks prints it."""
    if not _is_rank():
        if message is not None:
            _say(message)
        return status
    from heedful.distributed import rank_failures, ranks

    ranks.give_up(error)
    elsewhere = rank_failures.failure_elsewhere() if isinstance(error, Terminated) else None
    if elsewhere is not None:  # the launcher ended this rank because another rank failed
        message, status = elsewhere
    if message is not None and rank_failures.speaks():
        rank = os.environ.get("RANK", "0")
        _say(message if rank == "0" else f"rank {rank}: {message}")
    rank_failures.end()
    return status


def _must_end_at_once(status: int) -> bool:
    """Whether Python's normal exit could wait forever: for other ranks (`heedful.distributed.ranks.ends_at_once`), or for
    threads or exit functions of a tracker's client that hangs.
    """
    if any(thread.name.startswith("heedful tracker ") for thread in threading.enumerate()):
        return True
    if not status or not _is_rank():
        return False
    from heedful.distributed import ranks

    return ranks.ends_at_once()


def _end_at_once(status: int) -> None:
    """Run the exit functions for at most `SECONDS_TO_CLEAR_UP`, and end this process."""
    last = threading.Thread(target=atexit._run_exitfuncs, daemon=True)  # temporary folders, processes of rewards
    last.start()
    last.join(SECONDS_TO_CLEAR_UP)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _is_unread() -> bool:
    """True if the reader of our output, such as head, has closed the pipe. Unread output is then discarded."""
    try:
        poller = select.poll()
        poller.register(sys.stdout, 0)
    except (AttributeError, OSError, ValueError):  # Windows; no file
        return False
    if not poller.poll(0):  # it was another pipe
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _say(text: str) -> None:
    """Print a last line on standard error. If nobody reads it, the exit status is unchanged."""
    try:
        print(f"heedful: {text}", file=sys.stderr, flush=True)
    except OSError:  # a pipe's end, a terminal that was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `Terminated`, so that a command ends as after Ctrl-C: half-written folders are removed.

    Nothing changes outside the main thread (other threads cannot set handlers), or if the signal is ignored or handled
    outside Python (such a handler could not be restored).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    previous = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)]
    for number in handled:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, previous[number])


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise Terminated(number)


def _message(error: Exception) -> str | None:
    """Return the message for an error caused by the user's input or machine; None for a bug of heedful itself."""
    if isinstance(error, HeedfulError):
        return f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return (
            "out of memory; lower --micro-batch-size or --max-new-tokens, or set --micro-batch-tokens; heedful plan "
            "shows the memory of each part of a run"
        )
    if isinstance(error, OSError):  # a full disk, a folder without permission
        from heedful.files import in_words

        return f"{in_words(error)}{f': {error.filename}' if error.filename else ''}"
    return None


def usage() -> str:
    """Return the text of ``heedful --help``: first steps, then the other commands in groups."""
    lines = ["heedful trains language models that heed human feedback.", ""]
    lines += ["usage: heedful COMMAND [FILE.yaml] [--setting value ...]"]
    for title, names in SHOWN.items():
        lines += ["", title]
        for name in names:
            seconds = [command.split()[1] for command in COMMANDS if command.startswith(f"{name} ")]
            own = ", ".join(second for second in seconds if second not in COMMANDS)
            summary = COMMANDS[name].summary if name in COMMANDS else GROUPS[name][1]
            summary += f": {own}" if "," in own else ""
            indent = " " * (WIDEST_NAME + 4)
            lines += textwrap.wrap(
                f"  {name:<{WIDEST_NAME}}  {summary}", 88, subsequent_indent=indent, break_on_hyphens=False
            )
    others = installed_commands()
    if others:
        lines += ["", "of other packages", *(f"  {name:<{WIDEST_NAME}}  {others[name].point.value}" for name in others)]
    lines += ["", "heedful COMMAND --help shows main settings, --help-all every one, by their names in YAML."]
    return "\n".join(lines)


def _run(words: list[str], *, is_program: bool) -> int:
    """Run a command. ``is_program``: the process serves only this command; see `_loaded`."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("--version", "version"):
        print(__version__)
        return 0
    name = words.pop(0)
    if name in ("plan", "doctor") and words:
        words[:0] = _left_out(name, words[0])
    is_whole = name in COMMANDS and (not words or words[0].startswith("-"))
    if name in GROUPS and not is_whole:
        found = _command_of_group(name, words)
        if isinstance(found, int):
            return found
        name = found
    others = {} if name in COMMANDS else installed_commands()
    command: Command | InstalledCommand | None = COMMANDS.get(name) or others.get(name)
    if command is None:
        near = difflib.get_close_matches(name, [*COMMANDS, *GROUPS, *others], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"heedful: there is no command {name!r}{hint}\nheedful --help lists the commands", file=sys.stderr)
        return 2
    from heedful.configs.parse import parse
    from heedful.configs.settings import answering_command

    if _is_rank() and not command.trains:
        raise ConfigError(f"heedful {name} is one process; start it without torchrun, which is for trainers")
    if command.serves:
        from heedful.configs.settings import require_label_extra

        require_label_extra(f"heedful {name}")
    _let_threads_sleep()
    _let_memory_grow_in_place()
    config = parse(command.settings(), words, prog=f"heedful {name}")
    try:
        function = _loaded(command.load, is_program=is_program)
        done = None if not command.trains else imported("training.output_folder:finished_before")(config)
        with answering_command():
            result: Any = function(config) if done is None else None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None and hasattr(config, "output"):
            error.filename = str(config.output)  # the system names no file when the disk is full
        raise
    if _is_rank():
        imported("distributed.ranks:leave")()
    if command.trains and os.environ.get("RANK", "0") == "0":
        summary = result.summary if done is None else done
        imported("cli.commands:report_training")(config, summary, was_complete=done is not None)
    return 0


def _left_out(group: str, word: str) -> list[str]:
    """The second word of a command that its third implies: the trainer of a YAML file, or device before its flags."""
    if word.endswith((".yaml", ".yml")):
        return [imported("configs.plan:trainer_of")(Path(word), group)]
    is_device = group == "doctor" and word.partition("=")[0] in ("--device", "--json")
    return ["device"] if is_device else []


def _command_of_group(group: str, words: list[str]) -> str | int:
    """Return the command of the next word, removed from ``words``; or, after printing the choice, the exit status."""
    kind, does = GROUPS[group]
    commands = {name.split()[1]: name for name in COMMANDS if name.startswith(f"{group} ")}
    word = words[0] if words else None
    if word in commands:
        return commands[words.pop(0)]
    if word is not None and word not in ("-h", "--help"):
        near = difflib.get_close_matches(word, commands, n=1)
        wrong = f"{group} has no {kind} {word!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        if kind == "trainer" and Path(word, "config.yaml").is_file():
            wrong += f"; the settings of a run are in a file: heedful {group} {word}/config.yaml"
        print(f"heedful: {wrong}", file=sys.stderr)
        if near:
            print(f"heedful {group} --help lists them", file=sys.stderr)
            return 2
    listing = "\n".join(f"  heedful {name:<20}  {COMMANDS[name].summary}" for name in commands.values())
    is_help = word in ("-h", "--help")
    print(f"heedful {group}: {does}\n{listing}", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


def _let_threads_sleep() -> None:
    """Make waiting threads sleep after a short spin, unless set by the user. Call it before torch is loaded.

    Beside another busy program, a spinning thread takes the processor from the thread that it waits for; on a quiet machine,
    a thread that sleeps at once wakes up late (docs/speed.md has measurements of both).
    """
    if "torch" not in sys.modules and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
        os.environ["GOMP_SPINCOUNT"] = str(spins(_cpu_info()))


def _let_memory_grow_in_place() -> None:
    """Let torch's memory on a GPU grow in place (expandable segments), unless the user has set its allocator. Call it before
    torch is loaded.

    The phases of a run allocate tensors of different sizes, and otherwise memory that one freed may not fit those of another.
    """
    if "torch" not in sys.modules and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def spins(cpu_info: str) -> int:
    """Number of polls of a waiting thread, by the processor's description in ``/proc/cpuinfo``."""
    has_short_pauses = "GenuineIntel" in cpu_info and "avx512_fp16" in cpu_info.split()
    return SPINS_OF_SHORT_PAUSES if has_short_pauses else SPINS


def _cpu_info() -> str:
    """Linux's description of the first processor; empty on other systems."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return file.read(10_000)
    except OSError:
        return ""


def _loaded(load: Callable[[], Any], *, is_program: bool) -> Any:
    """What ``load`` imports.

    Loading torch and transformers creates hundreds of thousands of permanent objects; garbage collection among them would
    take a fifth of the time, so it is off meanwhile and they are frozen afterwards. This is done only if the process runs
    nothing else (``is_program``), because another program's process may have garbage of its own.
    """
    if not is_program or "torch" in sys.modules or not gc.isenabled():
        return load()
    gc.disable()
    try:
        return load()
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
