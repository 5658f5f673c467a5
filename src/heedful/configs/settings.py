"""Base of all settings, with ranges, paths and checks. Each setting is a flag, a YAML key and an attribute."""

import dataclasses
import importlib.util
import math
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.errors import ConfigError

LABEL_EXTRA = ("starlette", "uvicorn", "markdown_it", "nh3")
"""Import names of the packages of heedful[label]."""


def flag(field: str) -> str:
    """The command-line spelling of a field."""
    return "--" + field.replace("_", "-")


def require_label_extra(what: str) -> None:
    """Raise ConfigError if the packages for serving pages or requests are not installed."""
    missing = [name for name in LABEL_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'{what} needs packages that are not installed ({", ".join(missing)}): pip install "heedful[label]"'
        )


def multiple(config: Any, whole: str, part: str) -> None:
    """Raise ConfigError unless one size is a multiple of another."""
    a, b = getattr(config, whole), getattr(config, part)
    if b > a:
        raise ConfigError(f"{flag(part)} is {b}, larger than {flag(whole)} {a}; lower it to at most {a}")
    if a % b:
        raise ConfigError(f"{flag(whole)} {a} is not a multiple of {flag(part)} {b}; try {flag(whole)} {a - a % b}")


def changed(config: Any, *fields: str) -> list[str]:
    """The flags, with values, of the fields that differ from their defaults."""
    values = {field: getattr(config, field) for field in fields}
    return [f"{flag(field)} {value}" for field, value in values.items() if value != getattr(type(config), field)]


def refuse(config: Any, *fields: str, because: str) -> None:
    """Raise ConfigError if one of the fields is set, because it would have no effect; ``because`` is the reason."""
    unused = changed(config, *fields)
    if unused:
        raise ConfigError(f"{unused[0]} {because}")


def is_visible_ascii(token: str) -> bool:
    """Whether a token can be sent in a header: visible ASCII characters only, and no space."""
    return token.isascii() and token.isprintable() and " " not in token


def check_secret(variable: str, what: str) -> None:
    """Raise ConfigError, without the value, if a secret in an environment variable cannot be sent in a header."""
    if not is_visible_ascii(os.environ.get(variable, "")):
        raise ConfigError(
            f"the environment variable {variable} contains other characters than visible ASCII, so it cannot be sent in a "
            f"header; set it to {what}"
        )


@dataclass(frozen=True)
class Range:
    """Finite numbers between two bounds; None (the setting is off) is always allowed."""

    above: float = -math.inf
    at_least: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf

    def holds(self, value: float) -> bool:
        """True if the value is inside. NaN and infinities never are."""
        return self.above < value < self.below and self.at_least <= value <= self.at_most

    @property
    def words(self) -> str:
        """The range as the end of a sentence: "... must " and this."""
        if (self.at_least, self.at_most) == (0, 1):
            return "lie between 0 and 1"
        lower = {self.above: "be greater than", self.at_least: "be at least"}
        upper = {self.below: "below", self.at_most: "at most"}
        words = [f"{word} {_number(bound)}" for bound, word in lower.items() if math.isfinite(bound)]
        ends = [f"{word} {_number(bound)}" for bound, word in upper.items() if math.isfinite(bound)]
        return " and ".join(words + ends) if words else f"be {ends[0] if ends else 'a finite number'}"


class Required:
    """Marks a setting required on the command line. In Python it may be omitted if the trainer gets an object instead."""


REQUIRED = Required()
FINITE = Range()
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)
FRACTION = Range(at_least=0, at_most=1)
"""A share of a whole."""
BELOW_ONE = Range(at_least=0, below=1)
"""A decay or a share below 1."""
SEED = Range(at_least=0, below=2**63)
"""Seeds that every random generator accepts."""
LARGEST = 2**63
"""Upper bound of integers in all libraries."""


