"""Settings of ``heedful label import``, ``export`` and ``stats``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.label import Task
from heedful.configs.settings import BELOW_ONE, Range, Settings
from heedful.errors import ConfigError

PROJECT = ("project",)


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Settings):
    """Add prompts, answers or preferences to a project: heedful label import PROJECT --data FILE."""

    project: Path
    """Folder of the project."""
    data: str
    """File or data set to read: prompts, answers to judge, or preferences (docs/labelling-data.md)."""
    task: Task | None = None
    """Task of each record. By default its columns decide: prompt, chosen and rejected make a pair."""
    columns: str = ""
    """The file's own column names: prompt=question,chosen=answer."""
    with_labels: bool = False
    """Also take the preferences, ratings or demonstrations that the file has, as labels of the person "import". Their items
    then count as labelled."""
    screening: bool = False
    """Put the items into the screening set, which decides who may label."""
    gold: bool = False
    """Take the items as gold questions: the preferences, ranks or ratings of the file are their known answers. They are mixed
    into everybody's work, and train nothing."""
    round: Annotated[int | None, Range(at_least=1)] = None
    """Round that the items belong to. By default 1, or what an exported items.jsonl says."""
    max_samples: Annotated[int | None, Range(at_least=1)] = None
    """Read only the first N records."""
    unusable: Literal["error", "drop"] = "error"
    """What to do with a record that cannot be used: stop, or leave it out and count it."""
    preview: bool = False
    """Show what would be added, and add nothing."""

    POSITIONAL = PROJECT

    def check(self) -> None:
        super().check()
        if self.gold and (self.screening or self.with_labels):
            other = "--screening" if self.screening else "--with-labels"
            raise ConfigError(
                f"--gold and {other} are both given; the file's labels can have only one use: leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Settings):
    """Write a project's labels as training data: heedful label export PROJECT --output FOLDER."""

    project: Path
    """Folder of the project."""
    output: Path
    """Folder to write. It may not be in the project, or contain it."""
    eval_fraction: Annotated[float, BELOW_ONE] = 0.1
    """Share of the prompts that go to the evaluation files; the trainers' --eval-fraction chooses the same ones."""
    margin: Literal["none", "small", "large"] = "small"
    """Margin of a pair whose strength is 1, 2, 3 or 4. small: 0, 1/3, 2/3, 1; large: 0, 1, 2, 3 (Llama 2)."""
    flagged: Literal["keep", "leave-out"] = "keep"
    """Whether items flagged as personal-data, unsafe or broken, in a label or a skip, are in the training files."""
    without: tuple[str, ...] = ()
    """People whose labels are in none of the training files, by the ids that heedful label stats shows."""
    gold: Literal["keep", "leave-out"] = "leave-out"
    """Whether labels of gold questions are in the training files."""
    withdrawn: Literal["keep", "leave-out"] = "leave-out"
    """Whether items that an owner has withdrawn (heedful label withdraw), and their labels, are in the files."""
    overwrite: bool = False
    """Replace the folder if it holds an earlier export and nothing else."""

    POSITIONAL = PROJECT


@dataclass(frozen=True, kw_only=True)
class StatsConfig(Settings):
    """Show how well people agree and how they label: heedful label stats PROJECT."""

    project: Path
    """Folder of the project."""
    output: Path | None = None
    """Also write all statistics to this JSON file."""

    POSITIONAL = PROJECT


@dataclass(frozen=True, kw_only=True)
class ListConfig(Settings):
    """Show single labels, the newest first: heedful label list PROJECT."""

    project: Path
    """Folder of the project."""
    person: str = ""
    """Only labels of this person: an id that heedful label stats shows, or a name."""
    differ: bool = False
    """Only labels of items about which people say different things."""
    search: str = ""
    """Only labels of items with this id, or with this text in the prompt or an answer."""
    limit: Annotated[int, Range(at_least=1)] = 50
    """Show at most N labels."""

    POSITIONAL = PROJECT


@dataclass(frozen=True, kw_only=True)
class CorrectConfig(Settings):
    """Replace a label's answer; the original stays in the history: heedful label correct PROJECT LABEL."""

    project: Path
    """Folder of the project. It may not be served meanwhile: correct on its page Labels then."""
    label: str
    """The label, by the id that heedful label list shows."""
    answer: str
    """The fields to change, as JSON; candidates are numbered from 0: {"preferred": 1, "strength": 2} or {"rating":
    4}."""
    reason: str = ""
    """Why. It is kept with the correction."""
    by: str = ""
    """The owner who corrects, by id or name. By default the first one."""

    POSITIONAL = ("project", "label")


@dataclass(frozen=True, kw_only=True)
class WithdrawConfig(Settings):
    """Take wrongly imported items out of a project, or put them back: heedful label withdraw PROJECT --batch 3.

    Without --batch and --items, it lists the imports.
    """

    project: Path
    """Folder of the project. It may not be served meanwhile: withdraw on its page Import then."""
    batch: str = ""
    """The import whose items to withdraw, by its number in the list."""
    items: tuple[str, ...] = ()
    """Ids of single items to withdraw."""
    back: bool = False
    """Put the items back instead."""
    reason: str = ""
    """Why. It is kept with the event."""

    POSITIONAL = PROJECT

    def check(self) -> None:
        super().check()
        if self.batch and self.items:
            raise ConfigError(
                "--batch and --items are both given; withdraw an import or single items, one after the other"
            )
        if self.back and not (self.batch or self.items):
            raise ConfigError("--back needs --batch or --items: name the items to put back")
