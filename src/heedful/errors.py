"""The errors that heedful raises for a user. Each message says what is wrong, where, and how to fix it.

    HeedfulError
    ├── ConfigError      (also ValueError)     a flag, a YAML key, or a setting that does not fit another
    ├── DataError        (also ValueError)     a data file or a record in it
    ├── CheckpointError  (also RuntimeError)   a model, tokenizer or run folder on disk
    ├── RewardError      (also RuntimeError)   a reward function or reward model that failed
    ├── SamplerError     (also RuntimeError)   a sampling server: gone, or with another model or other weights
    ├── TrainingError    (also RuntimeError)   losses or gradients that are not finite, or a KL above --max-kl
    ├── MemoryFullError  (also MemoryError)    a model that does not fit into memory, even one row at a time
    ├── RankError        (also RuntimeError)   another process of the run has died, hangs or failed
    └── MachineError     (also OSError)        the machine lacks what a run needs, such as space on the disk

The command line prints the message on standard error and exits with the error's ``status``, without a traceback: 2 for a
user's mistake, 3 for the machine, 4 for a run that began, could not go on, and can be resumed.

In a notebook an error shows the line of the cell, its code, the line of the user's function that raised, and the message,
without heedful's own frames; `raise ... from` and ``%debug`` still have them.

`Terminated` is not an error: like KeyboardInterrupt, it ends the program.
"""

import contextlib
import itertools
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path


def _is_outside(frame: traceback.FrameSummary) -> bool:
    return not Path(frame.filename).is_relative_to(Path(__file__).parent)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The last line of the user's code in an exception's traceback: neither heedful's nor of an installed package. None if
    there is none."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}

    def is_of_user(frame: traceback.FrameSummary) -> bool:
        path = Path(frame.filename)
        is_python = frame.filename.startswith("<frozen ") or any(path.is_relative_to(root) for root in installed)
        return _is_outside(frame) and not is_python

    return next(filter(is_of_user, reversed(traceback.extract_tb(error.__traceback__))), None)


def _shown(frame: traceback.FrameSummary) -> str:
    return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line}'


class HeedfulError(Exception):
    """Base class of every error that heedful raises for a user."""

    status = 2
    """The exit status of a command that it ends."""

    def _render_traceback_(self) -> list[str]:
        """The traceback that IPython shows: the line that called heedful, that of a user's function which raised, and the
        message."""
        frames = list(itertools.takewhile(_is_outside, traceback.extract_tb(self.__traceback__)))[-1:]
        raised = user_frame(self.__cause__) if self.__cause__ is not None else None
        where = [_shown(one) for one in (*frames, raised) if one is not None]
        return [*where, f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


@contextlib.contextmanager
def reworded(words: Callable[[str], str]) -> Iterator[None]:
    """The messages of errors inside go through a function, such as one that names objects as they were passed."""
    try:
        yield
    except HeedfulError as error:
        error.args = (words(str(error)),)
        raise


class ConfigError(HeedfulError, ValueError):
    """A setting is unknown, has the wrong type, is out of range, or contradicts another."""


class DataError(HeedfulError, ValueError):
    """A data file is missing or malformed, or holds something that the task cannot use."""

    cause = ""
    """Short reason why a record is unusable; unusable records are counted by it."""


class CheckpointError(HeedfulError, RuntimeError):
    """A model, tokenizer or run folder is missing, incomplete, or of the wrong kind."""


class RefusedError(CheckpointError):
    """A chat template refuses a conversation, for example because it supports no system message."""

    cause = "the chat template refuses it"
    """As in `DataError`."""


class RewardError(HeedfulError, RuntimeError):
    """A reward failed on more responses than may fail, or did not return one entry per response.

    Its status is 4 if a run had begun, or if a server stopped answering that had answered before.
    """


class SamplerError(HeedfulError, RuntimeError):
    """A sampling server cannot be used: it is gone, or has another model, another version or other weights."""


class TrainingError(HeedfulError, RuntimeError):
    """Training cannot continue: losses or gradients are not finite, or the KL to the reference exceeded --max-kl."""

    status = 4


class MemoryFullError(HeedfulError, MemoryError):
    """Memory ran out with a single row at a time."""

    status = 3


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, in Python or on the CPU or GPU. torch has an exception for it, but also several messages."""
    if isinstance(error, HeedfulError):  # already handled: its message names the attempts
        return False
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)
"""Parts of torch's messages in a plain RuntimeError when memory ran out."""


class MachineError(HeedfulError, OSError):
    """The machine lacks a resource of the run, such as disk space."""

    status = 3


class RankError(HeedfulError, RuntimeError):
    """Another rank of a run on several devices has died, hangs, or has failed."""

    status = 4

    def __init__(self, message: str, status: int = status) -> None:
        super().__init__(message)
        self.status = status


class Terminated(BaseException):
    """The process was asked to end (SIGTERM, SIGHUP). Not an `Exception`, so that no handler of errors catches it."""

    def __init__(self, signal_number: int = 15) -> None:
        super().__init__()
        self.status = 128 + signal_number
