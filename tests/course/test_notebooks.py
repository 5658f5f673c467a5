"""Notebooks as students hand them in, checked by ``heedful course check``: odd cells, damaged files, the exit status."""

import functools
import json
import re

import numpy as np
import pytest
import torch

from heedful.course.exercises import RIGHT, outcome

RUNS = {
    "plain": "def f(x):\n    return 2 * x\nCHECK(f)",
    "a lambda": "f = lambda x: 2 * x\nCHECK(f)",
    "a lambda in the call": "CHECK(lambda x: 2 * x)",
    "a nested function": "def make():\n    def f(x):\n        return 2 * x\n    return f\nCHECK(make())",
    "a method": "class Of:\n    def f(self, x):\n        return 2 * x\nCHECK(Of().f)",
    "an attribute of a module": "import math\nCHECK(lambda x: math.fsum([x, x]))",
    "a helper in its own cell": ["def twice(x):\n    return 2 * x", "def f(x):\n    return twice(x)\nCHECK(f)"],
    "a helper of a helper": ["import math as m", "two = m.sqrt(4)", "g = lambda x: two * x", "CHECK(lambda x: g(x))"],
    "an import in another cell": ["import operator", "def f(x):\n    return operator.mul(2, x)\nCHECK(f)"],
    "a star import": ["from operator import *", "def f(x):\n    return mul(2, x)\nCHECK(f)"],
    "a table that another cell fills": [
        "table = {}", "table['双'] = 2", "table.update(三=3)", "CHECK(lambda x: table['双'] * x if '三' in table else 0)"
    ],
    "a cell that counts up": ["n = 1", "n += 1", "CHECK(lambda x: n * x)"],
    "%%time": "%%time\ndef f(x):\n    return 2 * x\nCHECK(f)",
    "a line with a magic": "%matplotlib inline\nf = lambda x: 2 * x\n!true\nCHECK(f)",
    "the check in another cell": ["def f_of_18(x):\n    return 2 * x", "CHECK(f_of_18)"],
    "await": "import asyncio\nawait asyncio.sleep(0)\nCHECK(lambda x: 2 * x)",
    "another name of the check": "from heedful.course import check as grade, check\ncheck(NUMBER, lambda x: 2 * x)",
    "what the lesson computes for minutes": ["slow = forever()", "def f(x):\n    slow = 2\n    return slow * x\nCHECK(f)"],
}  # fmt: skip
FAILS = {
    "sys.exit(0) first": ("import sys\nsys.exit(0)\nCHECK(lambda x: 2 * x)", r"cell \d+ stopped with SystemExit: 0"),
    "sys.exit(0) inside": ("import sys\nCHECK(lambda x: sys.exit(0))", r"your function stopped with SystemExit: 0"),
    "os._exit(0)": (["import os\nos._exit(0)", "CHECK(lambda x: os.name)"], r"cell \d+ ended Python"),
    "a syntax error": ("def f(x):\n    return 2 *\nCHECK(f)", r"cell \d+ stopped with SyntaxError: .* \(line 2 of"),
    "an error": ("y = 1\n{}['二']\nCHECK(print)", r"cell \d+ stopped with KeyError: '二' \(line 2 of the cell\)"),
    "a helper's error": (["helper = 1 / 0", "CHECK(lambda x: helper)"], r"cell \d+ stopped with ZeroDivisionError"),
    "input()": ("CHECK(lambda x: float(input()))", r"your function stopped with StdinNotImplementedError"),
    "input() at the top": ("n = input('几？')\nCHECK(lambda x: n)", r"cell \d+ asks for input"),
    "an unknown magic": ("%%no_such_magic\nCHECK(lambda x: 2 * x)", r"cell \d+ (stopped|did not call)"),
    "a check in a comment": ("# CHECK(f)", r"cell \d+ did not call course.check"),
    "printed as right": ("print(NUMBER + ': right')\nCHECK(lambda x: x)", r"double\(3\): 3 came out, expected 6"),
    "not done": ("def f(x):\n    '''做。'''\n    ...\nCHECK(f)", r"not done yet"),
    "right, and then an exit": ("CHECK(lambda x: 2 * x)\nimport os\nos._exit(0)", RIGHT),
}  # fmt: skip


@pytest.fixture
def lesson_98(course_of):
    """The notebook of a lesson with an exercise for each odd cell."""
    count = len(RUNS) + len(FAILS)
    hidden = (
        "from heedful.course.checks import same\n"
        "def check(answer):\n    same(answer(3), 6, 'double(3)')\n    same(answer(4.5), 9.0, 'double(4.5)')\n"
        f"globals().update({{f'check_{{i}}': check for i in range({count + 1})}})\n"
    )
    calls = [f'course.check("98.{i}", f)' for i in range(1, count + 2)]
    return course_of(98, "double", "\n".join(["# 翻倍", *calls]), hidden) / "98_double.ipynb"


