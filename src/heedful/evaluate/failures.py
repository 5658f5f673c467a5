"""What a measurement leaves out because a reward failed on it."""

from collections.abc import Sequence
from typing import Any

from heedful.errors import RewardError
from heedful.rewards.scoring import Scores


def without_failed(given: Sequence[Scores], count: int, *, each: int = 1) -> tuple[list[int], dict[str, Any]]:
    """Which measured items have all their scores, and what to report of the others.

    Args:
        given: scores of the same items by different rewards, or of different policies.
        count: the number of items.
        each: how many responses in a row make an item.

    Raises RewardError if none has.
    """
    failed = {row // each for scores in given for row in scores.failed}
    kept = [i for i in range(count) if i not in failed]
    notes = [scores.note for scores in given if scores.note]
    if not kept:
        raise RewardError(f"nothing is left to measure: {notes[0]}")
    found: dict[str, Any] = {"failed": len(failed), "first_failure": notes[0]} if failed else {}
    for scores in given:
        for metric, value in scores.measured.items():
            key = metric if metric not in found else f"{metric}#2"
            found[key] = value
    return kept, found
