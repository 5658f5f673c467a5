"""Rewards that are rules. Each reads the response alone, whatever the prompt."""

import re
from collections.abc import Sequence
from typing import Any

from heedful.rewards.interface import RewardFunction

PUNCTUATION = str.maketrans("", "", " \n\t。，,.!?：:\"'")
NUMBER = re.compile(r"\b[0-9]+\b", re.ASCII)
"""A whole number; ASCII word boundaries, so that digits between Chinese characters count."""


def response_text(completion: Any) -> str:
    """The text of a completion, given as a string or as a list with the assistant's message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def contains_expected(completions: Sequence[Any], expected: Sequence[str], **_: Any) -> list[float]:
    """1 where the response contains the record's ``expected`` text, -1 where not, minus 0.002 a character.

    Raises ValueError where nothing of ``expected`` is left to look for.

    Case, spaces and common punctuation, Chinese too, are removed from both first; the length is counted after that.
    """
    scores = []
    for completion, wanted in zip(completions, expected, strict=True):
        response, searched = _normalised(response_text(completion)), _normalised(wanted)
        if not searched:
            raise ValueError(f"the expected text {wanted!r} is nothing but spaces and punctuation")
        scores.append((1.0 if searched in response else -1.0) - 0.002 * len(response))
    return scores


def digits(completions: Sequence[Any], **_: Any) -> list[float]:
    """``min(0.2 n, 1)`` for n whole numbers in the response, -0.2 for none."""
    counts = [len(NUMBER.findall(response_text(completion))) for completion in completions]
    return [min(0.2 * n, 1.0) if n else -0.2 for n in counts]


RULES: dict[str, RewardFunction] = {"contains_expected": contains_expected, "digits": digits}


def _normalised(text: str) -> str:
    return text.strip().lower().translate(PUNCTUATION)
