"""Settings of a labelling project, and of the commands that make and rebuild one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from heedful.configs.checks import flag
from heedful.configs.ranges import FRACTION, NOT_NEGATIVE, SEED, Range
from heedful.configs.settings import Settings
from heedful.errors import ConfigError

Task = Literal["pair", "ranking", "rating", "demonstration", "correction", "chat"]


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
    """How often a person gets an item a second time without being told, as a share of what they label. It measures whether
    people agree with themselves."""
    screening_items: Annotated[int, NOT_NEGATIVE] = 0
    """How many screening items a new annotator labels before anything else. 0 lets everybody label at once."""
    screening_agreement: Annotated[float, FRACTION] = 0.7
    """Least agreement with the owner on them to be let in. Below it an annotator is refused."""
    lease_minutes: Annotated[float, Range(above=0)] = 15.0
    """Minutes for which an item that somebody has on the screen is kept from others. It starts anew whenever the page is
    loaded or a draft is saved."""
    seed: Annotated[int, SEED] = 0
    """Seed of the order of answers on the screen, of which items overlap, and of when repeats come."""
    markdown: bool = False
    """Show answers as formatted Markdown, sanitised. Off, they are shown as plain text."""

    def check(self) -> None:
        super().check()
        for name in ("overlap_people", "screening_items", "seed"):
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                raise ConfigError(f"{flag(name)} must be a whole number, got {getattr(self, name)!r}")
        if not self.name.strip():
            raise ConfigError("--name is empty; give the project a name that people see on the page")


@dataclass(frozen=True, kw_only=True)
class NewProjectConfig(ProjectSettings):
    """Make a project in which people label: heedful label new PROJECT."""

    project: Path
    """Folder to make."""
    name: str = ""
    """Name that people see on the page. By default the folder's."""
    seed: Annotated[int, SEED] = 0
    """Seed of the order of answers on the screen, of which items overlap, and of when repeats come. Without this flag it
    is random, so that nobody can work out which answer on the screen is which model's."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("project",)
    """Settings whose values may stand first, without their flags."""

    def check(self) -> None:
        object.__setattr__(self, "project", Path(self.project))
        object.__setattr__(self, "name", self.name or self.project.resolve().name)
        super().check()


@dataclass(frozen=True, kw_only=True)
class RebuildConfig(Settings):
    """Make a project's database anew from its journal and compare them: heedful label rebuild PROJECT."""

    project: Path
    """Folder of the project."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("project",)
    """Settings whose values may stand first, without their flags."""

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "project", Path(self.project))
