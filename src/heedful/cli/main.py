"""The command line: parse and call, no logic. ``heedful --help`` loads neither torch nor transformers."""

import atexit
import contextlib
import errno
import gc
import importlib
import os
import select
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from heedful.cli.command_table import COMMANDS, GROUPS, SHOWN
from heedful.errors import ConfigError, HeedfulError, Terminated, is_out_of_memory
from heedful.redact import WithoutSecrets, remember_command

SPINS, SPINS_OF_SHORT_PAUSES = 1000, 2000
"""How often a thread of GNU OpenMP looks whether it may go on before it sleeps. Between two looks it pauses, by an
instruction that takes only 13 ns on Intel's servers since Sapphire Rapids: there it must look more often, or it sleeps too
soon."""
OF_THE_MACHINE = 3
"""The exit status if the machine lacks something: a full disk, no memory left."""
SECONDS_TO_CLEAR_UP = 10.0
"""For what is done at the end of a process that must not wait for other ranks or a tracker."""
WIDEST_NAME = max(len(name) for names in SHOWN.values() for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        arguments: the command and its flags; None reads them from ``sys.argv``.

    The status is 0 for success, 2 for a user's mistake, 3 if the machine lacks something (a full disk, no memory left), 4
    for a run that began, could not go on, and can be resumed, 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP;
    all but the first come with a message on standard error. A server (serve-reward, label serve) that Ctrl-C ends has done
    its work: 0. SIGTERM and SIGHUP are handled only in the main thread and
    only while the command runs.
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
    """Run a command, say why it failed if it did, and return its exit status. A mistake of our own is raised."""
    with _terminable():
        try:
            try:
                remember_command(words)
                return _run(words, is_program=is_program)
            finally:
                remember_command([])
                sys.stdout.flush()  # at exit, writing what is left into a closed pipe would be a traceback
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
            from heedful.display import harmless  # which loads rich

            return _end(error, harmless(message), error.status if isinstance(error, HeedfulError) else OF_THE_MACHINE)


def _is_rank() -> bool:
    """True if torchrun, or another launcher, has started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _end(error: BaseException, message: str | None, status: int) -> int:
    """Say why the command ends, and return its exit status. Of several ranks, the one whose turn it is says it."""
    if not _is_rank():
        if message is not None:
            _say(message)
        return status
    from heedful.distributed import rank_failures, ranks

    ranks.give_up(error)
    elsewhere = rank_failures.failure_elsewhere() if isinstance(error, Terminated) else None
    if elsewhere is not None:  # the launcher has ended this rank because another has failed
        message, status = elsewhere
    if message is not None and rank_failures.speaks():
        _say(f"rank {os.environ.get('RANK')}: {message}" if os.environ.get("RANK") != "0" else message)
    rank_failures.end()
    return status


def _must_end_at_once(status: int) -> bool:
    """Whether Python's own end could wait forever: for other ranks (`heedful.distributed.ranks.ends_at_once`), or for
    the client of a tracker that hangs and has threads or functions for the end of the process.
    """
    if any(thread.name.startswith("heedful tracker ") for thread in threading.enumerate()):
        return True
    if not status or not _is_rank():
        return False
    from heedful.distributed import ranks

    return ranks.ends_at_once()


def _end_at_once(status: int) -> None:
    """End this process with what it registered for its end, but with no wait longer than `SECONDS_TO_CLEAR_UP`."""
    last = threading.Thread(target=atexit._run_exitfuncs, daemon=True)  # temporary folders, processes of rewards
    last.start()
    last.join(SECONDS_TO_CLEAR_UP)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _is_unread() -> bool:
    """True if the reader of our output, such as head, has seen enough. What it has not read goes nowhere."""
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
    """Print a last line on standard error, if anybody reads it; if not, the exit status stays what it is."""
    try:
        print(f"heedful: {text}", file=sys.stderr, flush=True)
    except OSError:  # a pipe's end, a terminal that was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `Terminated`, so that a command ends as after Ctrl-C: half-written folders are removed.

    Nothing changes outside the main thread, which alone may set handlers, or if the signal is ignored or is handled by code
    outside Python, whose handler could not be put back.
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
    """Return the message for an error caused by the user's input or machine; None for a mistake of our own."""
    if isinstance(error, HeedfulError):
        return f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return (
            "out of memory; lower --micro-batch-size or --max-new-tokens, or set --micro-batch-tokens; heedful plan "
            "says what each part of a run takes"
        )
    if isinstance(error, OSError):  # a full disk, a folder without permission
        from heedful.files import in_words

        return f"{in_words(error)}{f': {error.filename}' if error.filename else ''}"
    return None


def usage() -> str:
    """Return the text of ``heedful --help``: what a newcomer needs first, then the other commands in groups."""
    lines = ["heedful trains language models that heed human feedback.", ""]
    lines += ["usage: heedful COMMAND [FILE.yaml] [--setting value ...]"]
    for title, names in SHOWN.items():
        lines += ["", title]
        for name in names:
            measures = ", ".join(command.split()[1] for command in COMMANDS if command.startswith(f"{name} "))
            summary = COMMANDS[name].summary if name in COMMANDS else f"{GROUPS[name][1]}: {measures}"
            indent = " " * (WIDEST_NAME + 4)
            lines += textwrap.wrap(
                f"  {name:<{WIDEST_NAME}}  {summary}", 88, subsequent_indent=indent, break_on_hyphens=False
            )
    lines += ["", "heedful COMMAND --help shows a command's main settings, --help-all every one. A YAML file"]
    return "\n".join([*lines, "uses the same names."])


def _run(words: list[str], *, is_program: bool) -> int:
    """Run a command. ``is_program``: the process is there for nothing else; see `_load`."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("--version", "version"):
        from importlib.metadata import version

        print(version("heedful"))
        return 0
    name = words.pop(0)
    if name == "plan" and words and words[0].endswith((".yaml", ".yml")):
        words.insert(0, _load("configs.plan:trainer_of")(Path(words[0])))
    is_whole = name in COMMANDS and (not words or words[0].startswith("-"))
    if name in GROUPS and not is_whole:
        found = _command_of_group(name, words)
        if isinstance(found, int):
            return found
        name = found
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"heedful: there is no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    from heedful.configs.parse import parse

    command = COMMANDS[name]
    if _is_rank() and command.objective is None:
        raise ConfigError(f"heedful {name} is one process; start it without torchrun, which is for trainers")
    if command.serves:
        from heedful.configs.settings import require_label_extra

        require_label_extra(f"heedful {name}")
    _let_threads_sleep()
    config = parse(_load(command.config, is_program=is_program), words, prog=f"heedful {name}")
    try:
        function = _load(command.function, is_program=is_program)
        result = function(config)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None and hasattr(config, "output"):
            error.filename = str(config.output)  # the system does not name what did not fit
        raise
    if _is_rank():
        _load("distributed.ranks:leave")()
    if command.objective is not None and os.environ.get("RANK", "0") == "0":
        _load("cli.commands:report_training")(config, result.summary, command.objective)
    return 0


def _command_of_group(group: str, words: list[str]) -> str | int:
    """The command that the next word names, which is taken off ``words``; or the exit status once the choice was shown."""
    from heedful.configs.names import GONE

    kind, does = GROUPS[group]
    commands = {name.split()[1]: name for name in COMMANDS if name.startswith(f"{group} ")}
    word = words[0] if words else None
    if word in commands:
        return commands[words.pop(0)]
    if word is not None and word not in ("-h", "--help"):
        instead = GONE.get(f"{group} {word}")
        wrong = f"{group} {word} is gone: {instead}" if instead else f"{group} has no {kind} {word!r}"
        print(f"heedful: {wrong}", file=sys.stderr)
    listing = "\n".join(f"  heedful {name:<20}  {COMMANDS[name].summary}" for name in commands.values())
    is_help = word in ("-h", "--help")
    print(f"heedful {group}: {does}\n{listing}", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


def _let_threads_sleep() -> None:
    """Make threads that wait for each other sleep after a short spin, unless the user chose; before torch is loaded.

    Beside another busy program, a thread that spins holds the processor that the thread it waits for needs; on a quiet
    machine one that sleeps at once is woken late (docs/speed.md has both measured).
    """
    if "torch" not in sys.modules and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
        os.environ["GOMP_SPINCOUNT"] = str(spins(_cpu_info()))


def spins(cpu_info: str) -> int:
    """How often a waiting thread looks on a processor that ``/proc/cpuinfo`` describes so."""
    has_short_pauses = "GenuineIntel" in cpu_info and "avx512_fp16" in cpu_info.split()
    return SPINS_OF_SHORT_PAUSES if has_short_pauses else SPINS


def _cpu_info() -> str:
    """What Linux says of the first processor; nothing on other systems."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return file.read(10_000)
    except OSError:
        return ""


def _load(reference: str, *, is_program: bool = False) -> Any:
    """What ``module:name`` names.

    Loading torch and transformers makes objects by the hundred thousand, all of which stay: to look for garbage among them
    again and again would take a fifth of the time. Another program's process (``is_program`` is false) may have garbage of
    its own, so there nothing is set apart.
    """
    module, _, attribute = reference.partition(":")
    if not is_program or "torch" in sys.modules or not gc.isenabled():
        return getattr(importlib.import_module(f"heedful.{module}"), attribute)
    gc.disable()
    try:
        return getattr(importlib.import_module(f"heedful.{module}"), attribute)
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
