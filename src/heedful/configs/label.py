"""Settings of a labelling project, and of the commands to make, back up and restore one."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from heedful.configs.settings import FRACTION, NOT_NEGATIVE, SEED, Range, Settings
from heedful.errors import ConfigError
from heedful.files import shallow

Task = Literal["pair", "ranking", "rating", "demonstration", "correction", "chat"]
MOST_CRITERIA = 10
MOST_VALUES = 10
"""Maximal steps of a scale, and labels of a criterion: each has a digit key."""
LONGEST_CRITERION = 60
"""Maximal characters of a criterion's name, and of each of its labels."""
LONGEST_QUESTION = 500


@dataclass(frozen=True)
class Criterion:
    """A further question about each answer, answered on a scale from 1 or by a label."""

    name: str
    values: tuple[int | str, ...]
    """1, 2, ... of a scale, or the labels, from least to most."""
    question: str = ""
    required: bool = True

    @property
    def text(self) -> str:
        """The criterion as one line of JSON, which `read_criterion` reads."""
        is_scale = isinstance(self.values[0], int)
        found: dict[str, Any] = {
            "name": self.name,
            **({"scale": len(self.values)} if is_scale else {"labels": [*self.values]}),
        }
        found |= {"question": self.question} if self.question else {}
        return json.dumps(found | ({} if self.required else {"required": False}), ensure_ascii=False)


@cache
def read_criterion(text: str) -> Criterion:
    """Return a criterion from YAML such as ``{name: helpful, scale: 5}`` or ``{name: 诚实, labels: [否, 部分, 是]}``.

    ``question`` and ``required`` (true by default) may be added. Raises ConfigError for anything else.
    """
    shown = f"--criteria {text!r:.120}"
    example = "write {name: helpful, scale: 5, question: 'Does it help?'} or {name: honest, labels: [no, partly, yes]}"
    try:
        found: Any = yaml.load(text, Loader=shallow(yaml.BaseLoader))  # only texts, lists and mappings
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{shown} is not valid YAML; {example}") from error
    known = ("name", "scale", "labels", "question", "required")
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{shown} is no mapping; {example}")
    if unknown := [key for key in found if key not in known]:
        raise ConfigError(f"{shown} has the key {unknown[0]!r:.60}; a criterion has {', '.join(known)}")
    name, question = _words(shown, found, "name", LONGEST_CRITERION), ""
    if "question" in found:
        question = _words(shown, found, "question", LONGEST_QUESTION)
    if ("scale" in found) == ("labels" in found):
        raise ConfigError(f"{shown} needs either scale or labels; {example}")
    values: tuple[int | str, ...]
    if "scale" in found:
        scale = found["scale"]
        if (
            not isinstance(scale, str)
            or not (scale.isascii() and scale.isdigit())
            or not 2 <= int(scale) <= MOST_VALUES
        ):
            raise ConfigError(f"{shown}: scale must be a whole number from 2 to {MOST_VALUES}, got {scale!r:.60}")
        values = tuple(range(1, int(scale) + 1))
    else:
        given = found["labels"]
        if not isinstance(given, list) or not 2 <= len(given) <= MOST_VALUES:
            raise ConfigError(f"{shown}: labels must be a list of 2 to {MOST_VALUES} labels, got {given!r:.60}")
        values = tuple(_words(shown, {"labels": one}, "labels", LONGEST_CRITERION) for one in given)
        if len(set(values)) < len(values):
            raise ConfigError(f"{shown} has the same label twice; give each label once")
    required = found.get("required", "true")
    if not isinstance(required, str) or required.lower() not in ("true", "false"):
        raise ConfigError(f"{shown}: required must be true or false, got {required!r:.60}")
    return Criterion(name, values, question, required.lower() == "true")


def _words(shown: str, found: dict[str, Any], key: str, longest: int) -> str:
    text = found.get(key)
    if not isinstance(text, str) or not text.strip() or len(text) > longest or not text.isprintable():
        raise ConfigError(f"{shown}: {key} must be a text of 1 to {longest} characters on one line, got {text!r:.80}")
    return text.strip()


