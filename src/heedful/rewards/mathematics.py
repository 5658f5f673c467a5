"""Compare a response's final answer with the record's as mathematics (numbers, fractions, LaTeX), using math-verify.

It runs in a process of its own (`heedful.rewards.functions`): a model's response may keep a computer algebra system busy
forever, or take all memory.
"""

import difflib
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from heedful.errors import ConfigError
from heedful.rewards.results import OneScore, Problem, RewardFunction
from heedful.rewards.rules import PLAIN, answer_text

LONGEST = 3
"""Time limit in seconds for parsing one answer, and for one comparison."""
PERCENT = r"(?P<percent>\s*(?:\\?%|[Pp]er ?cent(?:age)?\b|[Pp]ct\b))?"
FORMULA = re.compile(
    rf"""(?:
        (?<!\\)\$\$(?P<display>[^$]+)\$\$
        | (?<!\\)\$(?P<tight>[^\s$](?:(?:\\\$|[^\n$])*[^\s$\\])?)\$(?!\d)  # not $5 and $6, nor $5-$6, which are amounts
        | (?<![\\\d])(?<!\d\s)\$(?P<wide>\ (?:\\\$|[^\n$])*\ )\$(?!\s?\d)
        | \\\[(?P<bracket>.+?)\\\]
        | \\\((?P<parenthesis>.+?)\\\)
    ){PERCENT}""",
    re.VERBOSE | re.DOTALL,
)
"""A formula in a text. As in Pandoc's Markdown there is no space inside the dollars; or there is one inside both."""
BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
PERCENT_SIGN = re.compile(r"\s*\\?%")
JOINED = re.compile(r"\$?\s*(?:,?\s*(?:and|or)\b|[,、和与或])\s*\$?")
"""Separators between the parts of one answer."""


def same_mathematics(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[OneScore | Problem]:
    """Score 1 if the final answer of the response equals the record's ``answer``, else 0.

    The final answer is the content of the last ``\\boxed{}`` with closed braces, else the last formula (between dollars,
    ``\\(`` and ``\\)``, or ``\\[`` and ``\\]``), else the last number; several with only "and", "or" or a comma between them
    are one. ``1/2``, ``0.5``, ``50%`` and ``\\frac{1}{2}`` are equal, and so are ``x(x+1)`` and ``x^2+x``. Full-width digits
    are read.

    Args:
        completions: the responses.
        answer: the records' column of that name; None, if a record has none, gives None (no score).

    An answer that cannot be parsed or compared, or takes longer than `LONGEST` seconds, gives a `Problem`. A response without
    any number or formula is wrong (0).
    """
    return [
        None if wanted is None else _compared(answer_text(completion), str(wanted))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


VERIFIERS: dict[str, RewardFunction] = {"math": same_mathematics}


def make_verifier(name: str) -> RewardFunction:
    """The function of ``verify:NAME``. Raises ConfigError if there is none, or its library is missing."""
    if name not in VERIFIERS:
        near = difflib.get_close_matches(name, VERIFIERS, n=1)
        hint = f"; did you mean verify:{near[0]}?" if near else ""
        raise ConfigError(f"--rewards: there is no verify:{name}{hint}; there is verify:{', verify:'.join(VERIFIERS)}")
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f'--rewards: verify:{name} needs math-verify: pip install "heedful[math]"')
    return VERIFIERS[name]


def _compared(response: str, wanted: str) -> float | Problem:
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    try:
        right = _read(wanted)
        if not right:
            return Problem(f"cannot read the record's answer {wanted!r:.80}: it holds no number and no formula")
        found = parse(_final(response.translate(PLAIN)), parsing_timeout=LONGEST, raise_on_error=True)
        return float(verify(right, found, timeout_seconds=LONGEST, raise_on_error=True))
    except TimeoutException:
        return Problem(f"took longer than {LONGEST} s to compare {response[-80:]!r} with {wanted!r:.80}")
    except Exception as error:  # a computer algebra system may raise anything on arbitrary text
        why = f"{type(error).__name__}: {error!s:.80}"
        return Problem(f"could not compare {response[-80:]!r} with {wanted!r:.80}: {why}")


def _final(text: str) -> str:
    """The part of a response with its final answer, in a form that the library reads whole.

    The library itself would prefer any number or formula within 50 characters after the word "answer".
    """
    boxes, formulas = _boxes(text), _formulas(text)
    if boxes:
        return " and ".join(f"$\\boxed{{{box}}}$" for box in _last_joined(text, boxes))
    if formulas:
        return " and ".join(_last_joined(text, formulas))
    return re.sub("(?i)answer", " ", text)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """The content of every ``\\boxed{}`` with closed braces, with its place; a percent sign after it is included."""
    found, opened = [], []
    for token in BRACES.finditer(text):
        if token[0].endswith("{") and token[0] != "\\{":
            opened.append(token)
        elif token[0] == "}" and opened:
            first = opened.pop()
            if first[0] != "{":
                percent = PERCENT_SIGN.match(text, token.end())
                inner = text[first.end() : token.start()] + ("\\%" if percent else "")
                found.append((first.start(), percent.end() if percent else token.end(), inner))
    return found


def _formulas(text: str) -> list[tuple[int, int, str]]:
    """Every formula between double dollars, with its place."""
    return [
        (match.start(), match.end(), f"$${next(part for part in match.groups() if part)}$${match['percent'] or ''}")
        for match in FORMULA.finditer(text)
    ]


def _last_joined(text: str, pieces: list[tuple[int, int, str]]) -> list[str]:
    """The last piece, and those before it with only a comma or an "and" in between."""
    first = len(pieces) - 1
    while first and JOINED.fullmatch(text, pieces[first - 1][1], pieces[first][0]):
        first -= 1
    return [piece for _, _, piece in pieces[first:]]


def _read(wanted: str) -> list[Any]:
    """Parse a record's answer: the text after the last ``####`` (GSM8K), a formula with or without dollars, or a number."""
    from math_verify import parse

    text = wanted.translate(PLAIN).rpartition("####")[2].strip()
    found: list[Any] = parse(text, parsing_timeout=LONGEST, raise_on_error=True)
    if "$" not in text and ("\\" in text or not found):
        found = parse(f"${text}$", parsing_timeout=LONGEST, raise_on_error=True) or found
    return found
