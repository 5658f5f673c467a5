"""Load the user's own functions and classes, named by a setting as ``python:FILE.py:NAME``."""

import hashlib
import importlib.util
import inspect
import json
import linecache
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from heedful.errors import ConfigError, HeedfulError, user_frame

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "python:"
MODULE = "heedful user file "
"""Prefix of the module names that `load` gives to files."""
IN_PYTHON = f"{PREFIX}in Python:"
"""Prefix of the text that stands for an object in saved settings (`text_of`)."""
_MODULES: dict[Path, tuple[bytes, ModuleType]] = {}
"""Imported files, with their content then."""
_FOUND: dict[str, Any] = {}
"""What `load` found last by a setting's value."""
LONGEST_MESSAGE = 500
"""Number of characters shown of an exception's message."""
PLAIN = (bool, int, float, str, type(None))


def is_named(value: object) -> bool:
    """Whether a setting's value is a function or class of the user's own, or names one."""
    return callable(value) or (isinstance(value, str) and value.startswith(PREFIX))


def check_form(flag: str, value: object) -> None:
    """Raise ConfigError for a text that begins as ``python:FILE.py:NAME`` does and does not end so."""
    if isinstance(value, str) and value.startswith(PREFIX):
        file, _, name = value.removeprefix(PREFIX).rpartition(":")
        if not file or not name:
            raise ConfigError(f"{flag}: {value} does not name a function; use python:FILE.py:FUNCTION")


def name_of(value: object) -> str:
    """A setting's value in a message: a text itself, an object in Python by its name."""
    return value if isinstance(value, str) else str(getattr(value, "__name__", type(value).__name__))


def spec_of(flag: str, given: Callable[..., Any]) -> str:
    """``python:FILE.py:NAME`` of a class or function that other processes can import. Raises ConfigError if they cannot."""
    name = str(getattr(given, "__qualname__", ""))
    try:
        file = inspect.getsourcefile(given)
    except (OSError, TypeError):  # a class of a notebook; built in, or an object
        file = None
    if not name.isidentifier() or file is None or not Path(file).is_file() or given.__module__ == "__main__":
        raise ConfigError(
            f"{flag}: {name_of(given)} is not at the top of a file that other processes can import (what a notebook or the "
            "script itself defines is not); move it to a file of its own, import it from there, or give python:FILE.py:NAME"
        )
    return f"{PREFIX}{file}:{name}"


def text_of(given: Callable[..., Any]) -> str:
    """A text for an object in Python in saved settings: its name, and 48 bits of its `source_hash`."""
    return f"{IN_PYTHON}{name_of(given)} (source {source_hash(given)[:12]})"


def source_hash(function: Callable[..., Any]) -> str:
    """SHA-256 of what a callable is made from, the same in other processes.

    It covers the source of the function, or of an object's class, and numbers and texts among its defaults, arguments bound
    by partial, closure variables and the object's attributes. It does not cover other things a function reads or calls.
    Without available source, the name is hashed.
    """
    content = json.dumps(_content(function))
    return hashlib.sha256(content.encode("utf-8", "backslashreplace")).hexdigest()


def _content(function: Any) -> list[Any]:
    if all(hasattr(function, name) for name in ("func", "args", "keywords")):  # a partial
        return [_content(function.func), _plain(function.args), _plain(function.keywords)]
    function = inspect.unwrap(function)
    is_code = inspect.isroutine(function) or inspect.isclass(function)
    code = function if is_code else type(function)
    try:
        source = inspect.getsource(code)
    # defined interactively or by exec, not written in Python, or its file has changed since
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        source = getattr(code, "__qualname__", type(function).__qualname__)
    cells = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    defaults = [getattr(function, "__defaults__", None) or (), getattr(function, "__kwdefaults__", None) or {}]
    owner = function.__self__ if inspect.ismethod(function) else None if is_code else function
    return [source, *map(_plain, defaults), _plain(cells), _plain(getattr(owner, "__dict__", {}))]


