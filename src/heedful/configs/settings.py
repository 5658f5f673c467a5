"""Base of all settings, with ranges, paths and checks. Each setting is a flag, a YAML key and an attribute."""

import contextlib
import dataclasses
import difflib
import importlib.util
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from heedful import user_code
from heedful.configs.names import answer
from heedful.errors import ConfigError, reworded

LABEL_EXTRA = ("starlette", "uvicorn", "markdown_it", "nh3")
"""Import names of the packages of heedful[label]."""


def flag(field: str) -> str:
    """The command-line spelling of a field."""
    return "--" + field.replace("_", "-")


_answers_command = False


@contextlib.contextmanager
def answering_command() -> Iterator[None]:
    """Messages inside answer a command, so they name settings by flags."""
    global _answers_command  # noqa: PLW0603  one command per process
    before, _answers_command = _answers_command, True
    try:
        yield
    finally:
        _answers_command = before


def named(text: str, config_class: Any) -> str:
    """A message with settings in the words of who asked: flags of a command, names of Python otherwise.

    >>> named("use --equal-pairs drop, or raise --max-dropped 0.1", RewardConfig)
    "use equal_pairs='drop', or raise max_dropped=0.1"
    """

    def in_python(found: re.Match[str]) -> str:
        name, space, value = (found[1] or "").replace("-", "_"), found[2], found[3]
        if name not in hints:
            switch = name.removeprefix("no_")
            return f"{switch}=False{space}{value}" if hints.get(switch) is bool else found[0]
        is_text = value in _choices(hints[name]) or "=" in value
        is_value = is_text or re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", value)
        return f"{name}={value!r}" if is_text else f"{name}={value}" if is_value else f"{name}{space}{value}"

    if _answers_command:
        return text
    hints = types_of(config_class)
    other_command = r"heedful [a-z][^\n;,.:()]*"
    return re.sub(rf"{other_command}|--([a-z][a-z-]*[a-z])( ?)((?:\w(?:[\w.,=+-]*\w)?)?)", in_python, text)


def require_label_extra(what: str) -> None:
    """Raise ConfigError if the packages for serving pages or requests are not installed."""
    missing = [name for name in LABEL_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'{what} needs packages that are not installed ({", ".join(missing)}): pip install "heedful[label]"'
        )


def check_object(given: object, kind: type | tuple[type, ...], name: str, how: str) -> None:
    """Raise ConfigError, with ``how`` to make it, for an argument that is of another kind."""
    if not isinstance(given, kind):
        got, origin = type(given).__name__, type(given).__module__.partition(".")[0]
        article = "an" if got[0] in "AEIOUaeiou" else "a"
        of = " of transformers" if origin == "transformers" else ""
        raise ConfigError(f"{name} is {article} {got}{of}; make it with {how}")


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
    words = {field: " ".join(map(str, x)) if isinstance(x, tuple) else x for field, x in values.items()}
    return [f"{flag(field)} {words[field]}" for field, x in values.items() if x != getattr(type(config), field)]


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


OwnCode = Annotated[str, "python:FILE.py:FUNCTION"]
"""The user's own function by its file, where other texts are choices."""
UNIONS = (types.UnionType, typing.Union)


def _types_of(config_class: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class, include_extras=True)
    return {field.name: _list_type(hints[field.name]) for field in dataclasses.fields(config_class)}


types_of: Callable[[Any], dict[str, Any]] = cache(_types_of)
"""The type of each setting, with its `Range` and other marks. Of a list that may be given as its only item, the list's."""


def _list_type(hint: Any) -> Any:
    parts = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else ()
    return next((part for part in parts if typing.get_origin(part) is tuple), hint)


def marks_of(hint: Any) -> tuple[Any, ...]:
    """The `Range`, `Form` or other marks of a type."""
    return getattr(hint, "__metadata__", ())


def is_list(hint: Any) -> bool:
    """Whether a setting takes several values."""
    return typing.get_origin(hint) is tuple


