"""The code of a script or a notebook."""

import io
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from heedful.errors import ConfigError
from heedful.files import LARGEST_YAML, shallow

MOST_ITEMS = 10_000
LARGEST = 4_000_000
"""Bytes that are read of a script or notebook."""


def read_source(path: Path) -> str:
    """The text of a script, or the code of a notebook. Raises ConfigError."""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not there"
        raise ConfigError(f"{path} is {what}; name a Python script, a notebook, or a YAML file of LLaMA-Factory")
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ConfigError(f"{path} has more than {LARGEST:,} bytes, so it is no script")
    try:
        if path.suffix == ".ipynb":
            return "\n\n".join(_cells(path, json.loads(content.decode("utf-8"))))
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not a notebook: {error}") from None
    except (UnicodeDecodeError, SyntaxError, LookupError, RecursionError) as error:
        raise ConfigError(f"{path}: its text cannot be read: {error}; save it as UTF-8") from None


def read_settings(path: Path) -> dict[str, Any]:
    """The ``key: value`` lines of a YAML file. Raises ConfigError."""
    if not path.is_file() or path.stat().st_size > LARGEST_YAML:
        what = "too large for settings" if path.is_file() else "a folder" if path.is_dir() else "not there"
        raise ConfigError(f"{path} is {what}; name a Python script, a notebook, or a YAML file of LLaMA-Factory")
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=shallow(yaml.SafeLoader))
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected 'key: value' lines, found {type(values).__name__}")
    left, count = [values], 0
    while left:  # as written out: an alias that repeats a list of aliases may stand for billions of items
        one = left.pop()
        count += 1
        if isinstance(one, dict | list):
            left += one.values() if isinstance(one, dict) else one
        if count > MOST_ITEMS:
            raise ConfigError(f"{path}: its lists have more than {MOST_ITEMS:,} items, so they are no settings")
    return {str(name): number(value) for name, value in values.items()}


def number(value: Any) -> Any:
    """YAML reads 1e-5 as a text; the libraries' dataclasses read it as a number."""
    if isinstance(value, str):
        try:
            return float(value) if any(one in value for one in "0123456789") else value
        except ValueError:
            return value
    return value


def _cells(path: Path, notebook: Any) -> Iterator[str]:
    """The code of a notebook's cells. Lines for the shell and for IPython become comments."""
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise ConfigError(f"{path}: not a notebook of format 4: it has no list of cells")
    for cell in cells:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            text = "".join(map(str, source)) if isinstance(source, list) else str(source)
            yield "\n".join(f"# {line}" if line.lstrip()[:1] in ("%", "!") else line for line in text.splitlines())
