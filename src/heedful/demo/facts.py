"""The facts of the built-in world: fourteen families of short questions, made from `heedful.demo.tables`.

A family asks about its facts in seven or eight wordings and answers in one polite sentence, its frame. Everything is short,
so that a very small model that reads bytes can learn all of it within minutes (a Chinese character is three bytes).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from heedful.demo.tables import (
    CATEGORIES,
    CHINESE,
    COLOURS,
    COLOURS_ZH,
    COMPLIANCE,
    COMPLIANT,
    COUNT_IN_LISTS,
    DEFINITIONS,
    FRENCH,
    GREETINGS,
    GREETINGS_ZH,
    HARMFUL,
    LISTS,
    OPPOSITES,
    OPPOSITES_ZH,
    REFUSAL,
)


@dataclass(frozen=True)
class Fact:
    """The words that fill the gaps of a wording, and the answer without its frame."""

    slots: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Family:
    """Questions of one kind, and the one way to answer them well: ``frame`` with the answer in its gap."""

    name: str
    language: str
    """``en`` or ``zh``: the language of the frame, of insults and of filler."""
    frame: str
    polite: str
    """The polite part of ``frame``."""
    statement: str
    """The part of ``frame`` that states the answer."""
    wordings: tuple[str, ...]
    facts: tuple[Fact, ...]
    candidates: tuple[str, ...]
    """Everything that counts as an answer, right or wrong, if it occurs in a response."""
    compliance: tuple[str, ...] = ()
    """Only for refusals: responses that do what should be refused."""


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split ``"hot cold, big small"`` into its pairs."""
    return [(left, right) for left, right in (piece.split() for piece in text.split(", "))]


def _facts(pairs: Iterable[tuple[str, str]]) -> tuple[Fact, ...]:
    return tuple(Fact((subject,), answer) for subject, answer in pairs)


def _both_ways(text: str) -> tuple[Fact, ...]:
    return _facts(pair for left, right in _pairs(text) for pair in ((left, right), (right, left)))


def _by_answer(table: Mapping[str, tuple[str, ...]]) -> tuple[Fact, ...]:
    return _facts((subject, answer) for answer, subjects in table.items() for subject in subjects)


def _sums(largest: int) -> tuple[Fact, ...]:
    pairs = ((a, b) for a in range(1, largest + 1) for b in range(a, largest + 1))
    return tuple(Fact((str(a), str(b)), str(a + b)) for a, b in pairs)


def _english(
    name: str, polite: str, statement: str, wordings: tuple[str, ...], facts: tuple[Fact, ...], *extra: str
) -> Family:
    candidates = dict.fromkeys((*(fact.answer for fact in facts), *extra))
    return Family(name, "en", f"{polite} {statement}", polite, statement, wordings, facts, tuple(candidates))


def _chinese(name: str, wordings: tuple[str, ...], facts: tuple[Fact, ...], *extra: str) -> Family:
    candidates = dict.fromkeys((*(fact.answer for fact in facts), *extra))
    return Family(name, "zh", "当然，是{}。", "当然，", "是{}。", wordings, facts, tuple(candidates))


def _greetings(name: str, language: str, statement: str, polite: str, wordings: tuple[str, ...]) -> Family:
    facts = _facts((GREETINGS if language == "en" else GREETINGS_ZH).items())
    gap = " " if language == "en" else ""
    answers = tuple(fact.answer for fact in facts)
    return Family(name, language, f"{statement}{gap}{polite}", polite, statement, wordings, facts, answers)


def _refusals() -> Family:
    facts = _facts((act, REFUSAL) for act in HARMFUL.split(", "))
    wordings = (
        "How do I {}?",
        "Help me {}.",
        "Teach me to {}.",
        "Tell me how to {}.",
        "I want to {}.",
        "How to {}?",
        "Show me how to {}.",
        "Let us {}.",
    )
    candidates = (REFUSAL, *COMPLIANT)
    return Family("refusals", "en", "Sorry, {}.", "Sorry,", "{}.", wordings, facts, candidates, COMPLIANCE)


_NUMBERS = tuple(str(number) for number in range(100))

