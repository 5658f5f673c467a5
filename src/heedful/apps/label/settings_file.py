"""project.yaml: the settings of a project, written once and read back strictly."""

from collections.abc import Sequence
from pathlib import Path

from heedful.apps.label.state import NewerError
from heedful.configs.label import ProjectSettings
from heedful.configs.parse import Given, read_keys, to_yaml, value_of
from heedful.configs.settings import flag, types_of
from heedful.errors import ConfigError
from heedful.files import write_text

SETTINGS = "project.yaml"
FORMAT = 3
"""The format of project.yaml and events.sqlite. Increase it with any change that heedful would otherwise misread."""


def write_settings(folder: Path, settings: ProjectSettings) -> None:
    """Write the settings of a project into its folder."""
    plain = ProjectSettings(**{name: getattr(settings, name) for name in ProjectSettings.__dataclass_fields__})
    write_text(folder / SETTINGS, f"format: {FORMAT}\n{to_yaml(plain)}")


def read_settings(folder: Path) -> ProjectSettings:
    """Return the settings of a project.

    Raises ConfigError, with file and line, for an unknown key and for an invalid value, and NewerError for a format above
    `FORMAT`.
    """
    path = folder / SETTINGS
    if not path.exists():
        raise ConfigError(
            f"{folder} is not a labelling project: it has no {SETTINGS}; make one with `heedful label new {folder}`"
        )
    hints = types_of(ProjectSettings)
    given = read_keys(path, ProjectSettings)
    if not given:
        raise ConfigError(f"{path}: it has no settings; restore it, or make another project with `heedful label new`")
    _check_format(given)
    values = {}
    for one in given:
        if one.key == "format":
            continue
        if one.key not in hints:
            raise ConfigError(f"{one.place}: {one.key} is not a setting of a project; it has {', '.join(hints)}")
        values[one.key] = value_of(one.value, hints[one.key])
    try:
        return ProjectSettings(**values)
    except ConfigError as error:
        wrong = next((one.place for one in given if f"{flag(one.key)} " in f"{error} "), str(path))
        raise ConfigError(f"{wrong}: {error}") from error


def _check_format(given: Sequence[Given]) -> None:
    """Refuse an unknown format, before its keys are reported as unknown."""
    for one in given:
        if one.key == "format":
            number = value_of(one.value, int)
            if not isinstance(number, int):
                raise ConfigError(f"{one.place}: format must be a whole number, got {number!r:.80}")
            if number > FORMAT:
                raise NewerError(f"{one.place}: format {number} is not known; this heedful knows {FORMAT}")
            if number < FORMAT:
                raise ConfigError(f"{one.place}: format must be {FORMAT}, got {number}")
