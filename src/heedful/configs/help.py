"""``heedful COMMAND --help``: the main settings on one screen; ``--help-all``: every setting.

Explanations are the docstrings under the settings. Help does not load the parser, so it is fast.
"""

import ast
import dataclasses
import inspect
import itertools
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from heedful.configs.settings import UNIONS, flag, is_list, required, types_of
from heedful.configs.trainers import TRAINERS

SECTIONS = (
    "model and data", "algorithm", "sampling", "environment", "reward", "optimisation", "evaluation", "logging",
    "checkpoints", "devices", "judge", "server",
)  # fmt: skip
"""Groups of settings, in the order of ``--help-all``."""
OWN = "this command"
"""The group of a command's own settings, if it trains nothing."""
WIDEST = 100
"""Maximal line length in characters, on wider terminals."""
FEW = 18
"""A command with at most this many settings shows all of them on its first screen."""


@dataclass(frozen=True)
class FirstScreen:
    """The content of a command's first screen."""

    example: str
    """Example arguments of the command."""
    often: tuple[str, ...] = ()
    """The main settings, in the order of the screen. Empty: those defined in the command's own class."""
    needs: tuple[str, ...] = ()
    """Settings required on the command line, although they have a default."""


POLICY_AND_DATA = "--model runs/sft/final --data prompts.jsonl"
ONLINE_STEP = ("rollout_batch_size", "max_new_tokens")
MEASURED = ("max_prompts", "max_new_tokens", "temperature", "eval_fraction", "micro_batch_size", "dtype", "output")
FIRST_SCREENS = {
    **{
        name: FirstScreen(f"{trainer.example} --output runs/{name}", trainer.often, ("rewards",) * trainer.is_online)
        for name, trainer in TRAINERS.items()
    },
    "chat": FirstScreen(
        "--model runs/ppo/final",
        ("system_prompt", "max_new_tokens", "temperature", "top_p", "top_k", "thinking", "raw", "device", "dtype", "seed"),
    ),
    "sample": FirstScreen(
        "--models runs/sft/final --data prompts.jsonl --answers 4 --output answers.jsonl",
        ("answers", "max_prompts", "max_new_tokens", "temperature", "eval_fraction", "micro_batch_size", "dtype"),
    ),
    "demo": FirstScreen("--output runs/demo"),
    "tiny": FirstScreen("--output runs/tiny"),
    "course": FirstScreen("--language zh"),
    "course start": FirstScreen("5 --language zh"),
    "course check": FirstScreen("5"),
    "merge": FirstScreen("--adapter runs/sft/final --output runs/merged"),
    "runs": FirstScreen("runs"),
    "report": FirstScreen("runs/sft runs/ppo --output report.html", ("output", "responses", "compare", "best_of_n")),
    "look": FirstScreen("runs/ppo --step 20 --by KL", ("step", "row", "by", "count")),
    "watch": FirstScreen("runs/ppo", ("port",)),
    "track": FirstScreen("runs/ppo wandb"),
    "push": FirstScreen("runs/ppo ORG/NAME --license apache-2.0"),
    "serve-reward": FirstScreen("--model runs/reward/final --port 8001"),
    "serve-policy": FirstScreen("runs/sft/final --port 8000"),
    "round": FirstScreen(
        "PROJECT --policy runs/sft/final --prompts prompts.jsonl",
        ("policy", "prompts", "labels", "answers", "reward_models", "random_share", "reward_config", "ppo_config", "judge",
         "max_new_tokens", "temperature", "dtype"),
    ),
    "evaluate accuracy": FirstScreen(
        "--reward-model runs/reward/final --data preferences.jsonl",
        ("eval_fraction", "micro_batch_size", "dtype", "output"),
    ),
    "evaluate win-rate": FirstScreen(
        f"{POLICY_AND_DATA} --baseline runs/base/final --rewards model:runs/reward/final", MEASURED, ("rewards",)
    ),
    "evaluate scores": FirstScreen(f"{POLICY_AND_DATA} --rewards model:runs/reward/final", MEASURED, ("rewards",)),
    "evaluate best-of-n": FirstScreen(
        f"{POLICY_AND_DATA} --rewards model:runs/reward/final --n 8", ("n", "judge", *MEASURED), ("rewards",)
    ),
    "evaluate pass-at-k": FirstScreen(
        f"{POLICY_AND_DATA} --rewards verify:math --k 1 4 16", ("k", "samples_per_prompt", *MEASURED), ("rewards",)
    ),
    "evaluate kl": FirstScreen(f"{POLICY_AND_DATA} --reference runs/base/final", MEASURED),
    "evaluate perplexity": FirstScreen(
        "--model runs/sft/final --data text.jsonl",
        ("max_length", "loss_on", "eval_fraction", "micro_batch_size", "dtype", "output"),
    ),
    "exam": FirstScreen(
        "runs/reward/final --policy runs/sft/final --data preferences.jsonl --eval-fraction 0.05 --output exam.html",
        ("policy", "data", "judge", "second", "eval_fraction", "pairs", "prompts", "n", "max_new_tokens", "micro_batch_size",
         "dtype", "seed", "output", "json"),
    ),
    "migrate": FirstScreen("train.py"),
    "choose": FirstScreen(
        f"{POLICY_AND_DATA} --rewards model:runs/reward/final --tokens 200000 --output runs/choose",
        ("tokens", "minutes", "seeds", "eval_fraction", "eval_prompts", "samples_per_prompt", *ONLINE_STEP, "learning_rate",
         "kl_coef", "lora_rank", "dtype", "output", "json"),
        ("rewards",),
    ),
    "label new": FirstScreen("PROJECT --task pair"),
    "label serve": FirstScreen(
        "PROJECT",
        ("host", "port", "public_url", "allowed_hosts", "policy", "prompts", "answers", "buffer", "until_done",
         "max_new_tokens", "temperature"),
    ),
    "label invite": FirstScreen("PROJECT --name Ada"),
    "label import": FirstScreen("PROJECT --data answers.jsonl"),
    "label export": FirstScreen("PROJECT --output labels"),
    "label stats": FirstScreen("PROJECT"),
    "label list": FirstScreen("PROJECT --person ada"),
    "label correct": FirstScreen("""PROJECT 0a1b2c3d --answer '{"preferred": 1}'"""),
    "label withdraw": FirstScreen("PROJECT --batch 3"),
    "label simulate": FirstScreen(
        "PROJECT --rewards model:runs/reward/final", ("labellers", "agreement", "scale", "labels", "seed"), ("rewards",)
    ),
    "label backup": FirstScreen("PROJECT"),
    "label restore": FirstScreen("PROJECT"),
    "doctor device": FirstScreen("--device cuda", ("device", "json")),
    **{
        f"doctor {name}": FirstScreen(
            trainer.example,
            ("examples", "json", "learning_rate", *(ONLINE_STEP if trainer.is_online else ("batch_size",)), "allow"),
            ("rewards",) * trainer.is_online,
        )
        for name, trainer in TRAINERS.items()
    },
    **{
        f"plan {name}": FirstScreen(
            f"--model 1.5B {'--rewards model:0.5B' if trainer.is_online else '--max-length 1024'} --gpu-gb 24"
        )
        for name, trainer in TRAINERS.items()
    },
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One setting of a command, for help."""

    name: str
    hint: Any
    default: Any
    is_required: bool
    explanation: str
    section: str
    is_own: bool
    """True if it is defined in the command's own class, not in a shared group."""

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return flag(self.name)

    @property
    def summary(self) -> str:
        """The first sentence of the explanation."""
        return re.split(r"(?<=\.) (?=[A-Z0-9]|[\w-]+:|[a-z-]+ and )", self.explanation, maxsplit=1)[0].rstrip(".")

    @property
    def values(self) -> str:
        """Its possible values, in short."""
        return _values(self.hint).removesuffix("|none" if self.is_required else "")

    @property
    def default_text(self) -> str:
        """The default as typed on the command line; ``""`` if there is none."""
        if self.is_required or self.default in ((), ""):
            return ""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, tuple):
            return " ".join(map(str, self.default))
        return "none" if self.default is None else str(self.default)


