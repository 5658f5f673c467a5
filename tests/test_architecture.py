"""The shape of the project, enforced: who may import whom, what is public."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import heedful

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "heedful"
FILES = sorted(SOURCE.rglob("*.py"))

LEAVES = {
    "errors",
    "types",
    "configs",
    "files",
    "display",
    "hub",
    "faults",
    "signals",
    "redact",
    "lock",
    "retries",
    "background",
    "user_code",
    "devices",
}
"""What every room may import; none of it knows a model."""
MAY_IMPORT = {
    "errors": set(),
    "types": set(),
    "files": {"errors", "faults"},
    "lock": {"errors", "files"},
    "faults": {"errors"},
    "signals": {"errors"},
    "display": {"redact"},
    "redact": set(),
    "retries": set(),
    "background": set(),
    "user_code": {"errors"},
    "configs": {"errors", "user_code"},
    "devices": set(),
    "hub": set(),
    "core": set(),
    "distributed": set(),
    "planning": set(),
    "kernels": {"core"},
    "models": {"kernels", "core", "planning"},
    "data": {"distributed"},
    "serving": set(),
    "rewards": {"models", "kernels", "data", "core", "serving", "distributed"},
    "engines": {"models", "kernels", "data", "core", "distributed"},
    "tracking": set(),
    "training": {"tracking", "models", "kernels", "data", "core", "planning", "distributed"},
    "checks": {"training", "rewards", "models", "kernels", "data"},
    "algorithms": {
        "checks",
        "training",
        "engines",
        "rewards",
        "models",
        "kernels",
        "data",
        "core",
        "planning",
        "distributed",
    },
    "doctor": {"checks", "training", "engines", "rewards", "models", "kernels", "data", "core", "planning"},
    "device_checks": {"algorithms", "training", "engines", "models", "kernels", "data", "planning", "distributed"},
    "evaluate": {"engines", "rewards", "models", "kernels", "data", "core"},
    "plot": {"core", "algorithms", "training", "data"},
    "report": {"plot", "training", "engines", "models", "kernels", "data", "core", "serving"},
    "publishing": {"evaluate", "plot"},
    "exam": {"plot", "evaluate", "engines", "rewards", "models", "kernels", "data", "core"},
    "label": {"data", "serving"},
    "rounds": {"label", "algorithms", "training", "evaluate", "engines", "rewards", "models", "kernels", "data"},
    "building_blocks": {"algorithms", "engines", "rewards", "models", "kernels", "data", "core"},
    "demo": {
        "plot",
        "algorithms",
        "training",
        "evaluate",
        "rewards",
        "engines",
        "models",
        "kernels",
        "data",
        "label",
        "rounds",
    },
    "course": {"demo", "algorithms", "models", "data", "core"},
    "cli": {
        "checks",
        "doctor",
        "device_checks",
        "algorithms",
        "training",
        "tracking",
        "publishing",
        "evaluate",
        "exam",
        "plot",
        "demo",
        "models",
        "kernels",
        "data",
        "core",
        "rewards",
        "planning",
        "engines",
        "distributed",
        "label",
        "rounds",
        "report",
    },
    "__main__": {"cli"},
    "__init__": {
        "plot",
        "algorithms",
        "evaluate",
        "exam",
        "demo",
        "rewards",
        "engines",
        "building_blocks",
        "models",
        "types",
    },
}
MODULES = {"core", "plot"}
"""Rooms that are public as a whole: `heedful.core`."""
NO_LEAVES = LEAVES - {"configs", "hub"} | {"core"}
"""Rooms that import nothing of heedful but their own files, and what stands in `MAY_IMPORT`."""
ALGORITHMS = {"sft", "reward_model", "dpo", "kto", "ppo", "online_dpo"}
"""Modules of algorithms/ that hold a trainer: its page."""
TRAINERS = {
    "train_sft",
    "train_reward",
    "train_dpo",
    "train_kto",
    "train_ppo",
    "train_grpo",
    "train_online_dpo",
}


def room_of(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def modules_imported(path):
    """Every module of heedful that a file names in an import, with its line; relative imports are not used."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            if node.module == "heedful":
                yield from ((f"heedful.{a.name}", node.lineno) for a in node.names if a.name != "__version__")
            elif (node.module or "").startswith("heedful."):
                yield node.module, node.lineno
        elif isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names if a.name.split(".")[0] == "heedful")


