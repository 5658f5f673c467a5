"""docs/anatomy.md against the code: its functions exist, and its two lists of modules follow the imports of the loop.

The checks are functions of the page's text and a folder of source, so that the last tests can break either and see them fail.
"""

import ast
import functools
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "heedful"
PAGE = (ROOT / "docs" / "anatomy.md").read_text(encoding="utf-8")
MOST_MODULES = 12
MOST_LINES = 2300
LOOP = "algorithms/ppo.py"


def section(page, heading):
    """The text below a heading, up to the next of its level."""
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def opened(page):
    """The modules to open, in the page's order."""
    return re.findall(r"^\d+\. \[`([\w/]+\.py)`\]\(\.\./src/heedful/\1\)", section(page, "The modules to open"), re.M)


def unopened(page):
    """What need not be opened: rooms with a slash at their end, modules with ``.py``."""
    lines = section(page, "Supporting modules").splitlines()
    heads = [line.partition(":")[0] for line in lines if line.startswith("- ")]
    return [name for head in heads for name in re.findall(r"`([\w/]+(?:/|\.py))`", head)]


@functools.cache
def defined(path):
    """Functions, methods, classes and constants of a file; a method is ``Class.name``."""
    return set(names_in(path))


def names_in(path):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def wrong_functions(page):
    """Linked names that their files do not define, and rows of the table without a link."""
    wrong = []
    for name, file in re.findall(r"\[`([\w.]+)`\]\(\.\./src/heedful/([\w/]+\.py)\)", page):
        path = SOURCE / file
        if not path.is_file():
            wrong.append(f"{file}: no such file")
        elif name not in defined(path):
            wrong.append(f"{file} defines no {name}")
    rows = re.findall(r"^\| (\d+) \|(.*)$", page, re.M)
    wrong += [f"step {number} links to no function" for number, row in rows if "](../src/" not in row]
    numbers = [int(number) for number, _ in rows]
    return wrong + ([] if numbers == list(range(1, len(rows) + 1)) else [f"steps are numbered {numbers}"])


def wrong_size(page, source=SOURCE):
    """More modules, or more lines in them, than anyone is asked to read."""
    modules = opened(page)
    lines = sum(len((source / name).read_text(encoding="utf-8").splitlines()) for name in modules)
    wrong = [f"{len(modules)} modules to open"] if not 1 <= len(modules) <= MOST_MODULES else []
    wrong += [f"{name} twice" for name in set(modules) if modules.count(name) > 1]
    return wrong + ([f"{lines} lines to open"] if lines >= MOST_LINES else [])


@functools.cache
def core_modules(source):
    """The module of core that each public name comes from."""
    found = {}
    for path in (source / "core").glob("*.py"):
        found |= dict.fromkeys(defined(path), f"core/{path.name}")
    return found


def file_of(module, source):
    """``heedful.data.batches`` -> ``data/batches.py``; a package is its folder, ``rewards/``."""
    name = module.removeprefix("heedful.").replace(".", "/")
    return f"{name}.py" if (source / f"{name}.py").is_file() else f"{name}/"


