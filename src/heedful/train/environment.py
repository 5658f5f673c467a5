"""What a run is made from and with: versions, revision, hardware, seed, hashes of its data and models."""

import functools
import hashlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from heedful import redact
from heedful.configs.options import RunOptions
from heedful.errors import ConfigError
from heedful.files import to_json
from heedful.hub import dataset_sum, downloaded_model, hub_revision
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.models.adapters import adapter_chain
from heedful.models.save import VALUE_HEAD

LIBRARIES = ("heedful", "torch", "transformers", "tokenizers", "datasets", "peft", "safetensors", "numpy")

MODEL_FILES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py"}
"""What the names of a model's files end with."""
IN_PYTHON = "what rewards are functions given in Python"
"""The name of those as data of a run."""
SOURCES = {"data": "data", "models": "models", "revisions": "models"}
"""What a run is made from, as `environment` has it, and what --allow-change calls it."""


class Given(NamedTuple):
    """Something that a run is made from and that is no file."""

    name: str
    content: str
    """What it is, in words that differ if it does."""


def with_bases(model: str) -> list[str]:
    """A model, and the models below it if it is adapters."""
    base, adapters = adapter_chain(str(model))
    return list(dict.fromkeys([str(model), *map(str, adapters), base]))


def environment(
    command: str, config: RunOptions, *, data: Sequence[str | Given], models: Sequence[str]
) -> dict[str, Any]:
    """Versions, revision, hardware, seed, and content hashes of data and parent models."""
    revisions = {name: revision for name in models if (revision := hub_revision(name))}
    models = [downloaded_model(name) for name in models]
    device = resolve_device(config.device)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": f"heedful {command}",
        "seed": config.seed,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES},
        "revision": _git_revision(),
        "platform": platform.platform(),
        "cpu": {"machine": platform.machine(), "threads": torch.get_num_threads()},
        "gpus": gpus,
        "device": device.type,
        "dtype": str(resolve_dtype(config.dtype, device)).removeprefix("torch."),
        "arguments": redact.command(),
        "data": {name: content for one in data for name, content in _content(one)},
        "revisions": revisions,
        "models": {
            path: _model_digest(Path(path)) for model in models for path in with_bases(model) if Path(path).is_dir()
        },
    }


def _content(data: str | Given) -> list[tuple[str, str]]:
    """The name of data and what is compared of it; nothing for what has neither a file nor rows."""
    if isinstance(data, Given):
        return [data]
    content = _sha256([Path(data)]) if Path(data).is_file() else dataset_sum(data)
    return [] if content is None else [(data, content)]


def sums(paths: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Content hashes of files, and of folders as models; what is neither, such as a name on the Hub, has none."""
    files = {path: _sha256([Path(path)]) for path in paths if Path(path).is_file()}
    return files, {path: _model_digest(Path(path)) for path in paths if Path(path).is_dir()}


def _model_digest(folder: Path) -> str:
    """A sum of all that a model is read from: weights, its value head, configurations, tokenizer, templates, code."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in MODEL_FILES)
    files += [path for path in [folder / VALUE_HEAD] if path.is_file()]
    return digest([[path.relative_to(folder).as_posix(), _sha256([path])] for path in files])


def digest(content: Any) -> str:
    """The SHA-256 sum of something that JSON can hold."""
    return hashlib.sha256(to_json(content).encode("utf-8", "backslashreplace")).hexdigest()


def _sha256(paths: Sequence[Path]) -> str:
    states = [path.stat() for path in paths]
    return _sha256_of(
        tuple((path, state.st_size, state.st_mtime_ns) for path, state in zip(paths, states, strict=True))
    )


@functools.lru_cache(maxsize=1024)
def _sha256_of(contents: tuple[tuple[Path, int, int], ...]) -> str:
    """The sum of files that have not changed since they had this size and time."""
    digest = hashlib.sha256()
    for path, _, _ in contents:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _git_revision() -> str | None:
    """Revision of the checkout that heedful runs from, with ``-dirty`` if it was changed; None outside one."""
    folder = str(Path(__file__).resolve().parent)

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=5, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    if git("ls-files", "--error-unmatch", __file__) is None:  # an installed package inside somebody's repository
        return None
    revision = git("rev-parse", "HEAD")
    return f"{revision}-dirty" if revision and git("status", "--porcelain", "--", folder) else revision


def same_sources(old: Mapping[str, Any], new: Mapping[str, Any], *, allowed: Sequence[str]) -> list[str]:
    """Check that a run goes on with the data and models that it began with. Returns notes on other versions.

    Args:
        old: what `environment` said when it began.
        new: what it says now.
        allowed: kinds that may differ: data, models (a revision on the Hub counts as a model).

    Raises ConfigError.
    """
    for kind, setting in SOURCES.items():
        before, now = old.get(kind, {}), new.get(kind, {})
        changed = sorted(name for name in before if name in now and before[name] != now[name])
        if changed and setting not in allowed:
            was, now_is = before[changed[0]], now[changed[0]]
            differ = f" ({was}; now {now_is})" if changed[0] == IN_PYTHON else ""
            raise ConfigError(
                f"{changed[0]} is not what it was when the run began{differ}, so the run does not go on with it; bring the "
                f"former one back, add --overwrite to start anew, or change it on purpose with --allow-change {setting}"
            )
    for name in ("device", "dtype"):  # what auto meant
        was, now = old.get(name), new.get(name)
        if was != now and name not in allowed:
            raise ConfigError(
                f"--{name} was {was} when the run began and is {now} here; go on where that is the same, or change it on "
                f"purpose with --allow-change {name}"
            )
    others = {"threads": (old.get("cpu", {}).get("threads"), new["cpu"]["threads"])}
    others |= {name: (old["versions"].get(name), new["versions"][name]) for name in new["versions"]}
    return [
        f"{name} was {was} when the run began and is {now} now: it goes on, but perhaps not bit for bit as it would have"
        for name, (was, now) in others.items()
        if was != now
    ]