def named(path):
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_point_downwards(path):
    """Design, section 1: a room imports those below it, the leaves, and itself."""
    room = room_of(path)
    allowed = {room} | MAY_IMPORT[room] | (set() if room in NO_LEAVES else LEAVES)
    for module, line in modules_imported(path):
        target = module.split(".")[1]
        assert target in {*allowed, "__version__"}, f"{named(path)}:{line}: {room} may not import {module}"


def test_every_room_has_its_rule():
    assert {room_of(path) for path in FILES} <= set(MAY_IMPORT), "a new room: say here what it may import"


PAGES = [path for path in FILES if room_of(path) == "algorithms"]
TRAIN = [path for path in FILES if room_of(path) in {"algorithms", "training"}]


def test_no_algorithm_imports_another():
    """Shared mechanics are functions in files of their own; an algorithm can be read, and deleted, alone."""
    pages = {f"heedful.algorithms.{name}" for name in ALGORITHMS}
    for path in PAGES:
        if path.name == "in_memory.py":  # `ppo_steps`, which nothing of the others imports
            continue
        imported = {module for module, _ in modules_imported(path)}
        own = "heedful." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        assert imported & (pages - {own}) == set(), named(path)
    assert pages <= {"heedful." + ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in PAGES}


def test_a_trainer_is_a_loop_that_fits_on_a_page():
    """The online ones have their own loop; those on given texts share `fit` and name what differs."""
    found = {}
    for path in TRAIN:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("train_"):
                found[node.name] = node.end_lineno - node.lineno + 1
    assert found.keys() == TRAINERS
    assert max(found.values()) <= 60, found


def stored_callables(tree):
    """Fields and attributes that are annotated as functions or made by partial, and parameters of __init__."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "functools":
            yield from (f"{node.lineno}: functools.{a.name}" for a in node.names if a.name.startswith("partial"))
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("functools.partial"):
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ClassDef):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
            parameters = [a for i in inits for a in [*i.args.posonlyargs, *i.args.args, *i.args.kwonlyargs]]
            for item in [*fields, *(a for a in parameters if a.annotation is not None)]:
                if "Callable" in ast.unparse(item.annotation):
                    yield f"{item.lineno}: {ast.unparse(item)}"


OF_THE_USER = {SOURCE / "training" / "callbacks.py"}
"""Holds the functions of the user's that a run calls between two steps: nothing of an algorithm is in them."""


@pytest.mark.parametrize("path", [path for path in TRAIN if path not in OF_THE_USER], ids=named)
def test_no_loop_is_made_of_callables(path):
    """Nothing keeps functions for later: `fit` calls those that it is given. A table of functions is not meant."""
    found = list(stored_callables(ast.parse(path.read_text(encoding="utf-8"))))
    assert found == [], named(path)


def test_stored_callables_would_be_noticed():
    """Negative control."""
    for code in (
        "from functools import partial",
        "import functools\nx = functools.partial(print)",
        "class Loop:\n    step: Callable[[int], None]",
        "class Loop:\n    def __init__(self, *, step: Callable[[int], None] | None = None): ...",
    ):
        assert len(list(stored_callables(ast.parse(code)))) == 1, code


