"""Settings of ``heedful course``: the lessons, one to start, one to check."""

from dataclasses import dataclass
from typing import Annotated, Literal

from heedful.configs.settings import Range, Settings

NUMBER = Range(at_least=1, at_most=99)


@dataclass(frozen=True, kw_only=True)
class CourseConfig(Settings):
    """List the lessons of the course. heedful course start N writes one as a notebook, heedful course check N checks its
    exercises."""

    language: Literal["en", "zh"] = "en"
    """Language of the lessons: English or Chinese."""


@dataclass(frozen=True, kw_only=True)
class CourseStartConfig(CourseConfig):
    """Write a lesson into the current folder as a notebook: heedful course start N."""

    lesson: Annotated[int, NUMBER]
    """Number of the lesson, as heedful course lists it."""
    overwrite: bool = False
    """Replace the notebook of this lesson and language that is already in the folder, with all that was written in it."""

    POSITIONAL = ("lesson",)


@dataclass(frozen=True, kw_only=True)
class CourseCheckConfig(Settings):
    """Check the exercises of a lesson's notebook in the current folder: heedful course check N. The exit status is
    0 only if all are right."""

    lesson: Annotated[int, NUMBER]
    """Number of the lesson, as heedful course lists it."""
    language: Literal["en", "zh"] | None = None
    """Language of the notebook. Without it, the notebook that is here: the English one, if both are."""
    seconds: Annotated[int, Range(at_least=1)] = 60
    """Longest time for a cell of the notebook, in seconds. A cell that takes longer is stopped."""

    POSITIONAL = ("lesson",)
