"""Python code that comes with a model (``auto_map`` in its config.json): refused, left out, or run because the user asked."""

import warnings
from pathlib import Path
from typing import Any

from heedful.errors import CheckpointError
from heedful.files import read_object
from heedful.hub import is_download

FILES = ("config.json", "tokenizer_config.json")
"""The files of a model that may name code."""


def needs_code(name: str) -> str:
    """Return what to say of a model that cannot be loaded without its own code."""
    what = f"{name} needs Python code of its own (auto_map in its config), and such code may do whatever you may do, so"
    if Path(name).is_dir():
        downloaded = f" and name the folder itself: {name}" if is_download(name) else ""
        return f"{what} it runs only if you ask: read its .py files, and add --trust-remote-code{downloaded}"
    return (
        f"{what} it is never run for a model that is downloaded by name: it could be other code in the next run. Download it "
        f"(hf download {name} --local-dir FOLDER), read its .py files, and name that folder, with --trust-remote-code"
    )


def check_code_is_here(folder: Path) -> None:
    """Refuse a trusted folder that names code in a repository on the Hub, which may be other code tomorrow.

    Raises CheckpointError.
    """
    for file in FILES:
        path = folder / file
        if not path.is_file():
            continue
        code = read_object(path, "download the model again").get("auto_map")
        elsewhere = [name for name in _names(code) if "--" in name]
        if elsewhere:
            raise CheckpointError(
                f"{path}: auto_map names {elsewhere[0]!r}, code in a repository on the Hub that may be other code tomorrow. "
                "Copy the file into the folder, and take the repository's name and -- out of auto_map"
            )


def _names(code: Any) -> list[str]:
    """All strings in an ``auto_map``: its values are names, or lists of names."""
    if isinstance(code, dict | list):
        return [name for part in (code.values() if isinstance(code, dict) else code) for name in _names(part)]
    return [code] if isinstance(code, str) else []


def leave_code(config: Any, name: str) -> None:
    """Say that a model's code is not run, if it names some that transformers does not need.

    Args:
        config: the model's configuration, as transformers has it.
        name: the model's, for the warning.
    """
    if getattr(config, "auto_map", None):
        warnings.warn(
            f"{name} comes with Python code (auto_map in its config.json), which is not run: transformers' own "
            f"{config.model_type} is loaded. --trust-remote-code would run the code",
            stacklevel=4,
        )
