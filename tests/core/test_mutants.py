"""The tests of the tests: every mistake in `mutants/` is put into the mathematics, and the tests named beside it must fail.

`mutants/MODULE.diff` has for each a line with the mistake and what kills it (a test of `test_MODULE.py`, or `file::test`),
then the old text, which occurs once in the module's source, and the new one. The mutated functions take the place of the real
ones by their code object, so every reference sees them; the named tests run in this process; then the real code is put
back. A mutant counts as killed where a test fails by an assertion. Run with ``-s`` to see the count.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.autograd.gradcheck import GradcheckError

import heedful.core

ROOMS = {"head_divergence": "kernels", "head_logprobs": "kernels", "layers": "kernels.cpu"}
"""Where a module is, if not in core; its tests are in tests/kernels."""
CORE = Path(heedful.core.__file__).parent
TESTS = {
    path.stem: path for room in ("core", "kernels") for path in (Path(__file__).parents[1] / room).glob("test_*.py")
}


@dataclass(frozen=True)
class Mutant:
    module: str
    mistake: str
    old: str
    new: str
    killers: tuple[str, ...]


ROW = re.compile(r"^(\S.*) \| (.*)\n((?:-.*\n)+)((?:\+.*\n)+)", re.MULTILINE)


def read_mutants(path):
    """The mutants of a module: each is its mistake and its killers, the old lines, and the new ones."""
    text, module = path.read_text(encoding="utf-8"), path.stem
    assert not ROW.sub("", text), f"{path} has lines that are no mutant"
    found = []
    for mistake, killers, *texts in ROW.findall(text):
        old, new = ("\n".join(line[2:] for line in lines.splitlines()) for lines in texts)
        names = [name if "::" in name else f"test_{module}::{name}" for name in killers.split(", ")]
        found.append(Mutant(module, mistake, old, new, tuple(names)))
    return found


MUTANTS = [m for path in sorted((Path(__file__).parent / "mutants").glob("*.diff")) for m in read_mutants(path)]
HARMLESS = Mutant("masking", "none", "0.0).sum()", "0).sum()", ("test_masking::test_golden_masked_sum",))


def full_name(module):
    return f"heedful.{ROOMS.get(module, 'core')}.{module}"


@functools.cache
def source_of(module):
    return Path(importlib.import_module(full_name(module)).__file__).read_text(encoding="utf-8")


def own_functions(namespace, module):
    """The innermost functions that a module defines, by qualified name; classes stand for their methods."""
    found = {}
    for name, value in namespace.items():
        members = {f"{name}.{k}": v for k, v in vars(value).items()} if inspect.isclass(value) else {name: value}
        for qualified, member in members.items():
            getter = member.fget if isinstance(member, property) else member
            getter = getter.__func__ if isinstance(getter, classmethod) else getter
            inner = inspect.unwrap(getter) if callable(getter) else None
            if inspect.isfunction(inner) and inner.__module__ == module:
                found[qualified] = inner
    return found


@contextlib.contextmanager
def planted(module, source):
    """Give a module the functions and constants of another source, for as long as the block runs."""
    real = importlib.import_module(full_name(module))
    namespace = {"__name__": full_name(module)}
    exec(compile(source, f"<{module}>", "exec"), namespace)  # the point of this file
    parts = ("__code__", "__defaults__", "__kwdefaults__")
    theirs, ours = own_functions(namespace, full_name(module)), own_functions(vars(real), full_name(module))
    assert theirs.keys() == ours.keys()
    saved = {name: [getattr(function, part) for part in parts] for name, function in ours.items()}
    constants = {k: v for k, v in vars(real).items() if k.isupper() and isinstance(v, int | float | str)}
    caches = [value for value in vars(real).values() if hasattr(value, "cache_clear")]
    try:
        for cached in caches:
            cached.cache_clear()
        for name, function in ours.items():
            for part in parts:
                setattr(function, part, getattr(theirs[name], part))
        for name in constants:
            setattr(real, name, namespace[name])
        yield
    finally:
        for name, function in ours.items():
            for part, value in zip(parts, saved[name], strict=True):
                setattr(function, part, value)
        for name, value in constants.items():
            setattr(real, name, value)
        for cached in caches:
            cached.cache_clear()


class Laboratory:
    """A plugin of the inner pytest run: it replaces the loop over tests by a loop over mutants."""

    def __init__(self):
        self.errors = []
        self.killers = {}
        """The tests that failed for a mutant, in order; a dictionary without values."""
        self.problems = {}
        """Why a mutant was not killed, by mutant; None where it was. The key None is the real code."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        """That a test fails counts, so no traceback is made of it."""
        if call.excinfo is not None:
            self.errors.append((call.when, call.excinfo.value))
        outcome = "passed" if call.excinfo is None else "failed"
        return pytest.TestReport(item.nodeid, item.location, {}, outcome, None, call.when)

    def pytest_runtestloop(self, session):
        self.tests = {}
        for item in session.items:
            for name in {item.name, item.name.partition("[")[0]}:
                self.tests.setdefault(f"{item.path.stem}::{name}", []).append(item)
        for mutant in (*MUTANTS, HARMLESS):
            self.problems[mutant] = self.examine(session, mutant)
        with contextlib.ExitStack() as stack:
            for module in sorted({mutant.module for mutant in MUTANTS}):
                stack.enter_context(planted(module, source_of(module)))
            errors = [error for item in self.killers for error in self.run(session, item)]
        self.problems[None] = f"the real code fails: {errors}" if errors else None
        return True

    def run(self, session, item):
        self.errors = []
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.errors

    def examine(self, session, mutant):
        source = source_of(mutant.module)
        if source.count(mutant.old) != 1:
            return f"{mutant.old!r} occurs {source.count(mutant.old)} times in {mutant.module}; fix the mutant"
        if not self.tests.keys() >= set(mutant.killers):
            return f"not all of {mutant.killers} exist; fix the mutant"
        items = [item for killer in mutant.killers for item in self.tests[killer]]
        with planted(mutant.module, source.replace(mutant.old, mutant.new)):
            item, errors = next(((i, errors) for i in items if (errors := self.run(session, i))), (None, []))
        self.killers |= {item: None} if item else {}
        if not errors:
            return f"{mutant.killers} passed with this mistake"
        if all(when == "call" and isinstance(e, DEATHS) for when, e in errors):
            return None
        return f"died of {errors}, not of a test's assertion"


@pytest.fixture(scope="module")
def problems():
    laboratory = Laboratory()
    files = sorted({str(TESTS[killer.partition("::")[0]]) for m in MUTANTS for killer in m.killers})
    options = ["-q", "--capture=no", "--assert=plain", "--no-summary"]
    options += [word for plugin in ("cacheprovider", "faulthandler", "logging") for word in ("-p", f"no:{plugin}")]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_ADDOPTS", raising=False)  # of the outer run
        pytest.main([*options, *files], plugins=[laboratory])
    assert HARMLESS in laboratory.problems, f"the inner run did not get to its end:\n{output.getvalue()}"
    return laboratory.problems


DEATHS = (AssertionError, pytest.fail.Exception, GradcheckError)
"""What a test says no with; a mutant that merely crashes is not killed."""


def test_every_mutant_is_killed(problems, record_property):
    """The count is for whoever runs this file with ``-s``."""
    alive = {f"{mutant.module}: {mutant.mistake}": why for mutant in MUTANTS if (why := problems[mutant])}
    record_property("mutants_killed", len(MUTANTS) - len(alive))
    record_property("mutants_tried", len(MUTANTS))
    print(f"\nmutants killed: {len(MUTANTS) - len(alive)} of {len(MUTANTS)}")
    assert not alive
    assert len(MUTANTS) >= 385


def test_without_a_mistake_the_killers_pass(problems):
    """Negative control: the same machinery, planting the real sources."""
    assert problems[None] is None


def test_a_harmless_change_survives(problems):
    """Negative control of the other kind: what changes no result is not reported as killed."""
    assert problems[HARMLESS] == "('test_masking::test_golden_masked_sum',) passed with this mistake"


def test_the_real_code_is_put_back():
    function = inspect.unwrap(heedful.core.masked_sum)
    before = function.__code__
    with planted("masking", source_of("masking").replace("0.0).sum()", "1.0).sum()")):
        assert function.__code__ is not before
    assert function.__code__ is before


def public_names():
    """Functions, classes and constants of core; its records (`Bounds`, `Surrogate`) have nothing to be mistaken in."""
    modules = [importlib.import_module(f"heedful.core.{path.stem}") for path in CORE.glob("[a-z]*.py")]
    found = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {name for name, value in found.items() if not (inspect.isclass(value) and issubclass(value, tuple))}


def test_every_public_name_of_the_core_has_a_mutant():
    mutated, parsed = set(), {module: ast.parse(source_of(module)).body for module in {m.module for m in MUTANTS}}
    for mutant in MUTANTS:
        source = source_of(mutant.module)
        line = source[: source.index(mutant.old)].count("\n") + 1
        for node in parsed[mutant.module]:
            if node.lineno <= line <= node.end_lineno:
                names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
                mutated.update(names or [target.id for target in getattr(node, "targets", [])])
    assert {"gae", "cispo", "SMALLEST_STD"} <= public_names()
    assert {*public_names(), "head_divergence", "head_logprobs"} <= mutated