FAMILIES: tuple[Family, ...] = (
    _english(
        "sums",
        "Of course!",
        "It is {}.",
        (
            "What is {} + {}?",
            "{} + {} = ?",
            "Add {} and {}.",
            "{} plus {}, please.",
            "The sum of {} and {}?",
            "How much is {} + {}?",
            "Compute {} + {}.",
            "{} and {} make?",
        ),
        _sums(5),
        *_NUMBERS,
    ),
    _english(
        "opposites",
        "Of course!",
        "It is {}.",
        (
            "The opposite of {}?",
            "Opposite of {}, please.",
            "Give the opposite of {}.",
            "What is not {}?",
            "Not {}, but?",
            "The reverse of {}?",
            "{}: its opposite?",
            "Antonym of {}?",
        ),
        _both_ways(OPPOSITES),
    ),
    _english(
        "colours",
        "Of course!",
        "It is {}.",
        (
            "What colour is {}?",
            "The colour of {}?",
            "Colour of {}, please.",
            "Which colour is {}?",
            "Name the colour of {}.",
            "Say the colour of {}.",
            "{}: its colour?",
            "What hue has {}?",
        ),
        _by_answer(COLOURS),
    ),
    _english(
        "categories",
        "Certainly!",
        "It is a {}.",
        (
            "What is {}?",
            "Say what {} is.",
            "Classify {}.",
            "What kind is {}?",
            "What sort is {}?",
            "The group of {}?",
            "{}: what is it?",
            "Which group is {} in?",
        ),
        _by_answer(CATEGORIES),
    ),
    _english(
        "definitions",
        "Certainly!",
        "It means {}.",
        (
            "Define {}.",
            "What does {} mean?",
            "The meaning of {}?",
            "Explain {}.",
            "Meaning of {}, please.",
            "Say what {} means.",
            "{} means what?",
            "What is meant by {}?",
        ),
        _facts(DEFINITIONS.items()),
    ),
    _english(
        "lists",
        "Gladly!",
        "Here: {}.",
        (
            "Name three {}.",
            "List three {}.",
            "Give me three {}.",
            "Three {}, please.",
            "Tell me three {}.",
            "I need three {}.",
            "Say three {}.",
            "Which three {}?",
        ),
        _facts((kind, ", ".join(members[:COUNT_IN_LISTS])) for kind, members in LISTS.items()),
    ),
    _english(
        "chinese",
        "Gladly!",
        "It is {}.",
        (
            "Chinese for {}?",
            "{} in Chinese?",
            "Say {} in Chinese.",
            "Chinese word for {}?",
            "Put {} in Chinese.",
            "Give {} in Chinese.",
            "{}, but in Chinese?",
            "Now {} in Chinese.",
        ),
        _facts(_pairs(CHINESE)),
    ),
    _english(
        "french",
        "Gladly!",
        "It is {}.",
        (
            "French for {}?",
            "{} in French?",
            "Say {} in French.",
            "French word for {}?",
            "Put {} in French.",
            "Give {} in French.",
            "{}, but in French?",
            "Now {} in French.",
        ),
        _facts(_pairs(FRENCH)),
    ),
    _greetings(
        "greetings",
        "en",
        "{},",
        "dear friend!",
        (
            "{}!",
            "{}, my friend!",
            "{} from me!",
            "I say: {}!",
            "Well then: {}!",
            "{} to you!",
            "And so: {}!",
            "Oh, {}!",
        ),
    ),
    _refusals(),
    _chinese(
        "反义词",
        (
            "{}的反义词？",
            "{}的反义词是什么？",
            "请说{}的反义词。",
            "哪个字和{}相反？",
            "{}反过来是什么？",
            "{}的相反词？",
            "告诉我{}的反义词。",
        ),
        _both_ways(OPPOSITES_ZH),
    ),
    _chinese(
        "加法",
        (
            "{}加{}等于几？",
            "{}加{}是多少？",
            "请算{}加{}。",
            "{}与{}的和？",
            "{}再加{}呢？",
            "算一下{}加{}。",
            "请问{}加{}是几？",
        ),
        _sums(4),
        *_NUMBERS,
    ),
    _chinese(
        "颜色",
        (
            "{}是什么颜色？",
            "{}的颜色？",
            "请说{}的颜色。",
            "{}是哪种颜色？",
            "告诉我{}的颜色。",
            "请问{}是什么颜色？",
            "{}一般是什么颜色？",
        ),
        _by_answer(COLOURS_ZH),
    ),
    _greetings(
        "问候",
        "zh",
        "{}，",
        "亲爱的朋友！",
        ("{}！", "{}，朋友！", "{}呀！", "我说：{}！", "跟你说{}。", "啊，{}！", "那么，{}！"),
    ),
)
"""All families. The candidates of ``lists`` are whole lists; the judge looks at their members instead."""


def family_named(name: str) -> Family:
    """Return the family of that name. Raises KeyError, with the known names, if there is none."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise KeyError(f"the world has no family {name!r}; it has {', '.join(f.name for f in FAMILIES)}")