def check_ranges(config: Any) -> None:
    """Raise ConfigError, naming the flag, if a field's value is outside the range in its annotation."""
    for field, allowed in _ranges(type(config)).items():
        value = getattr(config, field)
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise ConfigError(f"{flag(field)} must be a number, got {value!r:.80}")
        if isinstance(value, int) and abs(value) >= LARGEST:
            got = value if value.bit_length() < 200 else f"a number of {value.bit_length()} bits"
            raise ConfigError(f"{flag(field)} must be below 2^63, got {got}")
        if not allowed.holds(value):
            raise ConfigError(f"{flag(field)} must {allowed.words}, got {value}")


def _ranges(config_class: Any) -> dict[str, Range]:
    hints = typing.get_type_hints(config_class, include_extras=True)
    return {
        field: extra
        for field, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
        if isinstance(extra, Range)
    }


def required(config_class: Any) -> set[str]:
    """The settings required by a command: those without a default, and those marked as `REQUIRED`."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    return {
        field.name
        for field in dataclasses.fields(config_class)
        if field.default is dataclasses.MISSING or REQUIRED in getattr(hints[field.name], "__metadata__", ())
    }


def _number(bound: float) -> str:
    return "2^63" if bound == 2**63 else f"{bound:g}"


PATHS = (
    "output", "model", "reference", "value_model", "reward_model", "baseline", "adapter", "data", "eval_data",
    "offset_data", "ptx_data", "chat_template", "runs", "resume", "folder", "run", "results", "task_folder", "judge_rubric",
    "judge_cache", "sampler_folder", "python", "project", "backup", "models", "policy", "prompts", "reward_config",
    "ppo_config", "compare", "best_of_n", "texts",
)  # fmt: skip
"""Settings that are paths, or names of models and data sets; such names never begin with ~."""
REWARDS = ("rewards", "reward", "second", "selection_rewards", "judge", "advantage", "policy_loss", "sampler")
"""Settings that may have a path after model: or python:, as in python:FILE.py:FUNCTION."""


def expand_paths(config: Any) -> None:
    """Convert settings that are paths to `Path`, and expand ``~`` and ``~user`` in paths, names and rewards, in place.

    Raises ConfigError if there is no such user.
    """
    hints = typing.get_type_hints(type(config))
    for field in (one.name for one in dataclasses.fields(config)):
        value, hint = getattr(config, field), hints[field]
        is_path = Path in (hint, *typing.get_args(hint))
        if value is None or not (is_path or field in PATHS or field in REWARDS):
            continue
        several = isinstance(value, tuple | list)
        done = [
            _expanded_reward(field, one) if field in REWARDS else _expanded(field, one, is_path=is_path)
            for one in (value if several else [value])
        ]
        object.__setattr__(config, field, tuple(done) if several else done[0])


def _expanded(field: str, value: Any, *, is_path: bool = False) -> Any:
    kind = Path if is_path else type(value)
    if "\0" in str(value):
        raise ConfigError(f"{flag(field)} {str(value)!r} holds a NUL byte, which is not allowed in a path; remove it")
    if not str(value).startswith("~"):
        return kind(value)
    try:
        return kind(Path(value).expanduser())
    except RuntimeError as error:  # no such user
        name = Path(value).parts[0]
        raise ConfigError(
            f"{flag(field)} {value}: {name} is a user's home, but there is no such user; for a folder of that name write "
            f"./{name}"
        ) from error


def _expanded_reward(field: str, value: Any) -> Any:
    kind, colon, rest = str(value).partition(":")
    return f"{kind}{colon}{_expanded(field, rest)}" if kind in ("model", "python") else value


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A group of settings. Groups are combined by inheritance and are flat: a name is the flag, YAML key and attribute.

    A group's ``SECTION`` is its heading in ``--help-all``. A configuration checks each range, expands paths, then checks that
    its settings fit together.
    """

    POSITIONAL = tuple[str, ...]()  # without an annotation, which would make it a setting
    """Settings whose values may come first on the command line, without their flags."""
    given = frozenset[str]()  # likewise
    """The settings named by a command's file or flags, even with their default; empty if made in Python."""

    def __post_init__(self) -> None:
        check_ranges(self)
        expand_paths(self)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if settings contradict each other. Groups add to it and call super()."""
