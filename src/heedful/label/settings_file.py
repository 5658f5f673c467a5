"""project.yaml: the settings of a project, written once and read back strictly."""

import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from heedful.configs.label import ProjectSettings
from heedful.configs.parse import YamlFlag, read_yaml_flags, to_yaml
from heedful.errors import ConfigError
from heedful.files import write_text
from heedful.label.state import NewerError

SETTINGS = "project.yaml"
FORMAT = 3
"""The format of project.yaml and events.sqlite. Increase it with any change that an older heedful would misread."""


def write_settings(folder: Path, settings: ProjectSettings) -> None:
    """Write the settings of a project into its folder."""
    plain = ProjectSettings(**{name: getattr(settings, name) for name in ProjectSettings.__dataclass_fields__})
    write_text(folder / SETTINGS, f"format: {FORMAT}\n{to_yaml(plain)}")


def raise_format(folder: Path) -> None:
    """Set the format in a project's settings to `FORMAT`. The rest of the file is unchanged."""
    text, line = (folder / SETTINGS).read_text(encoding="utf-8"), f"format: {FORMAT}"
    changed, count = re.subn(r"^format *:.*$", line, text, count=1, flags=re.MULTILINE)
    if not count and not text.lstrip().startswith("{"):
        changed = f"{text.rstrip()}\n{line}\n"
    if changed != text:
        write_text(folder / SETTINGS, changed)


def read_settings(folder: Path) -> ProjectSettings:
    """Return the settings of a project.

    Raises ConfigError, with file and line, for an unknown key and for an invalid value, and NewerError for a format above
    `FORMAT`; a file without one has format 1.
    """
    path = folder / SETTINGS
    if not path.exists():
        raise ConfigError(
            f"{folder} is not a labelling project: it has no {SETTINGS}; make one with `heedful label new {folder}`"
        )
    hints = typing.get_type_hints(ProjectSettings)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    flags = read_yaml_flags(path, ProjectSettings)
    if not flags:
        raise ConfigError(f"{path}: it has no settings; restore it, or make another project with `heedful label new`")
    _check_format(flags)
    for flag in flags:
        if flag.key == "format":
            continue
        if flag.key not in hints:
            raise ConfigError(f"{flag.place}: {flag.key} is not a setting of a project; it has {', '.join(hints)}")
        if hints[flag.key] is bool:
            values[flag.key] = not flag.arguments[0].startswith("--no-")
        elif typing.get_origin(hints[flag.key]) is tuple:
            values[flag.key] = flag.arguments[1:]
        else:
            values[flag.key] = _value(flag.place, flag.key, hints[flag.key], flag.arguments[0].partition("=")[2])
        places[flag.key] = flag.place
    try:
        return ProjectSettings(**values)
    except ConfigError as error:
        wrong = next(
            (place for key, place in places.items() if f"--{key.replace('_', '-')} " in f"{error} "), str(path)
        )
        raise ConfigError(f"{wrong}: {error}") from error


def _check_format(flags: Sequence[YamlFlag]) -> None:
    """Refuse an unknown format, before its keys are reported as unknown."""
    for flag in flags:
        if flag.key == "format":
            given = int(_value(flag.place, "format", int, "".join(flag.arguments).partition("=")[2]))
            if given > FORMAT:
                raise NewerError(f"{flag.place}: format {given} is not known; this heedful knows {FORMAT}")
            if given < 1:
                raise ConfigError(f"{flag.place}: format must be 1 to {FORMAT}, got {given}")


def _value(place: str, key: str, hint: Any, text: str) -> Any:
    if typing.get_origin(hint) is Literal:
        if text not in typing.get_args(hint):
            raise ConfigError(f"{place}: {key} must be one of {', '.join(typing.get_args(hint))}, got {text!r:.80}")
        return text
    try:
        return hint(text)
    except ValueError as error:
        kind = "a whole number" if hint is int else "a number"
        raise ConfigError(f"{place}: {key} must be {kind}, got {text!r:.80}") from error
