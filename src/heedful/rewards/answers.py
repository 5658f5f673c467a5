"""Read the answers of records, with which responses are compared: the whole of each, or nothing."""

import math
import re
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from heedful.rewards.results import is_finite

PLAIN = str.maketrans("０１２３４５６７８９．－−–＋％（）", "0123456789.---+%()")
"""Maps full-width digits, signs and brackets, and the typographic minus or dash, to plain ones."""
GROUPED = re.compile(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))")
"""Typographic spaces between thousands."""
TIMES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
TIMES |= {"百": 100, "千": 10**3, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
FACTOR = re.compile(r"(?i:hundred|thousand|million|billion|trillion)\b|百(?!分)|千(?![克米瓦卡帕焦赫伏])|[万萬亿億]")
MULTIPLE = re.compile(rf"(?<![\d.,百千万萬亿億])(\d[\d,]*(?:\.\d+)?)((?:\s*(?:{FACTOR.pattern}))+)(?! ?\d)")
"""5 million and 3.5万, but not 1亿2000万, nor 千克, a unit."""
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Kana and Chinese characters: text without spaces between words."""
FINAL = "give the final answer alone, in \\boxed{}, or after ####"
"""The end of a message about a text that is no answer."""
COMMA = re.compile(r"\s*[，、；]\s*")
BOTH = re.compile(r"\s*(?:以及|[和与或])\s*(?=[-+(\\$\d.]|[A-Za-z](?![A-Za-z]))")
IN_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf|textit)\s*\{([^{}\\$]{2,}|[^\x00-\x7f])\}")
"""Words as LaTeX has them in a formula. One letter may be the name of something."""
BOLD = re.compile(r"(?<![A-Za-z0-9)\]}])\*\*(\S[^*]*)\*\*(?![A-Za-z0-9(])")
"""Markdown's, but no power as programs write it."""
WORD = (
    rf"(?:[{UNSPACED}]+"
    r"|(?:(?<![^\s,.;:!?(\"“])(?<![-+*/=<>^_]\s)"  # not a product of letters, as in 2ab or x-y, nor beside an operator
    r"(?:(?!(?:and|or)\b|(?:[A-Za-z]{1,2}-)+[A-Za-z]{1,2}\b)[A-Za-z][A-Za-z'’-]{2,}|(?i:is|of|in|at|to|be|by|no|an|it|he|we|so|as|on|if)\b"
    rf"|[aAI](?=\s[A-Za-z]{{2}}))(?=[\s,.;:!?)\"”{UNSPACED}]|$)(?!\s*[+*/=<>^]|\s*-\s)))"
)
"""A word of prose: letters that stand alone and are no product, or Chinese characters."""
WORDS = re.compile(WORD)
SAYS = re.compile(
    r"(?is).*(?:\b(?:is|are|was|were|be|equals?(?: to)?|has|have|had|total of|answer|result|total|sum|value)"
    "|[是为於于得有共约答案])"
)
"""The last word before an answer in a sentence. Others may change it: except 2, less than 5, Room 12."""
PAUSES = " \t\n,.;:!?："
CHANGES = re.compile(
    r"(?i)\b(?:except|not|least|most|less|more|than|fewer|greater|above|below|under|over|if|unless|when|where|for|only)\b"
    r"|至|不|除|以[上下外内]|超过|[多少大小]于|如果|若|当"
)
"""Words behind a number that make it another answer."""
POWER = r"(?:\^?\{?[23]\}?|[²³])?"
GLUED = r"(?:[ckm]m|[km]g|m[lL]|[kMG]?Hz|mph)"
SPACED = r"(?:[cdkmnµμ]?m|[kmµμ]?g|[cdm]?[lL]|m?s|sec|min|hr?|ft|in|yd|mi|lb|oz|k?Pa|k?[JW]|[kMG]?Hz|mph|mol)"
UNIT = re.compile(rf"(?<=[\d}})])(?:\s*{GLUED}|\s+{SPACED}){POWER}(?:/{SPACED}{POWER})?$")
"""A unit behind a number. Without a space ``2m`` and ``3t`` are products."""


class AnswerError(Exception):
    """A record's answer that no response can match; the text is the end of a sentence that begins with the answer."""


def listed(value: Any) -> list[str]:
    """The answers in a record's field: a text or a number, or a list of them, any of which is right.

    Raises AnswerError for everything else.
    """
    if not isinstance(value, list | tuple):
        return [_alone(value, "")]
    if not value:
        raise AnswerError("is an empty list; leave the field out, or give null, if there is no answer")
    return [_alone(one, " in a list") for one in value]


def _alone(value: Any, place: str) -> str:
    if isinstance(value, str):
        if not value.strip():
            raise AnswerError(f"is an empty text{place}; leave the field out, or give null, if there is no answer")
        return value
    if not isinstance(value, Real | Decimal) or not is_finite(value):
        names = {type(None): "null", dict: "an object", list: "a list", tuple: "a list", float: f"{value}"}
        kind = names.get(type(value), f"of type {type(value).__name__}")
        raise AnswerError(f"is {kind}{place}; it must be a text or a number, or a list of them, any of which is right")
    if isinstance(value, bool) or not float(value).is_integer():
        return str(value)
    return str(value if isinstance(value, Integral) else int(float(value)))  # a column with gaps holds 4.0


def plain(text: str) -> str:
    """A text with plain digits and signs, without marks of words in LaTeX or bold; 5 million and 3.5万 are whole numbers."""
    text = BOLD.sub(r"\1", IN_TEXT.sub(r" \1", GROUPED.sub("", text.translate(PLAIN))))
    return MULTIPLE.sub(_multiplied, text)


def _multiplied(found: re.Match[str]) -> str:
    times = math.prod(TIMES[factor.lower()] for factor in FACTOR.findall(found[2]))
    return f"{(Decimal(found[1].replace(',', '')) * times).normalize():f}"


def without_words(text: str) -> str | None:
    """The number or formula in a text, without the words and the unit around it; None if there are words inside as well.

    ``The area is 12 cm^2.`` is ``12``. A quantity with words inside that begins with a number, such as ``3 hours 20
    minutes``, stays, with its words in ``\\text{}``, and so does a text of words alone.
    """
    text = re.sub(r"(?<!\\)\\[,;:! ]|~", " ", BOTH.sub(" and ", COMMA.sub(", ", plain(text)))).strip()
    text = re.sub(r"(?<!\.)[.。]$", "", text.rstrip("！")).strip()
    if WORDS.search(text) and not re.search(r"[^\s,.;:!?'\"“”()-]", WORDS.sub("", text)):
        return rf"\text{{{' '.join(text.split())}}}"
    start, end, words = 0, len(text), [word.span() for word in WORDS.finditer(text)]
    for first, last in words:
        if text[start:first].strip(PAUSES):
            break
        start = last
    for first, last in reversed(words):
        if first < start or text[last:end].strip(PAUSES):
            break
        end = first
    if start and not SAYS.fullmatch(text[:start]):
        return None
    if CHANGES.search(text[end:]):
        return None
    core = text[start:end]
    core = re.sub(r"^[\s,;:!?：]+(?:\.\s)?|[\s,;:?]+$", "", core) if start or end < len(text) else core
    core = UNIT.sub("", core).strip()
    if not WORDS.search(core):
        return core
    if start or not re.match(r"[-+]?[€£¥￥]?\.?\d", text):
        return None
    return WORDS.sub(lambda word: rf" \text{{{word[0]}}} ", text)


def after_marker(text: str) -> str:
    """The text after the last ``####`` (GSM8K), or all of it, as `plain` makes it."""
    return plain(text).rpartition("####")[2].strip()
