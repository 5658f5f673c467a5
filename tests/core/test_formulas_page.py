"""docs/formulas.md against the code: every public function has its entry, and its names, flags and numbers are true.

The checks are functions of a page's text, so that the last tests can break the page and see each of them fail.
"""

import dataclasses
import doctest
import importlib
import inspect
import re
import typing
from pathlib import Path

import pytest

from heedful import core
from heedful.cli.main import COMMANDS
from heedful.kernels.head_divergence import head_divergence
from heedful.kernels.head_logprobs import head_logprobs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formulas.md").read_text(encoding="utf-8")
PUBLIC = {name: getattr(core, name) for name in core.__all__ if callable(getattr(core, name))}
KERNELS = {"head_divergence": head_divergence, "head_logprobs": head_logprobs}
PUBLIC |= KERNELS
"""What has an entry: the public names of core, and the kernels that have formulas of their own."""
CALLS = {name: f"core.{name}(" for name in core.__all__} | {name: f">>> {name}(" for name in KERNELS}


def entries(page):
    """The text under each heading in code type, by function; one heading may name several."""
    found = {}
    for part in re.split(r"^(?=#+ )", page, flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        found |= dict.fromkeys(re.findall(r"`(\w+)`", heading), body)
    return found


def arguments_of(public):
    """Names of the arguments of a function, or of a class's constructor and of its ``update``."""
    is_record = not inspect.isclass(public) or issubclass(public, tuple) or dataclasses.is_dataclass(public)
    calls = [public] if is_record else [public, public.update]
    names = {name for call in calls for name in inspect.signature(call).parameters}
    return names - {"self"}


def in_code(text):
    """Every word in code type."""
    return {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", span)}


def wrong_entries(page):
    """Public functions without an entry, entries of no public function, and what an entry leaves out.

    An argument is in the entry, or in the table of symbols."""
    found, symbols = entries(page), in_code(page.partition("## Symbols\n")[2].partition("\n## ")[0])
    wrong = [f"{name}: no entry" for name in PUBLIC if name not in found]
    wrong += [f"{name}: an entry, but no public function" for name in found if name not in PUBLIC]
    for name in set(found) & set(PUBLIC):
        public, body = PUBLIC[name], found[name]
        source = f"[`{name}`](../src/{public.__module__.replace('.', '/')}.py)"
        wrong += [f"{name}: no argument {a}" for a in arguments_of(public) if a not in symbols | in_code(body)]
        wrong += [f"{name}: no link {source}"] if source not in body else []
        wrong += [f"{name}: no formula"] if "```math" not in body else []
        wrong += [f"{name}: no numbers"] if CALLS[name] not in page else []
    return wrong


def wrong_names(page):
    """Names that core does not have, links to nothing, and headings that no link reaches."""
    wrong = [name for name in re.findall(r"\bcore\.([a-zA-Z]\w*)", page) if name not in core.__all__]
    headings = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", page):
        name, file = text.strip("`"), (ROOT / "docs" / target)
        if target.startswith("#"):
            wrong += [target] if target not in anchors else []
        elif not file.is_file():
            wrong.append(target)
        elif file.suffix == ".py":
            defined = re.search(rf"^(def|class) {name}\b", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            wrong += [f"{target} defines no {name}"] if defined is None else []
    return wrong


def settings():
    """What each flag of any command may be: its annotations."""
    found = {}
    for command in COMMANDS.values():
        module, _, name = command.config.partition(":")
        config = getattr(importlib.import_module(f"heedful.{module}"), name)
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            found.setdefault("--" + field.name.replace("_", "-"), []).append(hints[field.name])
    return found


def wrong_flags(page):
    """Flags that no command has, and values that none of a flag's commands takes."""
    known, wrong = settings(), []
    for flag, value in re.findall(r"(--[a-z][a-z0-9-]*)(?:[ =]([\w.-]+))?", page):
        choices = [typing.get_args(hint) for hint in known.get(flag, []) if typing.get_origin(hint) is typing.Literal]
        if flag not in known:
            wrong.append(flag)
        elif value and len(choices) == len(known[flag]) and not any(value in some for some in choices):
            wrong.append(f"{flag} {value}")
    return wrong


def failures(page):
    """What is printed where the page's Python blocks, run in their order like one session, do not do what they say."""
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE))
    session, said = {}, []
    runner = doctest.DocTestRunner(verbose=False)
    for block in blocks:
        line = page.count("\n", 0, block.start()) + 1
        test = doctest.DocTestParser().get_doctest(block[1], session, "formulas.md", "docs/formulas.md", line)
        if not test.examples:
            said.append(f"line {line}: a block without >>> is not run")
        runner.run(test, out=said.append, clear_globs=False)
        session.update(test.globs)
    return said


def test_every_public_function_has_its_entry_whose_names_links_and_flags_exist():
    assert wrong_entries(PAGE) + wrong_names(PAGE) + wrong_flags(PAGE) == []


def test_the_numbers_are_those_of_the_code():
    assert "".join(failures(PAGE)) == ""


@pytest.mark.parametrize(
    ("check", "old", "new", "said"),
    [
        (wrong_entries, "### `gae`", "###", "gae: no entry"),
        (wrong_entries, "`gae_lambda` $", "`lambda` $", "gae: no argument gae_lambda"),
        (wrong_entries, "```math\n\\delta_t", "```\n\\delta_t", "gae: no formula"),
        (wrong_entries, "core.gae(", "core.whiten(", "gae: no numbers"),
        (wrong_names, "core.gae(", "core.gea(", "gea"),
        (wrong_names, "[`lr_factor`]", "[`lr_factors`]", "defines no lr_factors"),
        (wrong_flags, "--importance-level sequence", "--importance-level whole", "--importance-level whole"),
        (failures, "tensor([[0.5408, 0.4850, 0.3000", "tensor([[0.5408, 0.4850, 0.3001", "0.3001"),
    ],
)
def test_each_check_can_fail(check, old, new, said):
    """Negative controls: one flaw put into the page, and the check that is for it says so."""
    assert old in PAGE
    assert said in "\n".join(check(PAGE.replace(old, new)))