def imported(name, source):
    """Modules of heedful that a module uses; of ``core``, those whose names it uses."""
    tree = ast.parse((source / name).read_text(encoding="utf-8"))
    of_core = core_modules(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("heedful."):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"  # from heedful.training import run
                is_module = (source / file_of(inner, source)).is_file()
                yield file_of(inner if is_module else node.module, source)
        elif isinstance(node, ast.ImportFrom) and node.module == "heedful":
            yield from (file_of(f"heedful.{alias.name}", source) for alias in node.names if alias.name != "core")
        elif isinstance(node, ast.Import):
            yield from (file_of(a.name, source) for a in node.names if a.name.startswith("heedful."))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "core":
            yield of_core[node.attr]


def covers(entry, module):
    return module.startswith(entry) if entry.endswith("/") else entry == module


def wrong_lists(page, source=SOURCE):
    """Modules that a module to open imports and the page does not mention, and entries that none of them imports."""
    modules, others = opened(page), unopened(page)
    wrong = [] if LOOP in modules else [f"{LOOP} is not among the modules to open"]
    wrong += [f"{name} is in both lists" for name in modules for entry in others if covers(entry, name)]
    wrong += [f"{entry} does not exist" for entry in others if not (source / entry).exists()]
    uses = {name: set(imported(name, source)) for name in modules if (source / name).is_file()}
    wrong += [
        f"{name} imports {used}, which the page does not mention"
        for name, all_used in uses.items()
        for used in sorted(all_used)
        if used not in modules and not any(covers(entry, used) for entry in others)
    ]
    reached = [LOOP]
    for name in reached:
        reached += [used for used in uses.get(name, ()) if used in modules and used not in reached]
    wrong += [f"{name} is not reached from {LOOP}" for name in modules if name not in reached]
    used_by_any = {used for all_used in uses.values() for used in all_used}
    return wrong + [
        f"{entry} is imported by no module to open"
        for entry in others
        if not any(covers(entry, used) for used in used_by_any)
    ]


def test_every_function_exists_in_the_linked_file():
    assert wrong_functions(PAGE) == []
    assert len(re.findall(r"^\| \d+ \|", PAGE, re.M)) >= 15, "the table is not found"


def test_there_are_few_modules_to_open():
    assert wrong_size(PAGE) == []


def test_the_lists_follow_the_imports():
    assert wrong_lists(PAGE) == []
    assert {"kernels/", "algorithms/online/loop.py"} <= set(unopened(PAGE)), "the second list is not found"


@pytest.mark.parametrize(
    ("check", "old", "new", "said"),
    [
        (wrong_functions, "[`whiten`]", "[`whitten`]", "core/masking.py defines no whitten"),
        (wrong_functions, "[`Policy.forward`]", "[`Policy.forwards`]", "models/policy.py defines no Policy.forwards"),
        (wrong_functions, "heedful/core/kl_control.py", "heedful/core/klcontrol.py", "core/klcontrol.py: no such file"),
        (wrong_functions, "[`optimizer_step`](../src/heedful/training/optimization.py)", "it", "step 17 links to no"),
        (wrong_functions, "| 9 | advantages", "| 10 | advantages", "steps are numbered"),
        (
            wrong_size,
            "1. [`algorithms/ppo.py`]",
            "0. [`training/run.py`](../src/heedful/training/run.py): x.\n1. [`algorithms/ppo.py`]",
            "13 modules to open",
        ),
        (wrong_size, "2. [`algorithms/online/rollout.py`](../src/heedful/algorithms/online/rollout.py)", "2. It", None),
        (
            wrong_lists,
            "2. [`algorithms/online/rollout.py`](../src/heedful/algorithms/online/rollout.py)",
            "2. It",
            "algorithms/ppo.py imports algorithms/online/rollout.py, which the page does not mention",
        ),
        (wrong_lists, "- `data/`", "- data", "imports data/batches.py, which the page does not mention"),
        (wrong_lists, "- `core/score_norm.py`", "- It", "imports core/score_norm.py, which the page does not mention"),
        (
            wrong_lists,
            "- `user_code.py`",
            "- `user_code.py`, `algorithms/sft.py`",
            "algorithms/sft.py is imported by no module",
        ),
        (wrong_lists, "- `user_code.py`", "- `user_code.py`, `models/policy.py`", "models/policy.py is in both lists"),
        (wrong_lists, "- `user_code.py`", "- `user_code.py`, `training/walks.py`", "training/walks.py does not exist"),
        (wrong_lists, "9. [`core/policy_losses.py`](../src/heedful/core/policy_losses.py)",
         "9. [`algorithms/sft.py`](../src/heedful/algorithms/sft.py)", "algorithms/sft.py is not reached from"),
    ],
)  # fmt: skip
def test_each_check_can_fail(check, old, new, said):
    """Negative controls: one flaw put into the page, and the check that is for it says so; None: it has no objection."""
    assert old in PAGE
    found = "\n".join(check(PAGE.replace(old, new)))
    assert (said in found) if said else found == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "from heedful.algorithms.dpo import train_dpo",
            "algorithms/ppo.py imports algorithms/dpo.py, which the page does not",
        ),
        ("from heedful.algorithms import dpo", "algorithms/ppo.py imports algorithms/dpo.py, which the page does not"),
        ("import heedful.hub", "algorithms/ppo.py imports hub.py, which the page does not"),
        ("core.dpo_loss", "algorithms/ppo.py imports core/preference_losses.py, which the page does not"),
        ("from heedful.kernels.packing import token_states", ""),
    ],
)
def test_a_new_import_is_noticed(line, said, tmp_path):
    """Negative control on the side of the code; an import of a room that is named as a whole is none."""
    source = tmp_path / "heedful"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    with (source / "algorithms" / "ppo.py").open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    found = wrong_lists(PAGE, source)
    assert (len(found) == 1 and said in found[0]) if said else found == []
