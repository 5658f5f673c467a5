"""Check exercises: `check` in a notebook, `check_copy` for ``heedful course check``."""

import contextlib
import dis
import io
import re
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from heedful.course.catalogue import Lesson
from heedful.errors import ConfigError
from heedful.files import read_object

RIGHT = "right"
NOT_DONE = "not done yet"
NUMBER = re.compile(r"(\d+)\.(\d+)")
CHECK = re.compile(r"""course\.check\(\s*["'](\d+\.\d+)["']\s*,\s*(\w+)""")
"""The call in an exercise's cell: its number, and the name of the function."""


def check(exercise: str, answer: Callable[..., Any]) -> None:
    """Print one line on an answer: right; not done yet; or the question, the result and the expected value.

    It never raises.

    Args:
        exercise: its number, such as "5.1".
        answer: the function that you wrote.
    """
    print(f"{exercise}: {outcome(exercise, answer)}")


def outcome(exercise: str, answer: Callable[..., Any]) -> str:
    """The outcome of an answer: `RIGHT`, `NOT_DONE`, or a description of the mistake."""
    test = _test(exercise)
    if isinstance(test, str):
        return test
    if not callable(answer):
        return f'expected a function, got {answer!r:.40}; write course.check("{exercise}", NAME) with its name'
    if _is_empty(answer):
        return NOT_DONE
    try:
        test(answer)
    except AssertionError as error:
        return " ".join(str(error).split()) or "not right yet"
    except Exception as error:
        return f"your function stopped with {_in_words(error)}"
    return RIGHT


def check_copy(lesson: Lesson, copy: Path) -> Iterator[tuple[str, str]]:
    """Run a notebook's first code cell, then its exercises. Yields the number of each with its outcome.

    Raises ConfigError if the notebook cannot be read.
    """
    names: dict[str, Any] = {}
    first, *others = _code_cells(copy)
    failure = _run(first, names)
    cells = {found[1]: (cell, found[2]) for cell in others if (found := CHECK.search(cell))}
    for exercise in exercises(lesson):
        if exercise not in cells:
            yield exercise, f'{copy} has no cell with course.check("{exercise}", NAME)'
            continue
        cell, name = cells[exercise]
        failed = failure or _run(cell, names)
        yield exercise, failed or outcome(exercise, names[name])


def exercises(lesson: Lesson) -> list[str]:
    """The numbers of a lesson's exercises."""
    return [found[1] for found in CHECK.finditer(lesson.text)]


def _test(exercise: str) -> Callable[[Callable[..., Any]], None] | str:
    """The hidden test of an exercise, or the reason why there is none."""
    number = NUMBER.fullmatch(str(exercise))
    if number is None:
        return "no exercise has this number; they are numbered like 5.1"
    module = f"heedful.course.checks.lesson{int(number[1]):02d}"
    if find_spec(module) is None:
        return f"there is no lesson {int(number[1])}; heedful course lists them"
    test: Callable[[Callable[..., Any]], None] | None = getattr(import_module(module), f"check_{number[2]}", None)
    return test or f"lesson {int(number[1])} has no exercise {number[2]}"


def _is_empty(answer: Callable[..., Any]) -> bool:
    """Whether a function's body is ``...``: it does nothing but return None."""
    if not isinstance(answer, FunctionType):
        return False
    does = [step for step in dis.get_instructions(answer) if step.opname not in ("RESUME", "NOP")]
    return len(does) <= 2 and [step.argval for step in does if step.opname.endswith("_CONST")] == [None]


def _code_cells(copy: Path) -> list[str]:
    """The source of each code cell. Raises ConfigError if the file is no notebook, or has no code cell."""
    anew = "start the lesson again with --overwrite"
    cells = read_object(copy, anew, error=ConfigError, needs=["cells"])["cells"]
    found = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    if not found:
        raise ConfigError(f"{copy} has no cell with code; {anew}")
    return found


def _run(cell: str, names: dict[str, Any]) -> str:
    """Run a cell without its output. Returns a description of its error, or ``""``."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(cell, "cell", "exec"), names)
    except Exception as error:
        return f"its cell stopped with {_in_words(error)}"
    return ""


def _in_words(error: Exception) -> str:
    """An error of the user's code in one line, with its line in the cell."""
    ours = Path(__file__).parent
    theirs = [one.lineno for one in traceback.extract_tb(error.__traceback__) if ours not in Path(one.filename).parents]
    where = f" (line {theirs[0]} of the cell)" if theirs else ""
    return " ".join(f"{type(error).__name__}: {error}".split()) + where
