"""The functions that docs/anatomy.md links to exist in the linked files."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "heedful"
PAGE = (ROOT / "docs" / "anatomy.md").read_text(encoding="utf-8")


def defined(path):
    """Functions, methods, classes and constants of a file; a method is ``Class.name``."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def wrong_links(page):
    """Linked names that their files do not define, and rows of the table without a link."""
    wrong = []
    for name, file in re.findall(r"\[`([\w.]+)`\]\(\.\./src/heedful/([\w/]+\.py)\)", page):
        path = SOURCE / file
        if not path.is_file():
            wrong.append(f"{file}: no such file")
        elif name not in {*defined(path)} and not name.endswith(".py"):
            wrong.append(f"{file} defines no {name}")
    rows = re.findall(r"^\| (\d+) \|(.*)$", page, re.M)
    return wrong + [f"step {number} links to no function" for number, row in rows if "](../src/" not in row]


WRONG = {
    ("[`whiten`]", "[`whitten`]"): "core/masking.py defines no whitten",
    ("[`Policy.forward`]", "[`Policy.forwards`]"): "models/policy.py defines no Policy.forwards",
    ("heedful/core/kl_control.py", "heedful/core/klcontrol.py"): "core/klcontrol.py: no such file",
    ("[`optimizer_step`](../src/heedful/training/optimization.py)", "it"): "step 17 links to no",
}


def test_every_function_exists_in_the_linked_file():
    """And a wrong link is noticed."""
    assert wrong_links(PAGE) == []
    for (old, new), said in WRONG.items():
        assert old in PAGE
        assert said in "\n".join(wrong_links(PAGE.replace(old, new)))
