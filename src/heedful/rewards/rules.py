"""Rewards that are rules. None reads the prompt; most read only the answer, not the thinking before it."""

import difflib
import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any
from unicodedata import normalize

from heedful.errors import ConfigError
from heedful.rewards.answers import FINAL, PLAIN, UNSPACED, AnswerError, after_marker, listed, plain, without_words
from heedful.rewards.results import Problem, RewardFunction
from heedful.types import split_thinking

PUNCTUATION = re.compile(r"""(?<!\d)\.|\.(?!\d)|[ \n\t。，、；：！？“”‘’,!?:"']""")
"""Spaces and punctuation but for the point of 3.5."""
LATIN = "a-zß-öø-ɏ"
WHOLE_NUMBER = re.compile(r"\b[0-9]+\b", re.ASCII)
"""A whole number; ASCII word boundaries, so that digits between Chinese characters count."""
NUMBER = re.compile(
    r"((?<![A-Za-z0-9_)\]])[-+])?"  # a sign; after a letter, digit or bracket it is a hyphen or an operator
    r"(?:\\?[$€£¥￥])?"
    r"([0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)"
    r"([eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
FRACTION = re.compile(r"(?<![\d.,/])(?:(\d+) +)?(\d+) ?/ ?(\d+)(?![\d/]|\.\d)")
"""1/2 or 1 1/2, but no date."""
POWER = re.compile(r"((?<=\d)\s*(?:\\times|\\cdot|[×*x])\s*|(?<![\d.,]))10\^\{?([-+]?\d{1,3})\b\}?")
"""A power of ten, perhaps behind a number that it multiplies."""
EXPONENT = re.compile(r"(?:(?<![\w.])\d+)?\^\{?[-+]?\d+\}?")
"""An exponent, which is no number of its own, with its base if that is a number."""
BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
"""The content of LaTeX's boxed answer, with at most one level of braces inside."""
UNIT = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")
"""A character of such text, a word of other text, or a punctuation mark: the units of `repetition`."""


def response_text(completion: Any) -> str:
    """Return the text of a completion, which is a string or a list with the assistant's message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def answer_text(completion: Any) -> str:
    """Return the answer in a completion, without its thinking: ``""`` if the thinking never ends."""
    return split_thinking(response_text(completion))[1] or ""


def contains_expected(completions: Sequence[Any], expected: Sequence[Any], **_: Any) -> list[float | Problem | None]:
    """Score 1 if the response contains the record's ``expected`` text or number, or one of several, else -1, minus 0.002 per
    character.

    Case, spaces and common punctuation, including Chinese, are removed from both before they are compared and before the
    length is counted; the point in 3.5 stays. A number is not found in another one, such as 4 in 14, 4.5 or -4, nor a word in
    Latin letters in a longer one, such as no in know.

    Args:
        completions: the responses.
        expected: the records' column of that name: texts, numbers, or lists of them; None, if a record has none, gives None
            (no score).

    Anything else, and a text that has only spaces and punctuation, gives a `Problem`.
    """
    return [
        None if wanted is None else _contains(answer_text(completion), wanted)
        for completion, wanted in zip(completions, expected, strict=True)
    ]


def _contains(response: str, expected: Any) -> float | Problem:
    try:
        wanted = [pattern_of(one) for one in listed(expected)]
    except AnswerError as error:
        return Problem(f"cannot read the record's expected {expected!r:.80}: it {error}")
    is_hit = any(one.search(_unified(response)) for one in wanted)
    return (1.0 if is_hit else -1.0) - 0.002 * len(_normalised(response))


def pattern_of(expected: str) -> re.Pattern[str]:
    """What finds a text with other spaces and punctuation in it. Raises AnswerError if there is no text."""
    text = _normalised(expected)
    if not text:
        raise AnswerError("is nothing but spaces and punctuation, which every response contains")
    number = (r"(?<![0-9])(?<![0-9]\.)(?<![^a-z0-9_)\]]-)(?<!^-)", r"(?!\.?[0-9])")
    word = (f"(?<![{LATIN}])", f"(?![{LATIN}])")
    before, behind = (
        (number if end.isdecimal() else word if re.match(f"[{LATIN}]", end) else ("", ""))[side]
        for side, end in enumerate((text[0], text[-1]))
    )
    return re.compile(before + f"(?:{PUNCTUATION.pattern})*+".join(map(re.escape, text)) + behind)


def digits(completions: Sequence[Any], **_: Any) -> list[float]:
    """Score ``min(0.2 n, 1)`` for n whole numbers in the response, -0.2 if there are none."""
    counts = [len(WHOLE_NUMBER.findall(answer_text(completion))) for completion in completions]
    return [min(0.2 * n, 1.0) if n else -0.2 for n in counts]


def final_number(text: str) -> Decimal | None:
    """Return the final number of a text, or None if it contains no number.

    It is the first number after the last ``####``; without that, the last number in the last ``\\boxed{}`` that contains one;
    without that, the last number of the text. Signs, thousands separated by commas, decimals, fractions (1/2 is 0.5), powers
    of ten, ``5 million`` and full-width digits are read. A currency sign before the number and any text after it, such as a
    unit, are ignored. Number words and other powers are not read.
    """
    text = plain(text).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    text = re.sub(r"\\[cdt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", r" \1\2/\3\4", text)
    text = POWER.sub(lambda power: f"{'' if power[1] else 1}e{power[2]}", text)
    text = FRACTION.sub(_divided, EXPONENT.sub("", text))
    _, marker, after = text.rpartition("####")
    first = NUMBER.search(after) if marker else None
    if first:
        return _decimal(first)
    boxed = [found for content in BOXED.findall(text) for found in [list(NUMBER.finditer(content))] if found]
    found = boxed[-1] if boxed else list(NUMBER.finditer(text))
    return _decimal(found[-1]) if found else None


def _divided(found: re.Match[str]) -> str:
    whole, above, below = (Decimal(number or 0) for number in found.groups())
    return f"{whole + above / below:f}" if below else ""


def _decimal(found: re.Match[str]) -> Decimal:
    sign, digits, exponent = (part or "" for part in found.groups())
    return Decimal(sign + digits.replace(",", "") + exponent)


def exact_number(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | Problem | None]:
    """Score 1 if the final number of the response equals the record's ``answer``, or one of those that it lists, else 0.

    The record's answer is the text after the last ``####``, else the content of the last ``\\boxed{}``, else all of it. It
    must be one number, with words, a unit or ``x =`` around it at most: 1/2, ``1, 2`` and 2x are none.

    Args:
        completions: the responses.
        answer: the records' column of that name: texts, numbers, or lists of them; None, if a record has none, gives None
            (no score).

    Any other answer gives a `Problem`.
    """
    return [
        None if wanted is None else _has_number(answer_text(completion), wanted)
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def _has_number(response: str, answer: Any) -> float | Problem:
    try:
        wanted = [only_number(one) for one in listed(answer)]
    except AnswerError as error:
        return Problem(f"cannot read the record's answer {answer!r:.80}: it {error}; {FINAL}")
    return float(final_number(response) in wanted)


def only_number(answer: str) -> Decimal:
    """The number that a record's answer is. Raises AnswerError if it is none."""
    text = after_marker(answer)
    boxed = BOXED.findall(text)
    text = (boxed[-1] if boxed else text).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    if not NUMBER.search(text):
        raise AnswerError("contains no number")
    core = without_words(re.sub(r"\s*\\?%$", "", text.strip()))
    found = None if core is None else re.fullmatch(rf"(?:[A-Za-z]\w*\s*=\s*)?{NUMBER.pattern}(?:\s*\\?%)?", core)
    if found is None:
        raise AnswerError("is not one number alone; verify:math reads formulas and lists")
    return _decimal(found)


# Rules with an argument take it only by position, so that no column of the data can take its place.


def matches(pattern: re.Pattern[str], /, completions: Sequence[Any], **_: Any) -> list[float]:
    """Score 1 if the pattern is found anywhere in the response (``re.search``), thinking included, else 0."""
    return [float(pattern.search(response_text(completion)) is not None) for completion in completions]


def length_window(shortest: int, longest: int, /, completions: Sequence[Any], **_: Any) -> list[float]:
    """Score 1 for a response of ``shortest`` to ``longest`` characters, and less outside this window.

    A response of n characters gets ``n / shortest`` if it is shorter, and ``max(0, 2 - n / longest)`` if it is longer: a line
    that reaches 0 at twice the longest length.
    """
    scores = []
    for completion in completions:
        n = len(answer_text(completion))
        scores.append(n / shortest if n < shortest else max(0.0, 2 - n / longest) if n > longest else 1.0)
    return scores


def repetition(n: int, /, completions: Sequence[Any], **_: Any) -> list[float]:
    """Score minus the share of n-grams that repeat an earlier one: ``distinct / all - 1``; 0 for fewer than n units.

    Units are words, punctuation marks, and characters of scripts without spaces between words (Chinese, Japanese). In a text
    without any space every character is a unit.
    """
    scores = []
    for completion in completions:
        text = response_text(completion).strip()
        units = UNIT.findall(text) if len(text.split()) > 1 else list(text)
        grams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
        scores.append(len(set(grams)) / len(grams) - 1 if grams else 0.0)
    return scores


def valid_json(keys: frozenset[str], /, completions: Sequence[Any], **_: Any) -> list[float]:
    """1 if the response is one JSON value, and an object with at least these keys if any are asked for; otherwise 0.

    Space around the value is allowed, a Markdown fence or any other text is not. NaN and Infinity are not JSON.
    """
    return [float(_is_json(answer_text(completion), keys)) for completion in completions]


RULES: dict[str, RewardFunction] = {
    "contains_expected": contains_expected,
    "digits": digits,
    "exact_number": exact_number,
    "json": partial(valid_json, frozenset()),
    "repetition": partial(repetition, 3),
}
"""The rules that need no argument, by name."""


def make_rule(spec: str) -> RewardFunction:
    """Return the rule of ``NAME`` or ``NAME:ARGUMENT``. Raises ConfigError for an unknown rule or wrong argument."""
    name, separator, argument = spec.partition(":")
    if name not in RULES and name not in WITH_ARGUMENT:
        near = difflib.get_close_matches(name, [*RULES, *WITH_ARGUMENT], n=1)
        hint = f"; did you mean rule:{near[0]}?" if near else ""
        forms = sorted({*RULES, *(form for form, _ in WITH_ARGUMENT.values())})
        raise ConfigError(f"--rewards: there is no rule {name!r}{hint}; rules are {', '.join(forms)}")
    if not separator and name in RULES:
        return RULES[name]
    if name not in WITH_ARGUMENT:
        raise ConfigError(f"--rewards: rule:{name} takes no argument, got {argument!r}; write rule:{name}")
    form, make = WITH_ARGUMENT[name]
    try:
        return make(argument)
    except (ValueError, re.error, OverflowError) as error:
        raise ConfigError(f"--rewards: rule:{spec} must be rule:{form}: {error}") from error


def _make_matches(argument: str) -> RewardFunction:
    if not argument:
        raise ValueError("the pattern is missing")
    return partial(matches, re.compile(argument))


def _make_length_window(argument: str) -> RewardFunction:
    found = re.fullmatch(r"([0-9]+)-([0-9]+)", argument)
    if found is None:
        raise ValueError(f"two whole numbers of characters such as 20-200, got {argument!r}")
    shortest, longest = int(found[1]), int(found[2])
    if not shortest <= longest or longest == 0:
        raise ValueError(f"the second number must be at least the first and above 0, got {argument!r}")
    return partial(length_window, shortest, longest)


def _make_repetition(argument: str) -> RewardFunction:
    if not re.fullmatch(r"[0-9]+", argument) or int(argument) == 0:
        raise ValueError(f"a whole number above 0, got {argument!r}")
    return partial(repetition, int(argument))


def _make_json(argument: str) -> RewardFunction:
    keys = [key.strip() for key in argument.split(",")]
    if not all(keys):
        raise ValueError(f"names of keys with commas between, got {argument!r}")
    return partial(valid_json, frozenset(keys))


WITH_ARGUMENT: dict[str, tuple[str, Callable[[str], RewardFunction]]] = {
    "json": ("json:KEY,KEY", _make_json),
    "length": ("length:MIN-MAX", _make_length_window),
    "regex": ("regex:PATTERN", _make_matches),
    "repetition": ("repetition:N", _make_repetition),
}
"""The rules with an argument: the form of the argument, and the function that makes them."""


def _normalised(text: str) -> str:
    return PUNCTUATION.sub("", _unified(text.strip()))


def _unified(text: str) -> str:
    return normalize("NFKC", text.translate(PLAIN)).casefold()


def _is_json(text: str, keys: frozenset[str]) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return not keys or (isinstance(value, dict) and keys <= value.keys())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
