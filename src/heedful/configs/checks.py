"""Range checks for configurations. Each raises ConfigError and names the flag."""

import math
from typing import Any

from heedful.errors import ConfigError


def flag(field: str) -> str:
    """The command-line spelling of a field."""
    return "--" + field.replace("_", "-")


def positive(config: Any, *fields: str) -> None:
    """Every field is a finite number above 0, or None."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{flag(field)} must be greater than 0, got {value}")


def not_negative(config: Any, *fields: str) -> None:
    """Every field is a finite number of at least 0, or None."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{flag(field)} must be at least 0, got {value}")


def seed(config: Any, *fields: str) -> None:
    """Every field is a seed that every random generator takes: an integer of at least 0 and below 2^63."""
    for field in fields:
        value = getattr(config, field)
        if not 0 <= value < 2**63:
            raise ConfigError(f"{flag(field)} must be at least 0 and below 2^63, got {value}")


def fraction(config: Any, *fields: str) -> None:
    """Every field lies in [0, 1]."""
    for field in fields:
        value = getattr(config, field)
        if not 0 <= value <= 1:
            raise ConfigError(f"{flag(field)} must lie between 0 and 1, got {value}")


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
