"""``heedful course``: list the lessons, start one, check one."""

import sys
from importlib.util import find_spec
from pathlib import Path

from heedful.apps.course.catalogue import LANGUAGES, lesson, lessons
from heedful.configs.course import CourseCheckConfig, CourseConfig, CourseStartConfig
from heedful.errors import ConfigError
from heedful.files import in_words, write_text

EXTRA = ("jupytext", "nbclient", "ipykernel")
"""Import names of the packages of heedful[course]."""


def show_lessons(config: CourseConfig) -> None:
    """Print the number and the title of each lesson."""
    for one in lessons(config.language):
        print(f"{one.number:>3}  {one.title}")
    language = "" if config.language == "en" else f" --language {config.language}"
    print(
        f"\nheedful course start 1{language} writes the first as a notebook; heedful course check 1 checks its exercises."
    )


def start(config: CourseStartConfig) -> None:
    """Write a lesson into the current folder as a notebook. Raises ConfigError, also if it already exists."""
    _need_extra()
    one = lesson(config.lesson, config.language)
    if one.copy.exists() and not config.overwrite:
        raise ConfigError(f"{one.copy} already exists and was not changed; open it, or add --overwrite to start again")
    import jupytext

    notebook = jupytext.writes(jupytext.reads(one.text, fmt="md:myst"), fmt="ipynb")
    try:
        write_text(one.copy, notebook)
    except OSError as error:
        raise ConfigError(
            f"{one.copy} cannot be written into {Path.cwd()} ({in_words(error)}); change to a writable folder"
        ) from error
    print(f"lesson {one.number}, {one.title}: open {one.copy} in VS Code, or with jupyter lab (pip install jupyterlab)")
    print(f"then:  heedful course check {one.number}")


def check(config: CourseCheckConfig) -> None:
    """Print a line for each exercise of the lesson's notebook in the current folder.

    The exit status is 1 unless all are right. Raises ConfigError if there is no readable notebook.
    """
    from heedful.apps.course.exercises import RIGHT, check_copy

    _need_extra()
    languages = [config.language] if config.language else LANGUAGES
    possible = [lesson(config.lesson, language) for language in languages]
    one = next((one for one in possible if one.copy.is_file()), None)
    if one is None:
        language = f" --language {config.language}" if config.language == "zh" else ""
        raise ConfigError(f"{possible[0].copy} is not here; heedful course start {config.lesson}{language} writes it")
    all_right = True
    for exercise, outcome in check_copy(one, config.seconds):
        print(f"{exercise}: {outcome}", flush=True)
        all_right = all_right and outcome == RIGHT
    if not all_right:
        sys.exit(1)


def _need_extra() -> None:
    """Raise ConfigError if a package of heedful[course] is not installed."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'a lesson needs packages that are not installed ({", ".join(missing)}): pip install "heedful[course]"'
        )
