"""Check exercises: `check` in a notebook, `check_copy` for ``heedful course check``."""

import dis
import json
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from heedful.apps.course.catalogue import Lesson
from heedful.apps.course.notebook import Kernel, code_cells, needed

RIGHT = "right"
NOT_DONE = "not done yet"
NUMBER = re.compile(r"(\d+)\.(\d+)")
CHECK = re.compile(r"""course\.check\(\s*["'](\d+\.\d+)["']\s*,\s*(\w+)""")
"""The call in an exercise's cell: its number, and the name of the function."""
REPORT = "HEEDFUL_COURSE_REPORT"
"""Environment variable: the file to which `check` adds each outcome, for ``heedful course check``."""


def check(exercise: str, answer: Callable[..., Any]) -> None:
    """Print one line on an answer: right; not done yet; or the question, the result and the expected value.

    It never raises.

    Args:
        exercise: its number, such as "5.1".
        answer: the function that you wrote.
    """
    said = outcome(exercise, answer)
    print(f"{exercise}: {said}")
    if REPORT in os.environ:
        with Path(os.environ[REPORT]).open("a", encoding="utf-8") as report:
            report.write(f"{json.dumps([exercise, said])}\n")


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
        test(lambda *given: answer(*deepcopy(given)))  # what an answer does to its arguments is no matter
    except AssertionError as error:
        return " ".join(str(error).split()) or "not right yet"
    except (Exception, SystemExit) as error:
        return f"your function stopped with {_in_words(error)}"
    return RIGHT


def check_copy(lesson: Lesson, seconds: float) -> Iterator[tuple[str, str]]:
    """Run the exercises of a lesson's notebook as the notebook would. Yields the number of each with its outcome.

    Args:
        lesson: the lesson; the notebook is `Lesson.copy`.
        seconds: longest time for a cell.

    Raises ConfigError if the notebook cannot be read.
    """
    cells = code_cells(lesson.copy)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "outcomes.jsonl"
        with Kernel(seconds, {REPORT: str(report)}) as kernel:
            for exercise in exercises(lesson):
                calls = re.compile(rf"""\bcheck\(\s*(?:exercise\s*=\s*)?["']{re.escape(exercise)}["']""")
                found = [cell for cell in cells if calls.search(cell.source)]
                if not found:
                    yield exercise, f'{lesson.copy} has no cell with course.check("{exercise}", NAME)'
                    continue
                failure = next((said for cell in needed(cells, found[-1]) if (said := kernel.run(cell))), "")
                said = failure or f'cell {found[-1].number} did not call course.check("{exercise}", NAME)'
                yield exercise, _outcomes(report).get(exercise, said)


def _outcomes(report: Path) -> dict[str, str]:
    """The last outcome of each exercise that `check` has reported."""
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    return dict(map(json.loads, lines))


def exercises(lesson: Lesson) -> list[str]:
    """The numbers of a lesson's exercises."""
    return [found[1] for found in CHECK.finditer(lesson.text)]


def _test(exercise: str) -> Callable[[Callable[..., Any]], None] | str:
    """The hidden test of an exercise, or the reason why there is none."""
    number = NUMBER.fullmatch(str(exercise))
    if number is None:
        return "no exercise has this number; they are numbered like 5.1"
    module = f"heedful.apps.course.checks.lesson{int(number[1]):02d}"
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


def _in_words(error: BaseException) -> str:
    """An error of the user's code in one line, with its line in the cell."""
    ours = Path(__file__).parent
    theirs = [one.lineno for one in traceback.extract_tb(error.__traceback__) if ours not in Path(one.filename).parents]
    where = f" (line {theirs[0]} of the cell)" if theirs else ""
    return " ".join(f"{type(error).__name__}: {error}".split()) + where