def checked(config_class: Any, name: str, value: Any) -> Any:
    """A setting's value in its type: NumPy's scalars become Python's, whole numbers decimals, lists or single items tuples.

    Raises ConfigError, naming the flag, for another type, a value that is none of the choices, or one out of its range.
    """
    hint = types_of(config_class)[name]
    try:
        value = _fitted(value, hint, is_path=name in PATHS)
    except _UnfitError as unfit:
        from heedful.configs.help import explanations

        wrong, wanted = unfit.args
        got = wrong.__name__ if hasattr(wrong, "__name__") else f"{wrong!r:.80}"
        near = _nearest(wrong, _choices(wanted)) if isinstance(wrong, str) else None
        lines = [f"{flag(name)} must be {_words(wanted)}, got {got}" + (f". Perhaps you meant {near}" if near else "")]
        lines += [f"{flag(name)}: {text}" for field, text in explanations(config_class).items() if field == name]
        raise ConfigError("\n".join(lines)) from None
    for allowed in (mark for mark in marks_of(hint) if isinstance(mark, Range) and value is not None):
        if isinstance(value, int) and abs(value) >= LARGEST:
            got = str(value) if value.bit_length() < 200 else f"a number of {value.bit_length()} bits"
            raise ConfigError(f"{flag(name)} must be below 2^63, got {got}")
        if not allowed.holds(value):
            raise ConfigError(f"{flag(name)} must {allowed.words}, got {value}")
    return value


class _UnfitError(Exception):
    """A value, and the type that it does not have."""


def _fitted(value: Any, hint: Any, *, is_path: bool) -> Any:
    """A value as one of a type. Raises _UnfitError with it, or with the item of a list, and the type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # of NumPy, or a tensor
        value = value.item()
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_fitted(item, parts[0], is_path=is_path) for item in items)
    if origin is Annotated:
        is_other = OwnCode == hint and not user_code.is_named(value)
        parts = () if is_other else parts[:1]
    if origin is Annotated or origin in UNIONS:
        for part in parts:
            with contextlib.suppress(_UnfitError):
                return _fitted(value, part, is_path=is_path)
    elif _is_of(value, hint, is_path=is_path):
        is_whole = hint is float and isinstance(value, int) and abs(value) < LARGEST
        return hint(value) if hint is Path or isinstance(value, os.PathLike) or is_whole else value
    raise _UnfitError(value, hint)


def _is_of(value: Any, hint: Any, *, is_path: bool) -> bool:
    """Whether a value has a type, or may stand for it: a whole number for another, a text for a path, a path for its name."""
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if typing.get_origin(hint) is Callable:
        return callable(value)
    if isinstance(value, bool):
        return hint is bool
    if hint is Path or (hint is str and is_path):
        return isinstance(value, str | os.PathLike)
    return isinstance(value, int | float if hint is float else hint)


def _nearest(text: str, choices: list[str]) -> str | None:
    """The choice that a text begins, or else is similar to."""
    begun = [one for one in choices if text and one.startswith(text)]
    return next(iter(begun or difflib.get_close_matches(text, choices, n=1)), None)


def _choices(hint: Any) -> list[str]:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return list(parts)
    return [one for part in parts for one in _choices(part)] if typing.get_origin(hint) in UNIONS else []


def _words(hint: Any) -> str:
    """What a value of a type is, after "must be"."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return parts[1] if hint == OwnCode else _words(parts[0])
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    if origin in UNIONS:
        words = [_words(part) for part in parts]
        return " or ".join([", ".join(words[:-1]), words[-1]])
    named = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    return named.get(hint, "none" if hint is type(None) else "a function")


def required(config_class: Any) -> set[str]:
    """The settings required by a command: those without a default, and those marked as `REQUIRED`."""
    return {
        field.name
        for field in dataclasses.fields(config_class)
        if field.default is dataclasses.MISSING or REQUIRED in marks_of(types_of(config_class)[field.name])
    }


