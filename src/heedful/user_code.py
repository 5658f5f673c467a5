"""Load the user's own functions and classes, named by a setting as ``python:FILE.py:NAME``."""

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from heedful.errors import ConfigError, HeedfulError, user_frame

PREFIX = "python:"
MODULE = "heedful user file "
"""Prefix of the module names that `load` gives to files."""
IN_PYTHON = f"{PREFIX}in Python:"
"""Prefix of values that stand for an object of this process (`as_value`)."""
_FOUND: dict[str, Any] = {}
"""Objects of this process by the values that stand for them in settings."""
LONGEST_MESSAGE = 500
"""Number of characters shown of an exception's message."""


def is_named(value: str) -> bool:
    """Whether a setting's value names a function or class of the user's own."""
    return value.startswith(PREFIX)


def check_form(flag: str, value: str) -> None:
    """Raise ConfigError unless the value has the form ``python:FILE.py:NAME``."""
    file, _, name = value.removeprefix(PREFIX).rpartition(":")
    if not file or not name:
        raise ConfigError(f"{flag}: {value} does not name a function; use python:FILE.py:FUNCTION")


def as_value(given: Any) -> str:
    """A setting's value as text; for a function or class of this process, a text that stands for it."""
    if isinstance(given, str) or not callable(given):
        return str(given)
    value = f"{IN_PYTHON}{getattr(given, '__name__', type(given).__name__)}"
    _FOUND[value] = given
    return value


def load(flag: str, value: str, error: type[HeedfulError] = ConfigError) -> Any:
    """Return the object named by ``python:FILE.py:NAME``; the file is imported once.

    Raises ConfigError if the file or the name does not exist, ``error`` if the file cannot be imported.
    """
    if value in _FOUND:
        return _FOUND[value]
    if value.startswith(IN_PYTHON):
        name = value.removeprefix(IN_PYTHON)
        raise ConfigError(f"{flag}: {name} was given as a Python object when this was saved; give it again")
    check_form(flag, value)
    file, _, name = value.removeprefix(PREFIX).rpartition(":")
    path = Path(file)
    if not path.is_file():
        found = _file_of_module(path.name)
        form = f"; python: names a file, not a module: write python:{found}:{name}" if found else ""
        raise ConfigError(f"{flag}: the file {file} of {value} does not exist{form}")
    spec = importlib.util.spec_from_file_location(f"{MODULE}{path.resolve()}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag}: {file} is not a Python file; use python:FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up a class's module there
    try:
        spec.loader.exec_module(module)
    except BaseException as raised:
        raise error(f"{flag}: {file} cannot be imported: {describe(raised)}") from raised
    if not callable(getattr(module, name, None)):
        names = [n for n, one in vars(module).items() if inspect.isfunction(one) and not n.startswith("_")]
        raise ConfigError(f"{flag}: {file} has no function {name!r}; it has {', '.join(names) or 'none'}")
    _FOUND[value] = getattr(module, name)
    return _FOUND[value]


def file_of(value: str) -> str:
    """The file in ``python:FILE.py:NAME``."""
    return value.removeprefix(PREFIX).rpartition(":")[0]


def call(flag: str, value: str, *arguments: Any, **named: Any) -> Any:
    """Call the function named by a setting. Raises ConfigError with the file and line of an exception in it."""
    try:
        return load(flag, value)(*arguments, **named)
    except HeedfulError:
        raise
    except Exception as error:
        raise ConfigError(f"{flag} {value} raised {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Describe an exception of a user's function, with the line of the user's code that raised it."""
    frame = user_frame(error)
    place = "" if frame is None else f" ({frame.filename}, line {frame.lineno})"
    return f"{type(error).__name__}: {error!s:.{LONGEST_MESSAGE}}{place}"


def _file_of_module(name: str) -> str | None:
    """The file of the importable module of this name; None if there is none."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return None if found is None else found.origin
