"""Steps that are left out because a number is not finite: which, with which records, and when there are too many."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from heedful.display import say
from heedful.distributed import ranks
from heedful.errors import TrainingError
from heedful.files import to_json

FILE = "skipped.jsonl"
"""Of a run's folder: a line for each update that was left out."""
MOST_IN_A_ROW = 3
"""How many steps in a row may be left out."""
NAMED = 3
"""How many records a message names; the file has all of them."""


class StepResult(NamedTuple):
    """An optimizer step that was taken, or left out."""

    norm: float
    """Of the gradient, before clipping; not finite if there was no step."""
    is_left_out: bool = False
    """True if its numbers were broken. In float16, gradients that are too large for the present scale are not."""
    critic_norm: float = math.nan
    """Of the gradient of a critic with its own network; NaN if none learned."""


@dataclass
class NonFiniteGuard:
    """Keeps count of a run's steps without an update, and writes down what they were to learn from.

    Args:
        folder: of the run; None, or one that is not there, writes nothing.
    """

    folder: Path | None
    in_a_row: int = 0
    """Steps up to the latest that made no update."""
    latest: str = ""
    """What the latest was, for messages."""

    def leave_out(self, step: int, update: int, broken: Mapping[str, float], sources: Sequence[str]) -> None:
        """Write down that an update of a step (from 1) was left out, for numbers that are not finite.

        ``sources`` say where its records were read, ``file:line``; those under suspicion, if it is known which.
        """
        records = list(dict.fromkeys(sources))
        numbers = [f"{name} {value}" for name, value in broken.items()]
        more = f" and {len(records) - NAMED} more" if len(records) > NAMED else ""
        is_first = not self.latest.startswith(f"step {step},")  # of its step: a whole rollout batch may be broken
        self.latest = f"step {step}, update {update}: {', '.join(numbers)}; records {', '.join(records[:NAMED])}{more}"
        if is_first:
            say(f"an update was skipped, as if it had not been ({self.latest}){self._where()}")
        if self.folder is not None and self.folder.is_dir() and ranks.is_first():
            line = {"step": step, "update": update, "not_finite": numbers, "records": records}
            with (self.folder / FILE).open("a", encoding="utf-8") as file:
                file.write(to_json(line) + "\n")

    def count(self, updates: Sequence[StepResult]) -> None:
        """Count a step by its updates: it was left out if all of them were, and there were any."""
        is_left_out = bool(updates) and all(update.is_left_out for update in updates)
        self.in_a_row = self.in_a_row + 1 if is_left_out else 0

    def check(self) -> None:
        """Raise TrainingError if too many steps in a row were left out."""
        if self.in_a_row > MOST_IN_A_ROW:
            raise TrainingError(
                f"{self.in_a_row} steps in a row made no update, because losses or gradients were not finite "
                f"(last: {self.latest}){self._where()}. Lower --learning-rate, try --dtype float32, or look at the records; "
                f"{MOST_IN_A_ROW} in a row are allowed"
            )

    def _where(self) -> str:
        return "" if self.folder is None else f"; {self.folder / FILE} lists them all"
