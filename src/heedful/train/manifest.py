"""The manifest of a folder: its files with their sizes and SHA-256 sums. A folder is what was written if it verifies."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from heedful.errors import CheckpointError
from heedful.files import to_json, write_text

MANIFEST = "MANIFEST.json"
SCHEMA = 1
"""Of the manifest and of what it lists. A higher one is of a newer heedful."""


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the manifest of all files that a folder holds, with what it is ``about``. It is the last file written."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_digest(folder / name)}
        for name in sorted(_names(folder))
    }
    content = {"schema": SCHEMA, **about, "files": files}
    write_text(folder / MANIFEST, to_json({**content, "sha256": _digest(content)}, indent=1))


def verify(folder: Path) -> dict[str, Any]:
    """What a folder's manifest says, if all its files, and no others, are as they were written.

    Links are not followed: a checkpoint holds its own files. Raises CheckpointError with the first thing that is wrong.
    """
    manifest = _read(folder)
    files = manifest["files"]
    found = _names(folder) - {MANIFEST}
    for name in files:
        if name not in found:
            raise CheckpointError(f"{name} is missing")
    extra = sorted(found - files.keys())
    if extra:
        raise CheckpointError(f"{extra[0]} is not in its manifest")
    for name, facts in files.items():
        path, size = folder / name, (folder / name).stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(f"{name} has {size} bytes, not {facts['bytes']}")
        if file_digest(path) != facts["sha256"]:
            raise CheckpointError(f"{name} has other content than was written")
    return manifest


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"it has no {MANIFEST}, so it was not written to its end")
    try:
        manifest = json.loads(path.read_bytes().decode("utf-8"))
        schema, digest, files = manifest["schema"], manifest.pop("sha256"), manifest["files"]
        names = {name: (facts["bytes"], facts["sha256"]) for name, facts in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its {MANIFEST} cannot be read") from error
    if schema != SCHEMA:
        raise CheckpointError(f"it has the schema {schema!r}; this heedful reads {SCHEMA}: use the one that wrote it")
    if digest != _digest(manifest):
        raise CheckpointError(f"its {MANIFEST} was changed")
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"its {MANIFEST} names {name!r}, outside of it")
    content: dict[str, Any] = manifest
    return content


def _names(folder: Path) -> set[str]:
    """The files below a folder. Raises CheckpointError for anything that is neither a file nor a folder, such as a link."""
    names = set()
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise CheckpointError(f"{relative} is a link or no file, which no checkpoint holds")
            if path.is_file():
                names.add(relative)
    return names


def file_digest(path: Path) -> str:
    """The SHA-256 sum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json(content).encode("utf-8", "backslashreplace")).hexdigest()