def _plain(values: Any) -> Any:
    """Numbers and texts among the values, with their names or indices."""
    pairs = values.items() if hasattr(values, "items") else enumerate(values)
    return [[str(name), value] for name, value in pairs if isinstance(value, PLAIN)]


def load(flag: str, value: str | Callable[..., Any], error: type[HeedfulError] = ConfigError) -> Any:
    """Return an object, or the one named by ``python:FILE.py:NAME``; the file is imported again if its content changed.

    Raises ConfigError if the file or the name does not exist, ``error`` if the file cannot be imported.
    """
    if not isinstance(value, str):
        return value
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
    module = _module(flag, path, error)
    if not callable(getattr(module, name, None)):
        names = [n for n, one in vars(module).items() if _is_offered(one, module) and not n.startswith("_")]
        raise ConfigError(f"{flag}: {file} has no function or class {name!r}; it has {', '.join(names) or 'none'}")
    _FOUND[value] = getattr(module, name)
    return _FOUND[value]


def _is_offered(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) or (inspect.isclass(value) and value.__module__ == module.__name__)


def _module(flag: str, path: Path, error: type[HeedfulError]) -> ModuleType:
    content, known = path.read_bytes(), _MODULES.get(path.resolve())
    if known is not None and known[0] == content:
        return known[1]
    spec = importlib.util.spec_from_file_location(f"{MODULE}{path.resolve()}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag}: {path} is not a Python file; use python:FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up a class's module there
    linecache.checkcache(str(path))
    try:
        spec.loader.exec_module(module)
    except BaseException as raised:
        remedy = _remedy(raised, path.resolve().parent) if isinstance(raised, ModuleNotFoundError) else ""
        raise error(f"{flag}: {path} cannot be imported: {type(raised).__name__}: {raised}{remedy}") from raised
    _MODULES[path.resolve()] = content, module
    return module


def _remedy(missing: ModuleNotFoundError, folder: Path) -> str:
    """What makes a module importable that is in the folder of the user's file."""
    found = folder / (missing.name or "").partition(".")[0]
    is_there = found != folder and (found.is_dir() or found.with_suffix(".py").is_file())
    return f"; it is in {folder}: begin the command with PYTHONPATH={folder}" if is_there else ""


def file_of(value: str) -> str:
    """The file in ``python:FILE.py:NAME``."""
    return value.removeprefix(PREFIX).rpartition(":")[0]


def call(flag: str, value: str | Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a setting's function, as `load` found it last. Raises ConfigError with the file and line of an exception in it."""
    found = _FOUND.get(value) if isinstance(value, str) else value
    function = load(flag, value) if found is None else found
    try:
        return function(*arguments, **named)
    except HeedfulError:
        raise
    except Exception as error:
        raise ConfigError(f"{flag} {name_of(value)} raised {describe(error)}") from error


def call_loss(
    flag: str, value: str | Callable[..., Any], *arguments: Any, **named: Any
) -> "tuple[Tensor, dict[str, Tensor]]":
    """`call` a loss's function, which returns ``(loss, metrics)``: a scalar tensor, and numbers by name.

    The metrics come back as 0-dim tensors without gradient. Raises ConfigError for anything else.
    """
    import torch  # the settings, which name functions too, are read without it

    match call(flag, value, *arguments, **named):
        case (torch.Tensor(shape=()) as loss, dict(metrics)):
            for name, number in metrics.items():
                if not isinstance(number, bool | int | float | torch.Tensor) or torch.as_tensor(number).ndim:
                    raise ConfigError(
                        f"{flag} {name_of(value)} returned the metric {name!r} = {number!r:.80}; a metric must be one "
                        "number, such as a tensor's mean()"
                    )
            return loss, {
                name: torch.as_tensor(number, device=loss.device).detach() for name, number in metrics.items()
            }
    raise ConfigError(f"{flag} {name_of(value)} must return (loss, metrics): a scalar tensor and a dictionary")


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
