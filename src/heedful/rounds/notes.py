"""What is known of a project's rounds: PROJECT/rounds.json and PROJECT/rounds/N/round.json.

rounds.json holds ``rounds`` (how many have begun) and ``settings`` (those of the last one). round.json of round N holds

- ``round``: N; ``settings``: those with which it began; ``before``: the policy that its answers come from
- ``steps``, one object for each step that is done, in order; each has ``seconds``
  - ``sample``: ``prompts``, ``asked`` (pairs), ``random`` and ``active`` (how many of them), ``checkpoint``,
    ``items`` (their ids)
  - ``label``: ``labels``, ``pairs`` (labelled ones of this round), ``events`` (the number of the project's last event, up to
    which undo takes no label back any more), ``statistics`` (`heedful.label.statistics`, of this round)
  - ``reward``: ``models`` (folders), ``train_pairs``, ``eval_pairs``, ``accuracy`` (mean of the models on held-out labels, or
    null)
  - ``ppo``: ``model`` (folder), ``score_mean`` (held out, by the reward models), ``kl``, ``steps``
  - ``evaluate``: ``over_previous`` (``win_rate``, ``interval_95``, ``verdict``: better, worse or not
    distinguishable, ``score_mean``, ``baseline_score_mean`` by this round's
    reward models), ``judge_over_previous`` and ``judge_over_first`` (the same by ``--judge``, or null), ``kl`` (to the first
    policy), ``samples`` (ten prompts with the answers of the new and the previous policy, and their scores)

A step is noted when all of it is done, so a step that is not there is done again or goes on. The numbers of the step
``label`` are also in PROJECT/rounds/N/labels/numbers.json, written with the labels that they count.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.faults import hit
from heedful.files import write_json
from heedful.label.rounds_page import COUNTED, ROUND, STEPS, read_noted

Note = dict[str, Any]


@dataclass
class RoundNotes:
    """The notes of one round."""

    folder: Path
    number: int
    settings: Mapping[str, Any]
    before: str
    """The policy that the round's answers come from."""
    steps: dict[str, Note] = field(default_factory=dict)

    @property
    def step(self) -> str | None:
        """The step that is next; None if all are done."""
        return next((name for name in STEPS if name not in self.steps), None)

    def note(self, step: str, numbers: Mapping[str, Any], *, since: float) -> None:
        """Write down that a step is done, and its numbers.

        Args:
            step: its name.
            numbers: what it came to.
            since: ``time.perf_counter()`` when it began.
        """
        hit("round.step")
        self.steps[step] = {**numbers, "seconds": round(time.perf_counter() - since, 2)}
        self.write()
        hit("round.noted")

    def counted(self) -> Note | None:
        """The numbers of the step ``label``, once its labels are written; None before. Raises DataError if damaged."""
        return read_noted(self.folder / "labels" / COUNTED)

    def write(self) -> None:
        """Write round.json."""
        content = {"round": self.number, "settings": self.settings, "before": self.before, "steps": self.steps}
        write_json(self.folder / "round.json", content)


def folder_of(project: Path, number: int) -> Path:
    """Where a round is."""
    return project / "rounds" / str(number)


def read_state(project: Path) -> tuple[int, dict[str, Any] | None]:
    """How many rounds have begun, and the settings of the last one, or None. Raises DataError for a damaged file."""
    state = read_noted(project / "rounds.json", "rounds", "settings")
    return (0, None) if state is None else (state["rounds"], state["settings"])


def write_state(project: Path, number: int, settings: Mapping[str, Any]) -> None:
    """Write that a round begins with these settings."""
    write_json(project / "rounds.json", {"rounds": number, "settings": settings})


def read_round(project: Path, number: int) -> RoundNotes | None:
    """The notes of a round; None if it has none yet. Raises DataError for a damaged file."""
    folder = folder_of(project, number)
    content = read_noted(folder / "round.json", *ROUND, "before")
    if content is None:
        return None
    return RoundNotes(folder, number, content["settings"], content["before"], content["steps"])
