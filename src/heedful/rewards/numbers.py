"""Read the final number of an answer, as GSM8K and its graders do."""

import re
from decimal import Decimal

PLAIN = str.maketrans("０１２３４５６７８９．－−＋", "0123456789.--+")
"""Maps full-width digits and signs, and the typographic minus, to plain ones."""
NUMBER = re.compile(
    r"((?<![A-Za-z0-9_)\]])[-+])?"  # a sign; after a letter, digit or bracket it is a hyphen or an operator
    r"(?:\\?[$€£¥￥])?"
    r"([0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)"
    r"([eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
"""The content of LaTeX's boxed answer, with at most one level of braces inside."""


def final_number(text: str) -> Decimal | None:
    """Return the final number of a text, or None if it contains no number.

    It is the first number after the last ``####``; without that, the last number in the last ``\\boxed{}`` that contains one;
    without that, the last number of the text. Signs, thousands separated by commas, decimals, powers of ten (1.5e3) and
    full-width digits are read. A currency sign before the number is ignored, and so is whatever follows it, such as a unit or
    a full stop. Fractions and number words are not read.
    """
    text = text.translate(PLAIN).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    _, marker, after = text.rpartition("####")
    first = NUMBER.search(after) if marker else None
    if first:
        return _value(first)
    boxed = [found for content in BOXED.findall(text) for found in [list(NUMBER.finditer(content))] if found]
    found = boxed[-1] if boxed else list(NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def _value(found: re.Match[str]) -> Decimal:
    sign, digits, exponent = (part or "" for part in found.groups())
    return Decimal(sign + digits.replace(",", "") + exponent)
