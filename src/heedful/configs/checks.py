"""Checks of several fields together. Each raises ConfigError and names the flag."""

import importlib.util
from typing import Any

from heedful.errors import ConfigError

LABEL_EXTRA = ("starlette", "uvicorn", "markdown_it", "nh3")
"""Modules of heedful[label], by the names under which they are imported."""


def flag(field: str) -> str:
    """The command-line spelling of a field."""
    return "--" + field.replace("_", "-")


def require_label_extra(what: str) -> None:
    """Refuse to serve pages or requests where the packages for that are not installed. Raises ConfigError."""
    missing = [name for name in LABEL_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'{what} needs packages that are not installed ({", ".join(missing)}): pip install "heedful[label]"'
        )


def multiple(config: Any, whole: str, part: str) -> None:
    """One size is a multiple of another, so that it divides into equal parts."""
    a, b = getattr(config, whole), getattr(config, part)
    if b > a:
        raise ConfigError(f"{flag(part)} is {b}, larger than {flag(whole)} {a}; lower it to at most {a}")
    if a % b:
        raise ConfigError(f"{flag(whole)} {a} is not a multiple of {flag(part)} {b}; try {flag(whole)} {a - a % b}")


def changed(config: Any, *fields: str) -> list[str]:
    """The flags, with their values, of those fields that are not at their default."""
    values = {field: getattr(config, field) for field in fields}
    return [f"{flag(field)} {value}" for field, value in values.items() if value != getattr(type(config), field)]


def refuse(config: Any, *fields: str, because: str) -> None:
    """None of the fields is set: they would have no effect, ``because`` of what the message then says."""
    unused = changed(config, *fields)
    if unused:
        raise ConfigError(f"{unused[0]} {because}")


def is_visible_ascii(token: str) -> bool:
    """Whether a token can be sent in a header: visible ASCII characters only, and no space."""
    return token.isascii() and token.isprintable() and " " not in token
