"""What a script's expressions are, as far as they are known without running it."""

import ast
from dataclasses import dataclass, field
from typing import Any

LONGEST = 10_000
"""Most characters of a text, and most items of a list, that are put together from others."""


@dataclass(frozen=True, eq=False)
class Unknown:
    """What only a run of the script could tell."""

    text: str
    """The expression."""
    line: int


@dataclass(frozen=True)
class Imported:
    """Something of another module, such as ``torch.bfloat16``."""

    name: str

    @property
    def short_name(self) -> str:
        """The name without its module."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, eq=False)
class Function:
    """A function or a lambda of the script."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    names: dict[str, Any] = field(repr=False)
    """Those around it."""


@dataclass(frozen=True, eq=False)
class Class:
    """A class of the script; of a dataclass, the fields with their defaults."""

    name: str
    fields: dict[str, Any]
    base: Imported | None = None
    """The class of a library that it extends."""
    methods: dict[str, Function] = field(default_factory=dict)


@dataclass(eq=False)
class Call:
    """A call of something outside the script, or an attribute or item of its result. What it returns is not known."""

    name: str
    """``trl.GRPOConfig``; of a method or attribute ``.map``, of an item ``[]``."""
    args: list[Any]
    kwargs: dict[str, Any]
    line: int
    text: str
    """The expression."""
    owner: Any = None
    """What the method, attribute or item belongs to."""
    lines: dict[str, int] = field(default_factory=dict)
    """Line of each of ``kwargs``."""
    command_line: dict[str, Any] | None = None
    """Of a library's dataclass that a parser fills: the arguments on the command line."""
    made_by: Class | None = None
    """The script's class; if it extends one of TRL, ``name`` is that."""

    @property
    def short_name(self) -> str:
        """The name without its module."""
        return self.name.rpartition(".")[2]

    @property
    def is_object(self) -> bool:
        """Whether it is certainly not None: of a class, or loaded."""
        return self.short_name[:1].isupper() or self.short_name in (
            "from_pretrained",
            "load_dataset",
            "get_peft_config",
        )


Plain = int | float | str | bool | None


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a truth value or None."""
    return isinstance(value, int | float | str | bool | None)


def is_unknown(value: Any) -> bool:
    """Whether only a run could tell a value."""
    if isinstance(value, list | tuple):
        return any(map(is_unknown, value))
    return isinstance(value, Unknown | Call | Function)


def truth_value(value: Any) -> bool | None:
    """Whether a condition holds; None if only a run could tell."""
    if isinstance(value, Unknown | Call):
        return None
    return True if isinstance(value, Imported | Function | Class) else bool(value)


def certainly_equal(one: Any, other: Any) -> bool:
    """Whether two values are certainly equal. Models of one name are, whatever classes load them, and an attribute of
    something is itself."""
    if isinstance(one, Call) and isinstance(other, Call) and one is not other:
        if one.name.startswith(".") and not one.args and not one.kwargs:
            return one.name == other.name and one.owner is other.owner is not None and not other.args
        return one.short_name == other.short_name == "from_pretrained" and one.args[:1] == other.args[:1] != []
    return one is other or (isinstance(one, Imported | Plain) and type(one) is type(other) and one == other)


def source_text(value: Any) -> str:
    """A value as a report writes it, on one line."""
    if isinstance(value, Unknown | Call):
        return value.text
    if isinstance(value, Imported | Function | Class):
        return value.name
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_short, value)) + "]"
    return repr(value)


def _short(value: Any) -> str:
    """An item of a list or a mapping; one inside of another is not spelled out, as it may hold itself."""
    return "..." if isinstance(value, dict | list | tuple) and value else source_text(value)