def settings(config_class: type) -> list[Setting]:
    """The settings of a command."""
    hints, needed = types_of(config_class), required(config_class)
    found = []
    for field in dataclasses.fields(config_class):
        definers = [base for base in config_class.__mro__ if field.name in vars(base).get("__annotations__", ())]
        sections = [vars(base)["SECTION"] for base in definers if "SECTION" in vars(base)]
        found.append(
            Setting(
                name=field.name,
                hint=hints[field.name],
                default=field.default,
                is_required=field.name in needed,
                explanation=explanations(config_class)[field.name],
                section=sections[-1] if sections else "algorithm" if "learning_rate" in hints else OWN,
                is_own=definers[-1] is config_class,
            )
        )
    return found


@cache
def explanations(config_class: type) -> dict[str, str]:
    """The docstring under each field on one line; that of the most derived class wins."""
    found: dict[str, str] = {}
    for base in reversed(config_class.__mro__[:-1]):
        for statement, following in itertools.pairwise(_bodies(base.__module__).get(base.__name__, [])):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


@cache
def _bodies(module: str) -> dict[str, list[ast.stmt]]:
    """The statements in each class of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # a notebook's, or without source
        return {}
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def _values(hint: Any) -> str:
    """A type for help: the choices, or the kind of value."""
    if hint is bool:
        return ""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin is tuple:
        return f"{_values(parts[0])} ..." if Ellipsis in parts else " ".join(map(_values, parts))
    if origin is Annotated:
        return _values(parts[0])
    if origin in UNIONS:
        typed = [part for part in parts if part is not type(None) and typing.get_origin(part) is not Callable]
        return "|".join([_values(part) for part in typed] + ["none"] * (type(None) in parts))
    return {int: "N", float: "X", Path: "PATH"}.get(hint, "TEXT")


def first_screen(config_class: type, command: str, width: int | None = None) -> str:
    """The text of ``heedful COMMAND --help``: at most 50 lines.

    Args:
        command: its name, such as ``evaluate kl``.
        width: of a line; None is the terminal's, at most 100.
    """
    every = settings(config_class)
    screen = FIRST_SCREENS.get(command, FirstScreen(""))
    named = {one.name: one for one in every}
    positions = list(getattr(config_class, "POSITIONAL", ()))
    required = [one for one in every if one.is_required or one.name in screen.needs]
    required.sort(key=lambda one: (*positions, "model", "rewards", "data", "output", one.name).index(one.name))
    rest = [one for one in every if one not in required]
    if len(rest) > FEW:
        rest = [named[name] for name in screen.often] if screen.often else [one for one in rest if one.is_own]
    shown = len(required) + len(rest)
    page = _Page(width)
    page.add(f"usage: {_usage(config_class, command)}")
    page.add()
    page.add((config_class.__doc__ or "").split("\n\n", maxsplit=1)[0])
    if screen.example:
        page.head("example")
        page.command(f"heedful {command} {screen.example}")
    if required:
        page.head("required")
        page.table([(_position(one, positions) or f"{one.flag} {one.values}", one.summary) for one in required])
    if rest:
        page.head("often changed, with defaults" if shown < len(every) else "settings, with defaults")
        rows = [(_position(one, positions) or one.flag, one.default_text, one.summary) for one in rest]
        page.table([(f"{name} {default}".rstrip(), summary) for name, default, summary in rows])
    page.add()
    less = f"shows all {len(every)} settings in groups" if shown < len(every) else "explains each setting in full"
    in_yaml = " A YAML file, given first, uses the same names; a flag wins over it."
    page.add(f"heedful {command} --help-all {less}.{'' if hasattr(config_class, 'NO_SETTINGS_FILE') else in_yaml}")
    return page.text


def every_setting(config_class: type, command: str, width: int | None = None) -> str:
    """The text of ``heedful COMMAND --help-all``: every setting with its explanation, in groups."""
    page = _Page(width)
    page.add(f"usage: {_usage(config_class, command)}")
    page.add()
    for paragraph in (config_class.__doc__ or "").split("\n\n"):
        page.add(paragraph)
    for section, members in in_sections(config_class).items():
        page.head(section)
        for one in members:
            page.entry(_signature(one), one.explanation)
    return page.text


def in_sections(config_class: type) -> dict[str, list[Setting]]:
    """The settings of a command by group, required ones first."""
    every = settings(config_class)
    return {
        section: sorted((one for one in every if one.section == section), key=lambda one: not one.is_required)
        for section in (OWN, *SECTIONS)
        if any(one.section == section for one in every)
    }


def _signature(one: Setting) -> str:
    """A setting with its values and its default."""
    if one.hint is bool:
        return f"{one.flag}, {one.flag.replace('--', '--no-', 1)} (default: {one.default_text})"
    end = "required" if one.is_required else f"default: {one.default_text}"
    return f"{one.flag} {one.values}" + ("" if end == "default: " else f" ({end})")


def _usage(config_class: type, command: str) -> str:
    words = [
        f"{name.upper()} ..." if is_list(types_of(config_class)[name]) else name.upper()
        for name in getattr(config_class, "POSITIONAL", ())
    ]
    return " ".join(["heedful", command, *(words or ["[FILE.yaml]"]), "[--setting value ...]"])


def _position(one: Setting, positions: list[str]) -> str:
    return one.name.upper() + (" ..." if is_list(one.hint) else "") if one.name in positions else ""


class _Page:
    """Wrapped lines of help. On a terminal headings are highlighted."""

    def __init__(self, width: int | None) -> None:
        self.width = max(40, width or min(WIDEST, shutil.get_terminal_size().columns))
        self.is_bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.lines: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def add(self, text: str = "") -> None:
        self.lines += self._wrapped(" ".join(text.split())) or [""]

    def head(self, text: str) -> None:
        self.lines += ["", f"\033[1m{text}\033[0m" if self.is_bold else text]

    def command(self, text: str) -> None:
        """A command, broken before flags so that it can be pasted."""
        lines = [""]
        for part in re.split(r" (?=--)", text):  # a flag stays with its value
            if len(lines[-1]) + len(part) > self.width - 6 and lines[-1]:
                lines.append("")
            lines[-1] += f" {part}" if lines[-1] else part
        self.lines += [
            f"  {'  ' * (i > 0)}{line}{chr(92).rjust(2) * (i + 1 < len(lines))}" for i, line in enumerate(lines)
        ]

    def table(self, rows: list[tuple[str, str]]) -> None:
        left = min(max(len(name) for name, _ in rows), self.width // 3) + 4
        for name, text in rows:
            begin = f"  {name:<{left - 2}}" if len(name) <= left - 4 else " " * left
            self.lines += [] if begin.strip() else [f"  {name}"]
            self.lines += self._wrapped(text, begin, left)

    def entry(self, name: str, text: str) -> None:
        self.lines += [*self._wrapped(name, "  ", 6), *self._wrapped(text, " " * 6, 6)]

    def _wrapped(self, text: str, begin: str = "", indent: int = 0) -> list[str]:
        rest = " " * indent
        return textwrap.wrap(text, self.width, initial_indent=begin, subsequent_indent=rest, break_on_hyphens=False)
