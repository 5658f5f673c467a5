"""RELIABILITY.md names tests that are there."""

import ast
import re
from functools import cache
from pathlib import Path

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


def test_what_the_page_names_is_there_and_marked_as_it_runs():
    """A file is marked if all its tests are exhaustive."""
    for file, test, is_marked in dict.fromkeys(named()):
        assert (ROOT / "tests" / file).is_file(), file
        there = those_of(file)
        assert not test or test in there, f"{file} has no {test}"
        assert is_marked == (there[test] if test else bool(there) and all(there.values())), f"{file}::{test}: (x)?"
