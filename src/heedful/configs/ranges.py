"""Which values a setting may have, written on the field: ``steps: Annotated[int, POSITIVE] = 100``."""

import math
import typing
from dataclasses import dataclass
from typing import Any

from heedful.configs.checks import flag
from heedful.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Finite numbers between two bounds; None is always allowed, as it means that a setting is off."""

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


FINITE = Range()
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)
FRACTION = Range(at_least=0, at_most=1)
"""A share of a whole."""
BELOW_ONE = Range(at_least=0, below=1)
"""A decay or a share that leaves something."""
SEED = Range(at_least=0, below=2**63)
"""What every random generator takes."""
LARGEST = 2**63
"""Integers are smaller than this in everything that counts with them."""


def check_ranges(config: Any) -> None:
    """Raise ConfigError, naming the flag, if a field's value is outside the range that is written on it."""
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


def _number(bound: float) -> str:
    return "2^63" if bound == 2**63 else f"{bound:g}"
