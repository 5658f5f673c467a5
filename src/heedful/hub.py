"""Download models and data sets named ``modelscope:ORG/NAME`` from ModelScope, once, and return their folders."""

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from heedful.errors import CheckpointError, ConfigError, DataError

MODELSCOPE = "modelscope:"
NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
"""A name on ModelScope. Neither part begins with a dot, so it cannot lead out of the folder of downloads."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
"""A model on the Hugging Face Hub."""

_folders: dict[tuple[str, str], str] = {}
"""The folder of each download of this process, so that a run reads one version and asks ModelScope for it once."""
_sums: dict[str, "hashlib._Hash"] = {}
"""Hash sum of the rows of each data set that this process has read from a hub."""


def local_model(name: str) -> str:
    """Return the folder of a model named ``modelscope:ORG/NAME``, downloading it if needed; return any other name as it is.

    Raises ConfigError if the rest of the name is not ORG/NAME or modelscope is not installed, and CheckpointError if the
    model cannot be downloaded.
    """
    return _folder("snapshot_download", name, CheckpointError) if str(name).startswith(MODELSCOPE) else name


def local_dataset(name: str) -> str:
    """Do the same as `local_model` for a data set. Raises ConfigError and DataError."""
    return _folder("dataset_snapshot_download", name, DataError) if name.startswith(MODELSCOPE) else name


def downloaded_model(name: str) -> str:
    """Return what `local_model` does, without any download: a model that this process has not downloaded keeps its name."""
    return _folders.get(("snapshot_download", name), name)


def sum_rows(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set and hash those that are read; `dataset_sum` returns the hash.

    Values that JSON cannot hold are hashed by their text if they are times or bytes, otherwise by their type.
    """
    found = _sums[name] = hashlib.sha256()
    for row in rows:
        text = json.dumps(row, sort_keys=True, default=_text)
        found.update(text.encode("utf-8", "backslashreplace") + b"\n")
        yield dict(row)


def dataset_sum(name: str) -> str | None:
    """SHA-256 of a data set's rows as this process last read them; None if it was not read, or is a file."""
    return _sums[name].hexdigest() if name in _sums else None


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else type(value).__name__


def is_download(folder: str) -> bool:
    """True for a folder that `local_model` or `local_dataset` downloaded in this process."""
    return folder in _folders.values()


def hub_revision(name: str) -> str | None:
    """Return the commit of the last read version of a model on the Hugging Face Hub, from the local cache.

    None for anything else: a folder, a name on ModelScope, a model that was never downloaded.
    """
    if not HUB_NAME.fullmatch(name) or Path(name).exists():
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent.name if isinstance(found, str) else None


def _folder(function: str, name: str, failure: type[CheckpointError] | type[DataError]) -> str:
    if (function, name) not in _folders:
        _folders[function, name] = _download(function, name, failure)
    return _folders[function, name]


def _download(function: str, name: str, failure: type[CheckpointError] | type[DataError]) -> str:
    repository = name.removeprefix(MODELSCOPE)
    if not NAME.fullmatch(repository):
        raise ConfigError(f"{name}: {repository!r} is not a name on ModelScope; write modelscope:ORG/NAME")
    try:
        download = getattr(importlib.import_module("modelscope"), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'{name} needs modelscope 1.20 or later ({error}): pip install "heedful[modelscope]"'
        ) from error
    try:
        return str(download(repository))
    except Exception as error:  # modelscope raises its own errors, those of requests, and OSError
        raise failure(
            f"{name}: cannot be downloaded from ModelScope: {type(error).__name__}: {error}. Check the name and the "
            "network; private models and data sets need `modelscope login`"
        ) from error
