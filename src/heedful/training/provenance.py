"""Provenance of a run: settings, data, parent models, versions, hardware. An unfinished run resumes only with the
same."""

import functools
import hashlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from heedful import __version__, redact
from heedful.configs.options import RunOptions
from heedful.configs.parse import to_plain
from heedful.devices import device_names
from heedful.errors import ConfigError
from heedful.files import read_object, to_json
from heedful.hub import dataset_sum, downloaded_model, hub_revision
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.models.adapters import adapter_chain
from heedful.models.save import VALUE_HEAD

LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "peft", "safetensors", "numpy")
MODEL_FILES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py"}
"""Suffixes of model files."""
IN_PYTHON = "what rewards are functions given in Python"
"""Name of Python reward functions among a run's data."""
SOURCES = {"data": "data", "models": "models", "revisions": "models"}
"""Keys of `environment` that must match to resume, with their names in ``--allow-change``."""
INPUTS = (
    "model",
    "reference",
    "value_model",
    "data",
    "eval_data",
    "offset_data",
    "ptx_data",
    "chat_template",
    "judge_rubric",
)
"""Settings that may be a path."""
TRACKING = ("track", "track_project")
PER_INVOCATION = ("output", "overwrite", "resume", "allow_change")
"""Settings of a single command call, not of the run."""
MUTABLE_ON_RESUME = (
    *PER_INVOCATION,
    "save_every",
    "save_minutes",
    "save_total_limit",
    "save_dtype",
    "distributed_timeout_minutes",
    "memory_check",
    "allow",
    "raw_prompts",
    "judge_cache",
    "reward_concurrency",
    "reward_retry_minutes",
    "rollouts",
    "sampler_retry_minutes",
    "shard",
    "stop_on",
    "replicas",
    "sync_every",
    *TRACKING,
)
"""Settings that may change on resuming: no number depends on them."""
RESTART_HINT = (
    "the run cannot resume without it: bring it back, choose another folder, or add --overwrite to replace the run"
)
"""Advice on an unusable file of an unfinished run."""


class Artifact(NamedTuple):
    """An input of a run that is not a file, such as a function."""

    name: str
    content: str
    """Text that identifies it; differs if the input differs."""


def environment(
    command: str, config: RunOptions, *, data: Sequence[str | Artifact], models: Sequence[str]
) -> dict[str, Any]:
    """The content of environment.json: versions, revision, hardware, seed, and hashes of data and parent models.

    Args:
        command: the trainer's name.
        config: the run's settings. Local files in them (code of rewards, a template) count as data.
        data: further inputs, mostly files.
        models: names or folders of the parent models.
    """
    device = resolve_device(config.device)
    local_models = [Path(path) for name in models for path in with_bases(downloaded_model(name))]
    named = [str(path) for path in inputs(config) if path.is_file()]
    return {
        "command": f"heedful {command}",
        "seed": config.seed,
        "python": platform.python_version(),
        "versions": versions(),
        "revision": _git_revision(),
        "platform": platform.platform(),
        "cpu": {"machine": platform.machine(), "threads": torch.get_num_threads()},
        "gpus": device_names(),
        "device": device.type,
        "dtype": str(resolve_dtype(config.dtype, device)).removeprefix("torch."),
        "arguments": redact.command(),
        "data": {name: content for one in [*data, *named] for name, content in _content(one)},
        "revisions": {name: revision for name in models if (revision := hub_revision(name))},
        "models": {str(path): _model_digest(path) for path in local_models if path.is_dir()},
        "hidden": secret_marks(config),
    }


