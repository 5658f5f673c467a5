"""The shape of the project, enforced: who may import whom, what is public."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import heedful
from heedful import core

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "heedful"
FILES = sorted(SOURCE.rglob("*.py"))

LEAVES = {
    "errors", "types", "configs", "files", "display", "hub", "faults", "signals", "redact", "lock", "retries", "background",
    "user_code", "devices", "hosts", "processes",
}  # fmt: skip
"""What every room may import; none of it knows a model."""
MAY_IMPORT = {
    "errors": "",
    "types": "",
    "files": "errors faults",
    "lock": "errors files",
    "faults": "errors",
    "signals": "errors",
    "display": "redact",
    "redact": "",
    "retries": "",
    "background": "",
    "user_code": "errors",
    "processes": "user_code",
    "configs": "errors user_code",
    "devices": "",
    "hosts": "",
    "hub": "",
    "core": "",
    "distributed": "",
    "planning": "",
    "kernels": "core",
    "models": "kernels core planning",
    "data": "distributed",
    "rewards": "models kernels data core distributed",
    "environments": "",
    "engines": "environments models kernels data core distributed",
    "tracking": "",
    "training": "tracking models kernels data core planning distributed",
    "checks": "training rewards models kernels data",
    "algorithms": "checks training engines environments rewards models kernels data core planning distributed",
    "evaluate": "engines rewards models kernels data core",
    "compat": "models core",
    "building_blocks": "algorithms engines rewards models kernels data core",
    # the applications, in apps/: nothing above imports one
    "apps": "course plot",
    "serving": "rewards data distributed models kernels core",
    "doctor": "checks training engines environments rewards models kernels data core planning",
    "device_checks": "algorithms training engines models kernels data planning distributed",
    "plot": "core algorithms training data",
    "report": "plot training engines models kernels data core serving",
    "publishing": "evaluate plot",
    "exam": "plot evaluate engines rewards models kernels data core",
    "migrate": "",
    "choose": "report algorithms training checks data core",
    "label": "data serving",
    "rounds": "label algorithms training evaluate engines rewards models kernels data",
    "demo": "plot algorithms training evaluate rewards engines models kernels data label rounds",
    "course": "demo algorithms models data core",
    "cli": "checks doctor device_checks algorithms training tracking publishing evaluate exam plot demo models kernels data "
    "core rewards planning engines distributed label rounds report course serving choose",
    "__main__": "cli",
    "__init__": "plot course algorithms evaluate exam demo serving rewards engines building_blocks models types",
}
NO_LEAVES = LEAVES - {"configs", "hub"} | {"core"}
"""Rooms that import nothing of heedful but their own files, and what stands in `MAY_IMPORT`."""
MODULES = {"core": "heedful.core", "plot": "heedful.apps.plot", "course": "heedful.apps.course"}
"""Rooms that are public as a whole, as `heedful.core`, and where they are."""
ALGORITHMS = {"sft", "reward_model", "dpo", "kto", "ppo", "online_dpo"}
"""Modules of algorithms/ that hold a trainer: its page."""


def room_named(module):
    """The room of a module; in apps/ that of the application."""
    _, *parts = module.split(".")
    return parts[1] if parts[0] == "apps" and parts[1:] not in ([], ["__init__"]) else parts[0]


def room_of(path):
    return room_named(module_of(path))


def module_of(path):
    return ".".join(("heedful", *path.relative_to(SOURCE).with_suffix("").parts))


@cache
def read(path):
    """The tree of a file, every module that it names in an import, and the names that it uses."""
    tree, modules, used = ast.parse(path.read_text(encoding="utf-8")), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            is_top = node.module in ("heedful", "heedful.apps")
            names = {f"{node.module}.{a.name}" for a in node.names if a.name != "__version__"}
            modules |= names if is_top else {node.module}
        elif isinstance(node, ast.Import):
            modules |= {a.name for a in node.names}
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
    return tree, modules, used


def imported(path):
    """The modules of heedful that a file imports."""
    return {name for name in read(path)[1] if name.startswith("heedful.")}


def test_imports_point_downwards():
    """A room imports those below it, the leaves, and itself."""
    assert {room_of(path) for path in FILES} <= set(MAY_IMPORT), "a new room: say here what it may import"
    wrong = []
    for path in FILES:
        room = room_of(path)
        allowed = {room, "__version__", *MAY_IMPORT[room].split()} | (set() if room in NO_LEAVES else LEAVES)
        wrong += [f"{module_of(path)} imports {name}" for name in imported(path) if room_named(name) not in allowed]
    assert wrong == []


def test_core_is_pure_mathematics():
    """It imports torch, jaxtyping and the standard library, and touches no files."""
    allowed = {"torch", "jaxtyping"} | sys.stdlib_module_names - {"os", "io", "pathlib", "json", "logging"}
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in FILES
        if room_of(path) == "core"
        for name in read(path)[1]
        if name.split(".")[0] not in allowed and not name.startswith("heedful.core")
    ]
    assert wrong == []


def test_no_algorithm_imports_another():
    """Shared mechanics are functions in files of their own; an algorithm can be read, and deleted, alone."""
    pages = {f"heedful.algorithms.{name}" for name in ALGORITHMS}
    rooms = {module_of(path): path for path in FILES if room_of(path) == "algorithms"}
    assert pages <= rooms.keys()
    del rooms["heedful.algorithms.online.in_memory"]  # `ppo_steps`, which nothing of the others imports
    wrong = {module: found for module, path in rooms.items() if (found := imported(path) & (pages - {module}))}
    assert wrong == {}


def test_sampling_knows_no_rewards():
    """Neither by itself nor through what it imports: what is drawn cannot depend on how it will be scored."""
    seen, left = set(), {f"heedful.engines.{path.stem}" for path in (SOURCE / "engines").glob("*.py")}
    while left:
        seen |= left
        files = [SOURCE.joinpath(*module.split(".")[1:]) for module in left]
        files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in files]
        left = {module for path in files if path.is_file() for module in imported(path)} - seen
    assert seen >= {"heedful.engines.generate", "heedful.models.policy", "heedful.core.masking"}, "the walk is broken"
    assert [module for module in seen if module.startswith("heedful.rewards")] == []


def test_every_public_function_of_core_has_a_caller():
    """In the source or in the examples, core's own other functions included."""
    used = set().union(*(read(path)[2] for path in [*FILES, *(ROOT / "examples").glob("*.py")]))
    functions = {name for name in core.__all__ if callable(getattr(core, name))}
    assert {"masked_mean", "gae"} < functions
    assert functions - used == set()


