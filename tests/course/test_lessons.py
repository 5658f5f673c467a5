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
ALL = [one for language in LANGUAGES for one in lessons(language)]
ENGLISH = lessons("en")


def named(value):
    return f"{value.path.parent.name}-{value.name}" if hasattr(value, "path") else str(value)


def cells(text):
    """The code cells of a lesson, with their tags."""
    return CELL.findall(text)


def words(text):
    """English words and Chinese characters outside the code and the formulas."""
    prose = re.sub(r"\$\$.*?\$\$|\$.*?\$", " ", CELL.sub("", text).split("---\n", maxsplit=2)[-1], flags=re.DOTALL)
    return len(re.findall(r"[A-Za-z][A-Za-z'-]*", prose)), len(re.findall(r"[\u4e00-\u9fff]", prose))


def function_of(cell, exercise):
    """The function that an exercise's cell defines, run without its call of check."""
    source = re.sub(r"^:tags:.*$|^course\.check.*$", "", cell, flags=re.MULTILINE)
    names = {}
    exec(compile(source, exercise, "exec"), names)
    return next(value for name, value in reversed(names.items()) if callable(value) and name != "__builtins__")


def test_both_languages_have_the_same_lessons():
    assert [one.name for one in lessons("zh")] == [one.name for one in ENGLISH]
    numbers = [one.number for one in ENGLISH]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("one", ENGLISH, ids=named)
def test_both_languages_have_the_same_code(one):
    assert cells(lesson(one.number, "zh").text) == cells(one.text)
    assert cells(one.text), "no cell was found"


@pytest.mark.parametrize("one", ALL, ids=named)
def test_a_lesson_has_its_sections_in_order(one):
    prose = CELL.sub("", one.text)
    headings = [re.split("[:：]", found)[0].strip() for found in re.findall(r"^## (.+)$", prose, flags=re.MULTILINE)]
    assert tuple(headings) == SECTIONS[one.path.parent.name]
    assert len(re.findall(r"^# ", prose, flags=re.MULTILINE)) == 1


@pytest.mark.parametrize("one", ALL, ids=named)
def test_a_lesson_is_of_300_to_900_words(one):
    english, chinese = words(one.text)
    count = english if one.path.parent.name == "en" else chinese / 1.6  # a Chinese word is 1.6 characters on average
    assert 300 <= count <= 900, f"{english} English words, {chinese} Chinese characters"


@pytest.mark.parametrize("one", ENGLISH, ids=named)
def test_code_is_ascii_but_for_chinese_data(one):
    """Comments are in English; a Chinese text is a string that the lesson is about."""
    for cell in cells(one.text):
        for line in cell.splitlines():
            assert not re.search(r"#.*[\u4e00-\u9fff]", line), line


@pytest.mark.parametrize("one", ENGLISH, ids=named)
def test_a_lesson_has_three_exercises_that_are_not_done(one):
    tagged = [cell for cell in cells(one.text) if re.search(r"^:tags: \[exercise\]$", cell, flags=re.MULTILINE)]
    assert exercises(one) == [f"{one.number}.{index}" for index in (1, 2, 3)]
    assert len(tagged) == 3
    for exercise, cell in zip(exercises(one), tagged, strict=True):
        function = function_of(cell, exercise)
        assert f'course.check("{exercise}", {function.__name__})' in cell
        assert function.__doc__
        assert outcome(exercise, function) == NOT_DONE


SOLUTIONS = {one.number: HERE / "solutions" / f"lesson{one.number:02d}.py" for one in ENGLISH}
EXERCISES = [(number, index) for number in SOLUTIONS for index in (1, 2, 3)]


@pytest.mark.parametrize(("number", "index"), EXERCISES)
def test_a_right_answer_is_right_and_a_typical_wrong_one_is_told_why(number, index):
    solutions = runpy.run_path(str(SOLUTIONS[number]))
    exercise = f"{number}.{index}"
    assert outcome(exercise, solutions[f"answer_{index}"]) == RIGHT
    said = outcome(exercise, solutions[f"wrong_{index}"])
    assert said not in (RIGHT, NOT_DONE)
    assert "your function stopped" not in said
    assert "\n" not in said
    assert len(said) > 15


@pytest.mark.parametrize("number", SOLUTIONS)
def test_a_wrong_type_is_answered_in_one_line(number):
    for index in (1, 2, 3):
        for answer in (lambda *_, **__: "text", lambda *_, **__: 0 if _ else None, 3):
            said = outcome(f"{number}.{index}", answer)
            assert said != RIGHT
            assert "\n" not in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_lesson_runs_in_full(language, tmp_path):
    """Each within three minutes on two quiet cores; this only sees that no cell stops."""
    command = [sys.executable, str(HERE / "run_lessons.py"), "--full", "--language", language, "--folder", tmp_path]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