def test_sampling_knows_no_rewards():
    """Neither by itself nor through what it imports: what is drawn cannot depend on how it will be scored."""
    seen, left = set(), {f"heedful.engines.{path.stem}" for path in (SOURCE / "engines").glob("*.py")}
    while left:
        seen |= left
        files = [SOURCE.joinpath(*module.split(".")[1:]) for module in left]
        files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in files]
        left = {module for path in files if path.is_file() for module, _ in modules_imported(path)} - seen
    assert seen >= {"heedful.engines.generate", "heedful.models.policy", "heedful.core.masking"}, "the walk is broken"
    assert [module for module in seen if module.startswith("heedful.rewards")] == []


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) == "core"], ids=named)
def test_core_is_pure_mathematics(path):
    """It imports torch, jaxtyping and the standard library."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            top = module.split(".")[0]
            assert top in {"torch", "jaxtyping", "heedful"} | sys.stdlib_module_names, f"{named(path)} imports {module}"
            assert top != "heedful" or module.startswith("heedful.core"), f"{named(path)} imports {module}"
            assert top not in {"os", "io", "pathlib", "json", "logging"}, f"{named(path)}: core touches no files"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_module_and_public_function_says_what_it_does(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{named(path)} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{named(path)}:{node.lineno}: {node.name} has no docstring"


ALIASES = {"AnyPrompt", "STOP"}
"""Exported names of types and values that have no name of their own."""


def test_what_is_exported_can_be_imported():
    assert heedful.__all__ == sorted(heedful.__all__)
    assert len(set(heedful.__all__)) == len(heedful.__all__)
    assert dir(heedful) == heedful.__all__
    for name in heedful.__all__:
        value = getattr(heedful, name)
        if name in ALIASES:
            continue
        assert value.__name__ == (f"heedful.{name}" if name in MODULES else name)
        assert value.__doc__, f"heedful.{name} has no docstring"


def test_exports_are_listed_once_with_where_they_come_from():
    """One list, which lazy_loader and type checkers read; each name is said to be where it is defined."""
    *body, version = ast.parse((SOURCE / "__init__.pyi").read_text(encoding="utf-8")).body
    assert ast.unparse(version) == "__version__: str"
    listed = {}
    for node in body:
        assert isinstance(node, ast.ImportFrom)
        assert node.level == 1
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name} is not exported to type checkers without `as`"
            assert alias.name not in listed
            listed[alias.name] = f"heedful.{node.module or alias.name}"
    assert sorted(listed) == heedful.__all__
    for name, module in listed.items():
        if name in ALIASES:
            continue
        value = getattr(heedful, name)
        assert (value.__name__ if name in MODULES else value.__module__) == module


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="No heedful attribute train_pop"):
        _ = heedful.train_pop


def loaded_by(code, after="pass"):
    """Packages that a fresh Python loads for some code, after other code."""
    loaded = "{module.partition('.')[0] for module in sys.modules}"
    program = f"import sys\n{after}\nbefore = {loaded}\n{code}\nprint(*({loaded} - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_core_needs_torch_and_jaxtyping_alone():
    """And what those load. lazy_loader is what `import heedful` needs."""
    extra = loaded_by("import heedful.core", after="import torch, jaxtyping")
    assert "heedful" in extra
    assert extra <= {"heedful", "lazy_loader"} | sys.stdlib_module_names


def test_packages_load_no_library_of_models_or_data():
    """Which takes seconds; it comes with the first name that needs it, such as `heedful.models.load_policy`."""
    packages = ("core", "data", "rewards", "models", "label")
    loaded = loaded_by(f"import {', '.join(f'heedful.{name}' for name in packages)}", after="import torch")
    assert not {"transformers", "datasets", "peft", "accelerate"} & loaded


def test_importing_heedful_loads_nothing():
    loaded = loaded_by("import heedful, heedful.errors, heedful.types; from heedful import plot; plot.HEALTHY")
    assert not {"torch", "transformers", "datasets", "numpy", "rich", "yaml", "matplotlib"} & loaded


TEXTS = sorted(
    path
    for pattern in ("src/**/*.py", "docs/**/*", "recipes/**/*", "README.md", "*.toml", "*.md")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json"}
)
PRIVATE = re.compile(
    r"(?<!\w)/(work|home|root|Users|mnt|data|scratch|private|tmp)/[\w.-]+|\b\w+\.(local|internal|lan|corp)\b|[A-Z]:\\\\"
)
ADDRESS = re.compile(r"\b(?:10|172|192)\.\d{1,3}\.\d{1,3}\.\d{1,3}\b")


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_machine_is_written_down(path):
    """A path or host of the machine that this was written on means nothing on another."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = PRIVATE.search(line) or ADDRESS.search(line)
        assert found is None, f"{path.relative_to(ROOT)}:{number}: {found.group()}"
