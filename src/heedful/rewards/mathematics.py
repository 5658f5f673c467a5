"""Compare a response's final answer with the record's as mathematics (numbers, fractions, LaTeX), using math-verify.

It runs in a process of its own (`heedful.rewards.functions`): a model's response may keep a computer algebra system busy
forever, or take all memory.
"""

import difflib
import importlib.util
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from unicodedata import normalize

from heedful.errors import ConfigError
from heedful.rewards.answers import FINAL, AnswerError, after_marker, listed, plain, without_words
from heedful.rewards.results import OneScore, Problem, RewardFunction
from heedful.rewards.rules import answer_text

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


FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|csc|log|ln|exp|pi|theta|alpha|beta|infty"
TYPED: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|inf)(?![A-Za-z])"), r"\\infty "),
    (re.compile(rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"√\s*(\d+(?:\.\d+)?|\w)"), r"\\sqrt{\1}"),
    (re.compile("√"), "sqrt"),
    (re.compile("[⁺⁻⁰¹²³⁴-⁹ⁿ]+"), lambda power: f"^{{{normalize('NFKC', power[0])}}}"),
    (re.compile("[¼-¾⅐-⅞]"), lambda fraction: f" {normalize('NFKC', fraction[0])}".replace("⁄", "/")),
    (re.compile("°"), r"^\\circ "),
    (re.compile("·"), r"\\cdot "),
    (re.compile("≤"), r"\\leq "),
    (re.compile("≥"), r"\\geq "),
    (re.compile("≠|!="), r"\\neq "),
    (re.compile("∞"), r"\\infty "),
    (re.compile("∪"), r"\\cup "),
    (re.compile("∈"), r"\\in "),
    (re.compile(r"∅|\\varnothing"), r"\\emptyset "),
    (re.compile(r"\\langle"), "("),
    (re.compile(r"\\rangle"), ")"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])"), r"\1*10^{\2}"),
    (re.compile(r"\^([-+]?\d+)"), r"^{\1}"),
    (re.compile(r"(?<![\d.,/}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<=\d)(?:\\[,! ]|\{,\}| )(?=\d{3}(?!\d))"), ""),
)
"""What people type in place of LaTeX, and LaTeX that the library reads as something else (``1 2/3`` as 1)."""
THOUSANDS = re.compile(r"(?<![\d,.])(\d{1,3})((?:,\d{3})+)(?!\d|,\d)")


def same_mathematics(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[OneScore | Problem]:
    """Score 1 if the final answer of the response equals the record's ``answer``, or one of those that it lists, else 0.

    The final answer is the content of the last ``\\boxed{}`` with closed braces, else the last formula (between dollars,
    ``\\(`` and ``\\)``, or ``\\[`` and ``\\]``), else the last number; several with only "and", "or" or a comma between them
    are one. ``1/2``, ``0.5``, ``50%`` and ``\\frac{1}{2}`` are equal, and so are ``x(x+1)`` and ``x^2+x``. Full-width digits
    are read.

    The record's answer is read whole, as one formula: ``1, 2`` are two solutions, and 2 alone is wrong.

    Args:
        completions: the responses.
        answer: the records' column of that name: texts, numbers, or lists of them; None, if a record has none, gives None
            (no score).

    An answer that cannot be read or compared, or takes longer than `LONGEST` seconds, gives a `Problem`. A response without
    any number or formula is wrong (0).
    """
    return [
        None if wanted is None else _compared(answer_text(completion), wanted)
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


def _compared(response: str, wanted: Any) -> float | Problem:
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    try:
        answers = [formula_of(one) for one in listed(wanted)]
    except AnswerError as error:
        return Problem(f"cannot read the record's answer {wanted!r:.80}: it {error}; {FINAL}")
    try:
        response = plain(response)
        final = _final(response)
        if final is None:
            found = parse(re.sub("(?i)answer", " ", response), parsing_timeout=LONGEST, raise_on_error=True)
        else:
            core = without_words(final)
            found = [] if core is None else [_parsed(core)]
        return float(any(verify(_parsed(one), found, timeout_seconds=LONGEST, raise_on_error=True) for one in answers))
    except TimeoutException:
        return Problem(f"took longer than {LONGEST} s to compare {response[-80:]!r} with {wanted!r:.80}")
    except Exception as error:  # a computer algebra system may raise anything on arbitrary text
        why = f"{type(error).__name__}: {error!s:.80}"
        return Problem(f"could not compare {response[-80:]!r} with {wanted!r:.80}: {why}")


def formula_of(answer: str) -> str:
    """The formula that a record's answer is, as text: of its last box, else all of it, but for words around.

    Raises AnswerError if there is none.
    """
    text = after_marker(answer)
    if re.match(r"\[\s*[\"']", text):
        raise AnswerError("is a list as text; write it as a list, in .jsonl or Parquet")
    boxes = _boxes(text)
    if boxes:
        text = ", ".join(_last_joined(text, boxes))
    core = without_words(_as_latex(text))
    if core is None:
        raise AnswerError("has words among its numbers or formulas")
    if not re.search(r"\w", core):
        raise AnswerError("holds no number, no letter and no formula")
    return core


def _final(text: str) -> str | None:
    """The final answer in a response: its last boxes, else its last formulas; None if it has neither.

    The library itself would prefer any number or formula within 50 characters after the word "answer".
    """
    pieces = _boxes(text) or _formulas(text)
    return _as_latex(", ".join(_last_joined(text, pieces))) if pieces else None


def _as_latex(text: str) -> str:
    """A text as one formula, with LaTeX's commands, without dollars around formulas and signs of currencies."""
    text = re.sub(r"\\?\$|[€£¥￥₹]", "", FORMULA.sub(lambda found: f" {_inside(found)} ", text))
    for pattern, latex in TYPED:
        text = pattern.sub(latex, text)
    return text


def _inside(found: re.Match[str]) -> str:
    """The formula in a match of `FORMULA`, with the percent sign behind it."""
    *parts, percent = found.groups()
    return next(part for part in parts if part) + (r"\%" if percent else "")


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """A formula as the library's expression; as text, without spaces, if it is none that the library knows.

    The library's `parse` is for prose: where it cannot read a formula, it takes a number in it.
    """
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex
    from math_verify.utils import timeout

    if not re.search(r"[(\[{]", text):
        text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    if not re.search(r"[A-Za-z\\<>≤≥]", text):  # 3 + 4 = 7 says that the answer is 7
        text = text.rpartition("=")[2]
    if re.fullmatch(r"\s*\d+(?:(?:-\d+)+|(?:/\d+){2,})\s*", text):  # a range or a date
        return text.strip()
    config = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    latex = normalize_latex(text, config)
    if re.search(r"\d\s+\d", latex) and "\\" not in latex:  # which the library adds
        return re.sub(r"\s", "", latex)
    try:
        return timeout(LONGEST)(latex2sympy)(
            latex, is_real=not should_treat_as_complex(latex), convert_degrees=False, normalization_config=None
        )
    except Exception:  # the parser raises just that
        return re.sub(r"\s", "", latex)


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
    """Every formula, with its place."""
    return [(match.start(), match.end(), _inside(match)) for match in FORMULA.finditer(text)]


def _last_joined(text: str, pieces: list[tuple[int, int, str]]) -> list[str]:
    """The last piece, and those before it with only a comma or an "and" in between."""
    first = len(pieces) - 1
    while first and JOINED.fullmatch(text, pieces[first - 1][1], pieces[first][0]):
        first -= 1
    return [piece for _, _, piece in pieces[first:]]
