"""Find what a model's name means: a local folder, a name on the Hub, or adapters and their base. Code of its own is refused,
left out, or run because the user asked."""

import contextlib
import difflib
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

from heedful.configs.options import TrustOptions
from heedful.errors import CheckpointError, is_out_of_memory
from heedful.files import read_object
from heedful.hub import is_download, local_model
from heedful.models.adapters import ADAPTER_CONFIG, adapter_chain
from heedful.models.settings_files import check_settings

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class Source:
    """What a model's name means, found once.

    Everything that loads a part of the model takes it in place of the name.
    """

    name: str
    """The name as the user wrote it."""
    folder: str
    """The folder on this machine, or the name on the Hub."""
    base: str
    """The plain model to load: the folder itself, or the base at the bottom of its adapters."""
    adapters: tuple[Path, ...]
    """Adapter folders to merge into the base, in order."""
    runs_code: bool = False
    """Whether Python code in the folders may run."""


NO_CODE = TrustOptions()


def resolve(model: str | Source, options: TrustOptions = NO_CODE) -> Source:
    """Find what a name means, and check that it exists, before anything large is loaded.

    Args:
        model: a folder, an adapter folder (its base must exist too), or a name on the Hub. A name of the form
            ``org/model`` or ``model`` that is not a local path is left to the Hub unchecked. A `Source` is returned as it
            is.
        options: say whether code in the folder may run. Code that is downloaded by name never may: it could be other code
            in the next run.

    Raises CheckpointError if a local path is missing or holds no model, if its settings are damaged or nonsense, if its index
    of weights names files elsewhere, or if trusted code is not in the folder.
    """
    if isinstance(model, Source):
        return model
    folder = str(local_model(model))
    base, adapters = adapter_chain(folder)
    if adapters:
        try:
            _check_model_folder(base)
        except CheckpointError as error:
            raise CheckpointError(f"{adapters[0]} holds adapters, whose base is not there: {error}") from error
    else:
        _check_model_folder(folder)
    for place in (Path(base), *adapters):
        check_settings(place)
    runs_code = options.trust_remote_code and Path(base).is_dir() and not is_download(base)
    if runs_code:
        for place in (Path(base), *adapters):
            check_code_is_here(place)
    return Source(str(model), folder, base, tuple(adapters), runs_code)


def _check_model_folder(name: str) -> None:
    """Refuse a local path that is missing or holds no model. Raises CheckpointError."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            models = sorted({str(p.parent) for kind in ("config.json", ADAPTER_CONFIG) for p in path.glob(f"*/{kind}")})
            hint = f"; did you mean {' or '.join(models)}?" if models else ""
            raise CheckpointError(f"{name} is a folder without a config.json, so it is not a Hugging Face model{hint}")
        _check_shards(path)
    elif path.exists():
        raise CheckpointError(f"{name} is a file; a model is a folder in Hugging Face format, or a Hub name")
    else:
        parent = path.parent
        siblings = [p.name for p in parent.iterdir()] if parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        looks_local = HUB_NAME.fullmatch(name) is None or Path(path.parts[0]).is_dir()
        if looks_local or (near and len(path.parts) == 1):
            hint = f"; did you mean {parent / near[0]}?" if near else ""
            raise CheckpointError(f"model {name} does not exist{hint}")


def _check_shards(folder: Path) -> None:
    """Refuse an index of weights that names files outside its folder. Raises CheckpointError."""
    for index in sorted(folder.glob("*.index.json")):
        with explained(str(index), "list of weights"):
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            outside = [file for file in files if Path(file).is_absolute() or ".." in Path(file).parts]
        if outside:
            raise CheckpointError(
                f"{index}: names weights outside its folder: {outside[0]!r}; download the model again"
            )


def load_config(model: str | Source) -> Any:
    """Load only a model's configuration. Raises CheckpointError."""
    source = resolve(model)
    with explained(source.folder, "configuration"):
        return AutoConfig.from_pretrained(source.base, trust_remote_code=source.runs_code)


@contextlib.contextmanager
def explained(name: str, kind: str) -> Iterator[None]:
    """Turn any exception raised while reading ``name`` into a CheckpointError that says what could not be loaded, but for one
    that says that memory ran out.

    Args:
        name: the folder or name that is read.
        kind: what is loaded from it, for the message.

    Meanwhile transformers' own report of missing weights is silenced, because every caller checks them itself.
    """
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):  # transformers would run code, and was told not to
            raise CheckpointError(needs_code(name)) from error
        cause = _cause(error)
        nowhere = "" if Path(name).exists() else " (and there is no folder of that name here)"
        raise CheckpointError(f"{name}: cannot load a {kind} from it: {cause}{nowhere}") from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def _cause(error: Exception) -> str:
    """What an exception of transformers says, on one line."""
    said = str(error).strip()
    if "ignore_mismatched_sizes" in said:
        return "its weights have other shapes than config.json says (vocab_size, hidden_size, heads); one of the two is wrong"
    lines = [line.strip() for line in said.splitlines()]
    if isinstance(error, KeyError) and said:
        return f"it names {said}, which does not exist"
    if lines and "alidation error" in lines[0]:  # of a configuration, which is also read for the tokenizer's sake
        return f"config.json: {' '.join(lines[:2])}"
    return lines[0] if lines else type(error).__name__


# Python code that comes with a model (``auto_map`` in its config.json) ----------------------------------------------------


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
