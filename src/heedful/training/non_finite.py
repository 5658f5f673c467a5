"""Skipping steps with non-finite numbers: logs their records, and ends a run after too many in a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from heedful.display import say
from heedful.distributed import ranks
from heedful.errors import TrainingError
from heedful.files import to_json

FILE = "skipped.jsonl"
"""File in a run's folder, with a line per skipped update."""
MOST_IN_A_ROW = 3
"""Maximum number of skipped steps in a row."""
NAMED = 3
"""Maximum number of records named in a message; the file has all."""


class StepResult(NamedTuple):
    """An optimizer step, taken or skipped."""

    norm: float
    """Gradient norm before clipping; not finite if the step was skipped."""
    is_skipped: bool = False
    """True if skipped for non-finite numbers. Not for gradients that overflow the current float16 loss scale."""


@dataclass
class NonFiniteGuard:
    """Counts a run's skipped steps, and logs their records.

    Args:
        folder: the run's folder; None, or a missing folder, writes nothing.
    """

    folder: Path | None
    in_a_row: int = 0
    """Number of consecutive skipped steps, up to the latest."""
    latest: str = ""
    """Description of the latest skipped update, for messages."""

    def skip(self, step: int, update: int, broken: Mapping[str, float], sources: Sequence[str]) -> None:
        """Log that an update (from 1) of a step was skipped for the non-finite numbers ``broken``.

        ``sources`` are its records as ``file:line``; only the suspects, if known.
        """
        records = list(dict.fromkeys(sources))
        numbers = [f"{name} {value}" for name, value in broken.items()]
        more = f" and {len(records) - NAMED} more" if len(records) > NAMED else ""
        is_first = not self.latest.startswith(f"step {step},")  # one message per step: all of its updates may be broken
        self.latest = f"step {step}, update {update}: {', '.join(numbers)}; records {', '.join(records[:NAMED])}{more}"
        if is_first:
            say(f"skipped a non-finite update ({self.latest}){self._where()}")
        if self.folder is not None and self.folder.is_dir() and ranks.is_first():
            line = {"step": step, "update": update, "not_finite": numbers, "records": records}
            with (self.folder / FILE).open("a", encoding="utf-8") as file:
                file.write(to_json(line) + "\n")

    def count(self, *networks: Sequence[StepResult]) -> None:
        """Count a step: it counts as skipped if a network had updates and all were skipped."""
        is_skipped = any(updates and all(update.is_skipped for update in updates) for updates in networks)
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0

    def check(self) -> None:
        """Raises TrainingError if too many steps in a row were skipped."""
        if self.in_a_row > MOST_IN_A_ROW:
            raise TrainingError(
                f"{self.in_a_row} steps in a row were skipped because losses or gradients were not finite "
                f"(last: {self.latest}){self._where()}. Lower --learning-rate, try --dtype float32, or check the records; "
                f"{MOST_IN_A_ROW} in a row are allowed"
            )

    def _where(self) -> str:
        return "" if self.folder is None else f"; {self.folder / FILE} lists them all"
