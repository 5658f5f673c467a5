"""Answers as students write them: every right form is accepted, and every wrong one is told why."""

import math
import re
import tomllib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from heedful import core
from heedful.course.catalogue import lessons
from heedful.course.exercises import NOT_DONE, RIGHT, exercises, outcome

FORMS = {}
for path in sorted((Path(__file__).parent / "forms").glob("*.toml")):
    FORMS |= tomllib.loads(path.read_text(encoding="utf-8"))
TASKS = {exercise: lesson for lesson in lessons() for exercise in exercises(lesson)}


def answer(exercise, body):
    """The function of a lesson's exercise with a body."""
    head = re.search(rf'def \w+\([^\n]*:(?=\n(?:(?!\n```).)*?course\.check\("{exercise}")', _cell(exercise), re.DOTALL)[
        0
    ]
    lines = body.strip("\n").splitlines() if "\n" in body else body.split("; ")
    names = {"math": math, "np": np, "torch": torch, "F": F, "core": core, "normalize_text": normalize_text}
    exec(compile("\n    ".join([head, *lines]), f"{exercise}", "exec"), names)
    return names[re.match(r"def (\w+)", head)[1]]


def _cell(exercise):
    cells = TASKS[exercise].text.split("```{code-cell}")
    return next(cell for cell in cells if f'course.check("{exercise}"' in cell)


def normalize_text(s):
    """As in the first cell of lesson 13."""
    s = s.strip().lower()
    for ch in [" ", "\n", "\t", "。", "，", ",", ".", "!", "！", "?", "：", ":", '"', "'"]:
        s = s.replace(ch, "")
    return s


def test_every_right_form_is_accepted_and_every_wrong_one_is_told_why():
    assert list(FORMS) == list(TASKS)
    for exercise, forms in FORMS.items():
        assert len(forms["right"]) >= 6 <= len(forms["wrong"])
        said = {body: outcome(exercise, answer(exercise, body)) for body in forms["right"]}
        assert {body: one for body, one in said.items() if one != RIGHT} == {}, exercise
        said = {name: outcome(exercise, answer(exercise, body)) for name, body in forms["wrong"].items()}
        untold = {name: one for name, one in said.items() if one in (RIGHT, NOT_DONE) or "\n" in one or len(one) < 15}
        assert untold == {}, exercise
