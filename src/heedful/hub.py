"""Download models and data sets named ``modelscope:ORG/NAME`` from ModelScope, once, and return their folders."""

import importlib
import re
from pathlib import Path

from heedful.errors import CheckpointError, ConfigError, DataError

MODELSCOPE = "modelscope:"
NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
"""A name on ModelScope. Neither part begins with a dot, so it cannot lead out of the folder of downloads."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
"""A model on the Hugging Face Hub."""

_folders: dict[tuple[str, str], str] = {}
"""The folder of each download of this process, so that a run reads one version and asks ModelScope for it once."""


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


def is_download(folder: str) -> bool:
    """True for a folder that `local_model` or `local_dataset` downloaded in this process."""
    return folder in _folders.values()


def hub_revision(name: str) -> str | None:
    """Return the commit of a model on the Hugging Face Hub that was read last, as the local cache has it.

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