def test_every_module_and_public_class_says_what_it_does():
    silent = []
    for path in FILES:
        tree, *_ = read(path)
        public = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        silent += [f"{path}: {getattr(node, 'name', '')}" for node in [tree, *public] if not ast.get_docstring(node)]
    assert silent == []


ALIASES = {"AnyPrompt", "STOP"}
"""Exported names of types and values that have no name of their own."""


def test_what_is_exported_can_be_imported():
    assert heedful.__all__ == sorted({*heedful.__all__})
    assert dir(heedful) == heedful.__all__
    for name in heedful.__all__:
        value = getattr(heedful, name)
        if name in ALIASES:
            continue
        assert value.__name__ == MODULES.get(name, name)
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
            listed[alias.name] = MODULES.get(alias.name, f"heedful.{node.module}")
    assert sorted(listed) == heedful.__all__
    for name, module in listed.items():
        if name in ALIASES:
            continue
        value = getattr(heedful, name)
        assert (value.__name__ if name in MODULES else value.__module__) == module


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="No heedful attribute train_pop"):
        _ = heedful.train_pop


LOADED = (
    ("import heedful, heedful.errors, heedful.types; from heedful import plot; plot.HEALTHY",
     "torch transformers datasets numpy rich yaml matplotlib"),
    ("import heedful.apps.demo.world; from heedful.cli.main import main; main(['course'])", "torch"),
    ("import torch, jaxtyping", "transformers datasets"),
    ("import heedful.core", ...),
    ("import heedful.data, heedful.rewards, heedful.models, heedful.apps.label", "transformers datasets peft accelerate"),
)  # fmt: skip
"""Code, one after another in a fresh Python, and the libraries that it does not load: they take seconds, and come with the
first name that needs them. core needs nothing but torch, jaxtyping and what those load."""


def test_what_is_not_needed_is_not_loaded():
    program = "import sys\nbefore = set()\n" + "".join(
        f"{code}\nnow = {{name.partition('.')[0] for name in sys.modules}}\n"
        "print('loaded', *(now - before))\nbefore = now\n"
        for code, _ in LOADED
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = [{*line.split()[1:]} for line in done.stdout.splitlines() if line.startswith("loaded ")]
    for (code, unwanted), loaded in zip(LOADED, lines, strict=True):
        if unwanted is ...:
            assert loaded <= {"heedful", "lazy_loader"} | sys.stdlib_module_names, code
        else:
            assert not {*unwanted.split()} & loaded, code


TEXTS = [
    path
    for pattern in ("src/**/*.py", "docs/**/*", "recipes/**/*", "README.md", "*.toml", "*.md")
    for path in ROOT.glob(pattern)
    if path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json"}
]
PRIVATE = re.compile(
    r"(?<!\w)/(work|home|root|Users|mnt|data|scratch|private|tmp)/[\w.-]+|\b\w+\.(local|internal|lan|corp)\b|[A-Z]:\\\\"
    r"|\b(?:10|172|192)\.\d{1,3}\.\d{1,3}\.\d{1,3}\b"
)


def test_no_machine_is_written_down():
    """A path or host of the machine that this was written on means nothing on another."""
    texts = {path: path.read_text(encoding="utf-8") for path in TEXTS}
    assert len(texts) > 400
    assert [(path, found[0]) for path, text in texts.items() for found in PRIVATE.finditer(text)] == []