def _number(bound: float) -> str:
    return "2^63" if bound == 2**63 else f"{bound:g}"


PATHS = (
    "output", "model", "reference", "value_model", "reward_model", "baseline", "adapter", "data", "eval_data",
    "offset_data", "ptx_data", "chat_template", "runs", "resume", "folder", "run", "results", "judge_rubric",
    "judge_cache", "sampler_folder", "python", "project", "backup", "models", "policy", "prompts", "reward_config",
    "ppo_config", "compare", "best_of_n", "texts", "file",
)  # fmt: skip
"""Settings that are paths, or names of models and data sets; such names never begin with ~."""
REWARDS = (
    "rewards", "reward", "second", "selection_rewards", "judge", "advantage", "policy_loss", "loss", "sampler", "environment",
)  # fmt: skip
"""Settings that may have a path after model: or python:, as in python:FILE.py:FUNCTION."""


def expand_paths(config: Any) -> None:
    """Expand ``~`` and ``~user`` in paths, names and rewards, in place. Raises ConfigError if there is no such user."""
    for field in types_of(type(config)).keys() & {*PATHS, *REWARDS}:
        value = getattr(config, field)
        expand = _expanded_reward if field in REWARDS else _expanded
        done = tuple(expand(field, one) for one in value) if isinstance(value, tuple) else expand(field, value)
        object.__setattr__(config, field, done)


def _expanded(field: str, value: Any) -> Any:
    if "\0" in str(value):
        raise ConfigError(f"{flag(field)} {str(value)!r} holds a NUL byte, which is not allowed in a path; remove it")
    if not str(value).startswith("~"):
        return value
    try:
        return type(value)(Path(value).expanduser())
    except RuntimeError as error:  # no such user
        name = Path(value).parts[0]
        raise ConfigError(
            f"{flag(field)} {value}: {name} is a user's home, but there is no such user; for a folder of that name write "
            f"./{name}"
        ) from error


def _expanded_reward(field: str, value: Any) -> Any:
    kind, colon, rest = str(value).partition(":")
    return f"{kind}{colon}{_expanded(field, rest)}" if isinstance(value, str) and kind in ("model", "python") else value


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A group of settings. Groups are combined by inheritance and are flat: a name is the flag, YAML key and attribute.

    A group's ``SECTION`` is its heading in ``--help-all``. A configuration checks the type, choices and range of each
    setting, expands paths, then checks that its settings fit together.
    """

    POSITIONAL = tuple[str, ...]()  # without an annotation, which would make it a setting
    """Settings whose values may come first on the command line, without their flags."""
    given = frozenset[str]()  # likewise
    """The settings named by a command's file or flags, even with their default; empty if made in Python."""

    def __new__(cls, *values: object, **settings: object) -> Self:
        """Raise ConfigError for a value without a name, an unknown name, with the probable one, and a missing setting."""
        if values:
            raise ConfigError(
                f"{cls.__name__} takes settings by name, such as {cls.__name__}({min(types_of(cls))}=...)"
            )
        known = types_of(cls)
        wrong = [
            f"{cls.__name__} has no setting {name!r}{answer(name, known, in_python=True)}"
            for name in settings
            if name not in known
        ]
        needed = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
        missing = [name for name in needed if name not in settings]
        if missing:
            example = ", ".join(f"{name}=..." for name in missing)
            wrong.append(f"{cls.__name__} needs {', '.join(missing)}; write {cls.__name__}({example})")
        if wrong:
            raise ConfigError("\n".join(wrong))
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, object]]:
        """The settings, from which a copy is made."""
        return (), {name: getattr(self, name) for name in types_of(type(self))}

    def __post_init__(self) -> None:
        with reworded(lambda text: named(text, type(self))):
            for name in types_of(type(self)):
                object.__setattr__(self, name, checked(type(self), name, getattr(self, name)))
            expand_paths(self)
            self.check()

    def check(self) -> None:
        """Raise ConfigError if settings contradict each other. Groups add to it and call super()."""
