"""RELIABILITY.md names tests that are there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "RELIABILITY.md").read_text(encoding="utf-8")


@cache
def those_of(file):
    """The tests of a file, and whether each runs only with the exhaustive ones."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    all_are = any("pytestmark" in ast.unparse(node) and "exhaustive" in ast.unparse(node.value) for node in assigned)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name: all_are or EXHAUSTIVE & set(map(ast.unparse, node.decorator_list)) != set() for node in found}


EXHAUSTIVE = {"pytest.mark.exhaustive"}


def named():
    """Every (file, test) of the page, and whether it is marked; a test without a file is of the file before it in its row."""
    for row in PAGE.splitlines():
        file, is_marked = None, False
        for found in re.finditer(r"\(x\)|;|`([\w/]+\.py)?(?:::)?(test_\w+)?`", row):
            path, test = found.groups()
            if found[0] in ("(x)", ";"):
                is_marked = found[0] == "(x)"
            elif path or test:
                file = path or file
                yield file, test, is_marked


@pytest.mark.parametrize(("file", "test", "is_marked"), dict.fromkeys(named()))
def test_what_the_page_names_is_there_and_marked_as_it_runs(file, test, is_marked):
    """A file is marked if all its tests are exhaustive."""
    assert (ROOT / "tests" / file).is_file()
    there = those_of(file)
    assert not test or test in there
    assert is_marked == (there[test] if test else bool(there) and all(there.values()))


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
