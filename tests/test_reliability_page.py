"""RELIABILITY.md names tests that are there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "RELIABILITY.md").read_text(encoding="utf-8")


@cache
def functions(file):
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def named():
    """Every (file, test) of the page; a test without a file is of the file before it in its row."""
    for row in PAGE.splitlines():
        file = None
        for path, test in re.findall(r"`([\w/]+\.py)?(?:::)?(test_\w+)?`", row):
            file = path or file
            if path or test:
                yield file, test


@pytest.mark.parametrize(("file", "test"), dict.fromkeys(named()))
def test_what_the_page_names_is_there(file, test):
    assert (ROOT / "tests" / file).is_file()
    assert not test or test in functions(file)


def test_every_finding_and_fault_has_a_row():
    assert {int(n) for n in re.findall(r"^\| (\d+) \|", PAGE, re.M)} == set(range(1, 31))
    ids = set(re.findall(r"^\| ([A-Z]\d) \|", PAGE, re.M))
    wanted = {"K": 5, "D": 6, "R": 6, "G": 6, "N": 3, "V": 4, "J": 3, "C": 1}
    assert ids == {f"{letter}{n}" for letter, last in wanted.items() for n in range(1, last + 1)} | {
        "L2",
        "L3",
        "S3",
        "S4",
        "S5",
        "S6",
    }