@dataclass(frozen=True, kw_only=True)
class ProjectSettings(Settings):
    """How a project is labelled. They are in its project.yaml."""

    name: str = "project"
    """Name that people see on the page."""
    task: Task = "pair"
    """Task of items that are imported without one: pair, ranking, rating, demonstration, correction or chat."""
    overlap: Annotated[float, FRACTION] = 0.2
    """Share of pairs, rankings and ratings that several people label, so that their agreement can be measured."""
    overlap_people: Annotated[int, Range(at_least=2)] = 2
    """How many people label each item of that share."""
    repeats: Annotated[float, Range(at_least=0, at_most=0.5)] = 0.05
    """Share of a person's items that are hidden repeats of earlier ones. They measure how often people agree with
    themselves."""
    gold: Annotated[float, Range(at_least=0, at_most=0.5)] = 0.1
    """Largest share of a person's items that are gold questions, unannounced. They are imported with their answers
    (heedful label import --gold) and measure how often people are right."""
    screening_items: Annotated[int, NOT_NEGATIVE] = 0
    """How many screening items a new annotator labels before anything else. 0 lets everybody label at once."""
    screening_agreement: Annotated[float, FRACTION] = 0.7
    """Least agreement with the owner on the screening items. Below it an annotator is refused."""
    lease_minutes: Annotated[float, Range(above=0)] = 15.0
    """Minutes for which an item on somebody's screen is reserved. They start anew when the page is loaded or a draft is
    saved."""
    seed: Annotated[int, SEED] = 0
    """Seed of the order of answers on the screen, of which items overlap, and of when repeats come."""
    markdown: bool = False
    """Show answers as formatted Markdown, sanitised. Off, they are shown as plain text."""
    criteria: tuple[str, ...] = ()
    """Further questions about each answer of a pair, ranking or rating: {name: helpful, scale: 5} or {name: honest,
    labels: [no, partly, yes], question: 'Is it true?', required: false}."""

    NESTED = frozenset({"criteria"})  # without an annotation, which would make it a setting
    """Settings that are lists of mappings in a YAML file; here each is one text, as JSON."""

    @property
    def criteria_asked(self) -> tuple[Criterion, ...]:
        """The criteria, in the order of the page."""
        return tuple(map(read_criterion, self.criteria))

    def check(self) -> None:
        super().check()
        if not self.name.strip():
            raise ConfigError("--name is empty; give the project a name that people see on the page")
        object.__setattr__(self, "criteria", tuple(one.text for one in self.criteria_asked))
        names = [one.name for one in self.criteria_asked]
        if len(names) > MOST_CRITERIA:
            raise ConfigError(f"--criteria has {len(names)} criteria; people are asked {MOST_CRITERIA} at most")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"--criteria has {twice[0]!r} twice; give each criterion a name of its own")


@dataclass(frozen=True, kw_only=True)
class NewProjectConfig(ProjectSettings):
    """Make a project in which people label: heedful label new PROJECT."""

    project: Path
    """Folder to make."""
    name: str = ""
    """Name on the page. By default the folder's."""
    seed: Annotated[int, SEED] = 0
    """Seed of the order of answers on the screen, of which items overlap, and of when repeats come. Without this flag it
    is random, so that nobody can work out which answer on the screen is which model's."""

    POSITIONAL = ("project",)

    def check(self) -> None:
        object.__setattr__(self, "name", self.name or self.project.resolve().name)
        super().check()


@dataclass(frozen=True, kw_only=True)
class BackupConfig(Settings):
    """Back a project up, also while people label: heedful label backup PROJECT."""

    project: Path
    """Folder of the project."""
    output: Path | None = None
    """Folder to make: a copy that is a project of its own, such as on another disk. By default the backup is a file in
    PROJECT/backups, where the last five are kept."""

    POSITIONAL = ("project",)


@dataclass(frozen=True, kw_only=True)
class RestoreConfig(Settings):
    """Put a damaged project right, and say what is lost: heedful label restore PROJECT."""

    project: Path
    """Folder of the project."""
    backup: Path | None = None
    """Backup to begin with: a file, or a folder that heedful label backup --output made. By default the newest one in
    PROJECT/backups. What can still be read of the damaged database is added to it."""

    POSITIONAL = ("project",)