def made_from(settings: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """A hash of a run's settings (`settings_of`) and of its sources in `environment`."""
    return digest([settings, {kind: facts[kind] for kind in SOURCES}])


def inputs(config: RunOptions) -> list[Path]:
    """Files and folders in a configuration; some do not exist, such as names on the Hub."""
    paths = [getattr(config, name, None) for name in INPUTS]
    for reward in (*getattr(config, "rewards", ()), *getattr(config, "selection_rewards", ())):
        kind, _, rest = reward.partition(":") if isinstance(reward, str) else ("", "", "")
        paths.append({"python": rest.rpartition(":")[0], "model": rest}.get(kind))
    return [Path(part) for path in paths if path for part in with_bases(path)]


def with_bases(model: str) -> list[str]:
    """A model and, for adapters, its base models."""
    base, adapters = adapter_chain(str(model))
    return list(dict.fromkeys([str(model), *map(str, adapters), base]))


def content_hashes(paths: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Hashes of the paths that are files, and of those that are model folders."""
    return (
        {path: _file_digest(Path(path)) for path in paths if Path(path).is_file()},
        {path: _model_digest(Path(path)) for path in paths if Path(path).is_dir()},
    )


def _content(data: str | Artifact) -> list[tuple[str, str]]:
    """Name and hash of data; empty without a file or rows."""
    if isinstance(data, Artifact):
        return [data]
    content = _file_digest(Path(data)) if Path(data).is_file() else dataset_sum(data)
    return [] if content is None else [(data, content)]


def _model_digest(folder: Path) -> str:
    """A hash of all files of a model: weights, value head, configurations, tokenizer, templates, code."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in MODEL_FILES)
    files += [path for path in [folder / VALUE_HEAD] if path.is_file()]
    return digest([[path.relative_to(folder).as_posix(), _file_digest(path)] for path in files])


def digest(content: Any) -> str:
    """SHA-256 of a value's JSON."""
    return hashlib.sha256(to_json(content).encode("utf-8", "backslashreplace")).hexdigest()


def _file_digest(path: Path) -> str:
    """SHA-256 of a file, cached until its size or time changes."""
    state = path.stat()
    return _file_digest_at(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _file_digest_at(path: Path, _size: int, _time: int) -> str:
    return file_sum(path)


def file_sum(path: Path) -> str:
    """SHA-256 of a file, not cached."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """Versions of heedful and its libraries. A checkout on the path has no metadata, so heedful's own is in its source."""
    return {"heedful": __version__} | {name: version(name) for name in LIBRARIES}


@functools.cache
def _git_revision() -> str | None:
    """Git revision of heedful's checkout, with ``-dirty`` if modified; None outside a checkout."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    if git("ls-files", "--error-unmatch", __file__) is None:  # an installed package inside another repository
        return None
    revision = git("rev-parse", "HEAD")
    return f"{revision}-dirty" if revision and git("status", "--porcelain", "--", ".") else revision


def settings_of(config: RunOptions) -> dict[str, Any]:
    """Settings that determine a run's numbers, as in YAML; secrets are replaced by marks (`secret_marks`)."""
    settings = to_plain(config, leave_out=MUTABLE_ON_RESUME, without_secrets=True)
    return _marked(settings, secret_marks(config))


def saved_settings(output: Path) -> dict[str, Any]:
    """`settings_of` the run in a folder. Raises ConfigError."""
    saved = read_object(output / "config.yaml", RESTART_HINT, needs=["model"], error=ConfigError)
    marks = read_object(output / "environment.json", RESTART_HINT, error=ConfigError).get("hidden") or {}
    return _marked({name: value for name, value in saved.items() if name not in MUTABLE_ON_RESUME}, marks)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings whose values differ, with both values; None for a missing one."""
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def secret_marks(config: RunOptions) -> dict[str, str]:
    """Marks for settings whose secret config.yaml omits, such as the query of an address: 32 bits of its SHA-256,
    enough to detect a change without revealing the secret."""
    plain = to_plain(config, leave_out=MUTABLE_ON_RESUME)
    written = to_plain(config, leave_out=MUTABLE_ON_RESUME, without_secrets=True)
    return {name: digest(value)[:8] for name, value in plain.items() if value != written[name]}


def _marked(settings: dict[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
    return settings | {name: f"{settings.get(name)} (#{mark})" for name, mark in marks.items()}


def check_same_sources(old: Mapping[str, Any], new: Mapping[str, Any], *, allowed: Sequence[str]) -> list[str]:
    """Check that a run resumes with the same data, models, device and precision. Returns notes on versions.

    Args:
        old: `environment` at the run's start.
        new: `environment` now.
        allowed: what may differ: data, models (including Hub revisions), device, dtype.

    Raises ConfigError.
    """
    for kind, setting in SOURCES.items():
        before, now = old.get(kind, {}), new.get(kind, {})
        changed = sorted(name for name in before if name in now and before[name] != now[name])
        if changed and setting not in allowed:
            name = changed[0]
            differ = f" ({before[name]}; now {now[name]})" if name == IN_PYTHON else ""
            raise ConfigError(
                f"{name} has changed since the run began{differ}, so the run cannot resume; restore the "
                f"former one, add --overwrite to start anew, or allow the change with --allow-change {setting}"
            )
    for name in ("device", "dtype"):  # resolved from auto
        if old.get(name) != new.get(name) and name not in allowed:
            raise ConfigError(
                f"--{name} was {old.get(name)} when the run began and is {new.get(name)} here; resume where it is the "
                f"same, or allow the change with --allow-change {name}"
            )
    pairs = {"threads": (old.get("cpu", {}).get("threads"), new["cpu"]["threads"])}
    pairs |= {name: (old["versions"].get(name), new["versions"][name]) for name in new["versions"]}
    return [
        f"{name} was {was} when the run began and is {now} now: the run resumes, but perhaps not bit for bit"
        for name, (was, now) in pairs.items()
        if was != now
    ]
