"""The function behind `heedful label new`."""

import dataclasses
import secrets

from heedful.configs.label import NewProjectConfig, ProjectSettings
from heedful.display import Screen, harmless
from heedful.label.project import Project


def new_project(config: NewProjectConfig) -> None:
    """Make a project and print what to do next. Raises ConfigError if the folder is in use."""
    settings = ProjectSettings(**{name: getattr(config, name) for name in ProjectSettings.__dataclass_fields__})
    if settings.seed == 0 and "seed" not in config.given:  # browsers know the ids from which the order is drawn
        settings = dataclasses.replace(settings, seed=secrets.randbelow(2**63))
    Project.create(config.project, settings).close()
    say(f"the project {settings.name!r} is in {config.project}; its settings are in {config.project}/project.yaml")
    say(f"put in what is to be labelled:  heedful label import {config.project} --data FILE.jsonl")
    say(f"open its pages:                 heedful label serve {config.project}")


def say(text: str) -> None:
    """Print a line, without what a terminal would obey."""
    Screen(soft_wrap=True).print(harmless(text), markup=False, highlight=False)
