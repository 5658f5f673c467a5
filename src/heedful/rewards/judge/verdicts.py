"""Read a judge's verdict: the last line of its answer, strictly. Whatever else it says is no verdict, and never a score."""

import re

from heedful.rewards.returned import Problem
from heedful.types import split_thinking

NUMBER = re.compile(r"(?:score|评分|得分|分数)\s*[:：]\s*([-+]?[0-9]+(?:\.[0-9]+)?)|([-+]?[0-9]+(?:\.[0-9]+)?)", re.I)
BETTER = re.compile(r"better\s*[:：]\s*(1|2|tie)", re.I)
RANKING = re.compile(r"ranking\s*[:：]\s*([0-9]+(?:\s*[>=]\s*[0-9]+)*)", re.I)
TIE = 0
"""The verdict that two responses are equally good."""


def read_score(text: str, low: float, high: float) -> float | Problem:
    """The number of the last line, ``Score: NUMBER`` or the number alone, from ``low`` to ``high``."""
    found = NUMBER.fullmatch(last_line(text))
    if found is None:
        return _no_verdict(text, "Score: NUMBER")
    score = float(found[1] or found[2])
    if not low <= score <= high:
        return Problem(f"answered with the score {score:g}, which is not from {low:g} to {high:g}: {_end(text)}")
    return score


def read_better(text: str) -> int | Problem:
    """1 or 2, whichever is better, or `TIE`, from ``Better: 1``."""
    found = BETTER.fullmatch(last_line(text))
    if found is None:
        return _no_verdict(text, "Better: 1, Better: 2 or Better: tie")
    return TIE if found[1].lower() == "tie" else int(found[1])


def read_ranking(text: str, count: int) -> list[list[int]] | Problem:
    """Responses (from 0) in levels, the best first, from ``Ranking: 2 > 3 = 1``. Each must be named once."""
    found = RANKING.fullmatch(last_line(text))
    if found is None:
        return _no_verdict(text, "Ranking: 2 > 3 = 1")
    levels = [[int(number) - 1 for number in level.split("=")] for level in found[1].split(">")]
    if sorted(number for level in levels for number in level) != list(range(count)):
        return Problem(f"did not rank each of {count} responses once: {_end(text)}")
    return levels


def last_line(text: str) -> str:
    """The last line with anything in it, without Markdown around it; of what follows a thought, if there is one."""
    _, answer = split_thinking(text)
    lines = (answer or "").strip().splitlines()
    return lines[-1].strip(" \t*_`#") if lines else ""


def _no_verdict(text: str, form: str) -> Problem:
    return Problem(f"gave no verdict: the last line of its answer must be {form}, got {_end(text)}")


def _end(text: str) -> str:
    return repr(text[-200:])