def notebook(*cells):
    """The text of a notebook; a cell is its source, or a dict as it is."""
    made = [
        cell if not isinstance(cell, str) else {"cell_type": "code", "metadata": {}, "outputs": [], "source": cell}
        for cell in cells
    ]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": made}, ensure_ascii=False)


def test_cells_run_as_in_a_notebook_and_every_failure_is_told(heedful, lesson_98):
    cells = [
        "from heedful import course\ndef forever():\n    import time\n    time.sleep(1000)",
        {"cell_type": "markdown"},
    ]
    expected = []
    for number, (sources, said) in enumerate([*((one, RIGHT) for one in RUNS.values()), *FAILS.values()], start=1):
        for source in [sources] if isinstance(sources, str) else sources:
            cells.append(source.replace("CHECK(", f'course.check("98.{number}", ').replace("NUMBER", f'"98.{number}"'))
        expected.append(rf"98\.{number}: ({said})")
    lesson_98.write_text(notebook(*cells), encoding="utf-8")
    checked = heedful("course", "check", "98")
    assert checked.status == 1
    assert checked.err == ""
    names = [*RUNS, *FAILS, "no cell"]
    expected.append(rf'98\.{len(names)}: 98_double\.ipynb has no cell with course\.check\("98\.{len(names)}", NAME\)$')
    lines = checked.out.splitlines()
    assert len(lines) == len(names)
    assert [
        (name, line) for name, line, form in zip(names, lines, expected, strict=True) if not re.match(form, line)
    ] == []


def test_a_cell_without_an_end_is_stopped(heedful, course_of):
    folder = course_of(98, "double", '# 翻倍\ncourse.check("98.1", f)', "def check_1(answer):\n    answer(3)\n")
    endless = 'from heedful import course\ndef f(x):\n    while True:\n        pass\ncourse.check("98.1", f)'
    (folder / "98_double.ipynb").write_text(notebook(endless), encoding="utf-8")
    checked = heedful("course", "check", "98", "--seconds", "1")
    assert (checked.status, checked.err) == (1, "")
    assert checked.out.startswith("98.1: cell 1 ran longer than 1 s and was stopped")


DAMAGED = {
    "": "it is empty",
    "no JSON": "line 1",
    "[]": "must hold a JSON object",
    '{"nbformat": 4}': "it has no cells",
    '{"nbformat": 4, "cells": []}': "has no cell with code",
    '{"nbformat": 4, "cells": {}}': "its cells must be a list",
    '{"nbformat": 3, "worksheets": [], "cells": []}': "its nbformat is 3, and must be 4",
    '{"nbformat": "four", "cells": []}': "its nbformat is 'four', and must be 4",
    '{"cells": []}': "its nbformat is None, and must be 4",
    notebook({"cell_type": "markdown", "source": "只有文字"}): "has no cell with code",
    notebook({"cell_type": "raw", "source": "生"}): "has no cell with code",
    notebook({"cell_type": "code"}): "cell 1 has no source",
    notebook("x = 1", {"cell_type": "code", "source": None}): "cell 2 has no source",
    notebook("x = 1", {"cell_type": "code", "source": ["x", 1]}): "cell 2 has no source",
    notebook("x = 1", {"source": "y = 2"}): "cell 2 has no cell_type",
    notebook("x = 1", {"outputs": []}): "cell 2 has no cell_type",
    notebook("x = 1").replace('"x = 1"', "\"x = '\\ud800'\""): "cell 1 holds half a character",
    '{"nbformat": 4, "cells": ["x = 1"]}': "cell 1 has no cell_type",
    "[" * 100_000: "98_double.ipynb",
}


def test_a_damaged_notebook_is_told_in_one_line(heedful, lesson_98):
    for content, said in DAMAGED.items():
        lesson_98.write_text(content, encoding="utf-8")
        checked = heedful("course", "check", "98")
        assert checked.status == 2
        assert said in checked.message
        assert "98_double.ipynb" in checked.message
        assert "start the lesson again with --overwrite" in checked.message
        assert "Traceback" not in checked.err


class Twice:
    def __call__(self, x):
        return 2 * x

    def method(self, x, times=2):
        return times * x


def nested():
    def inner(x):
        return 2 * x

    return inner


def test_the_form_of_a_function_and_of_its_result_does_not_matter(lesson_98):
    for answer in (
        lambda x: 2 * x,
        Twice(),
        functools.partial(Twice().method, times=2),
        nested(),
        lambda x: (np.float32(2 * x),),
        lambda x: np.array([[2 * x]]),
        lambda x: torch.tensor(2 * x, dtype=torch.float64),
        lambda x: torch.tensor([2 * x], requires_grad=x != int(x), dtype=torch.float32),
        lambda x: torch.tensor(2 * x, dtype=torch.bfloat16),
        lambda x: iter([2 * x]),
    ):
        assert outcome("98.1", answer) == RIGHT
