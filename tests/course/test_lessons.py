"""Every lesson: both languages, the same code, its sections, its exercises, and no solution in it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from heedful.course.catalogue import LANGUAGES, SECTIONS, lesson, lessons
from heedful.course.exercises import NOT_DONE, RIGHT, exercises, outcome

HERE = Path(__file__).parent
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
ENGLISH = lessons("en")


def cells(text):
    """The code cells of a lesson, with their tags."""
    return CELL.findall(text)


def function_of(cell, exercise):
    """The function that an exercise's cell defines, run without its call of check."""
    source = re.sub(r"^:tags:.*$|^course\.check.*$", "", cell, flags=re.MULTILINE)
    names = {}
    exec(compile(source, exercise, "exec"), names)
    return next(value for name, value in reversed(names.items()) if callable(value) and name != "__builtins__")


def test_both_languages_have_the_same_lessons_code_and_sections():
    assert [one.name for one in lessons("zh")] == [one.name for one in ENGLISH]
    assert len({one.number for one in ENGLISH}) == len(ENGLISH)
    for one in ENGLISH:
        assert cells(one.text), one.name
        assert cells(lesson(one.number, "zh").text) == cells(one.text), one.name
    for one in [*ENGLISH, *lessons("zh")]:
        prose = CELL.sub("", one.text)
        headings = [
            re.split("[:：]", found)[0].strip() for found in re.findall(r"^## (.+)$", prose, flags=re.MULTILINE)
        ]
        assert tuple(headings) == SECTIONS[one.path.parent.name], one.path
        assert len(re.findall(r"^# ", prose, flags=re.MULTILINE)) == 1, one.path


def test_a_lesson_has_three_exercises_that_are_not_done():
    for one in ENGLISH:
        tagged = [cell for cell in cells(one.text) if re.search(r"^:tags: \[exercise\]$", cell, flags=re.MULTILINE)]
        assert exercises(one) == [f"{one.number}.{index}" for index in (1, 2, 3)]
        for exercise, cell in zip(exercises(one), tagged, strict=True):
            function = function_of(cell, exercise)
            assert f'course.check("{exercise}", {function.__name__})' in cell
            assert function.__doc__
            assert outcome(exercise, function) == NOT_DONE


@pytest.mark.parametrize("number", [one.number for one in ENGLISH])
def test_a_right_answer_is_right_and_a_wrong_one_is_told_why(number):
    """A typical mistake, and what is not of the type that was asked for."""
    solutions = runpy.run_path(str(HERE / "solutions" / f"lesson{number:02d}.py"))
    for index in (1, 2, 3):
        exercise = f"{number}.{index}"
        assert outcome(exercise, solutions[f"answer_{index}"]) == RIGHT
        said = outcome(exercise, solutions[f"wrong_{index}"])
        assert said not in (RIGHT, NOT_DONE)
        assert "your function stopped" not in said
        assert "\n" not in said
        assert len(said) > 15
        for wrong in (lambda *_, **__: "text", lambda *_, **__: 0 if _ else None, 3):
            said = outcome(exercise, wrong)
            assert said != RIGHT
            assert "\n" not in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_lesson_runs_in_full(language, tmp_path):
    """Each within three minutes on two quiet cores; this only sees that no cell stops."""
    command = [sys.executable, str(HERE / "run_lessons.py"), "--full", "--language", language, "--folder", tmp_path]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
