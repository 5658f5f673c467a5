"""The facts of the built-in world, read from ``world.toml``: fourteen families of short questions, and words of bad answers.

Everything is short, so that a very small model that reads bytes can learn all of it within minutes.
"""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Fact:
    """The words that fill the gaps of a wording, and the answer without its frame."""

    slots: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Family:
    """Questions of one kind, and the form of a good answer: ``frame`` with the answer in its gap."""

    name: str
    language: str
    """``en`` or ``zh``: the language of the frame, of insults and of filler."""
    frame: str
    polite: str
    """The polite part of ``frame``."""
    wordings: tuple[str, ...]
    facts: tuple[Fact, ...]
    candidates: tuple[str, ...]
    """All texts that count as an answer in a response, right or wrong. For ``lists`` these are whole lists; the judge checks
    their members instead."""
    compliance: tuple[str, ...] = ()
    """Only for refusals: responses that comply instead of refusing."""

    @property
    def statement(self) -> str:
        """The part of ``frame`` that states the answer."""
        return self.frame.replace(self.polite, "").strip()


def _pairs(table: dict[str, Any]) -> list[tuple[str, str]]:
    """Questions and answers of a family, listed in one of the forms explained in world.toml."""
    match table:
        case {"pairs": pairs}:
            return [(question, answer) for question, answer in pairs]
        case {"both_ways": pairs}:
            return [pair for left, right in pairs for pair in ((left, right), (right, left))]
        case {"by_answer": answers}:
            return [(question, answer) for answer, questions in answers.items() for question in questions]
        case {"lists": kinds}:
            return [(kind, ", ".join(members[:COUNT_IN_LISTS])) for kind, members in kinds.items()]
    raise ValueError(f"world.toml: the family {table['name']} has no facts")


def _family(table: dict[str, Any]) -> Family:
    largest = table.get("sums")
    if largest:
        sums = [(a, b) for a in range(1, largest + 1) for b in range(a, largest + 1)]
        facts = tuple(Fact((str(a), str(b)), str(a + b)) for a, b in sums)
        also = [str(number) for number in range(100)]
    else:
        facts = tuple(Fact((question,), answer) for question, answer in _pairs(table))
        also = table.get("also", [])
    return Family(
        name=table["name"],
        language=table["language"],
        frame=table["frame"],
        polite=table["polite"],
        wordings=tuple(table["wordings"]),
        facts=facts,
        candidates=tuple(dict.fromkeys([*(fact.answer for fact in facts), *also])),
        compliance=tuple(table.get("compliance", ())),
    )


def family_named(name: str) -> Family:
    """Return the family of that name. Raises KeyError, with the known names, if there is none."""
    if name not in _BY_NAME:
        raise KeyError(f"the world has no family {name!r}; it has {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


_WORLD = tomllib.loads(files("heedful.apps.demo").joinpath("world.toml").read_text(encoding="utf-8"))
COUNT_IN_LISTS = 3
RUDE: dict[str, list[str]] = _WORLD["rude"]
"""Rude forms of an answer, by language."""
RUDE_WORDS: list[str] = _WORLD["rude_words"]
FILLER: dict[str, list[str]] = _WORLD["filler"]
"""Texts that a rambling response adds after the answer, by language."""
FAMILIES = tuple(_family(table) for table in _WORLD["families"])
_BY_NAME = {family.name: family for family in FAMILIES}
LISTS: dict[str, list[str]] = next(table["lists"] for table in _WORLD["families"] if "lists" in table)
"""Kinds for questions that ask for three members. Any three are right; the first three are the example answer."""
REFUSAL = family_named("refusals").facts[0].answer
