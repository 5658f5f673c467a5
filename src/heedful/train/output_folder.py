"""What a run may do with its output folder: make it, replace a run in it, go on with one, or leave it alone."""

import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from heedful.configs.checks import flag
from heedful.configs.options import RunOptions
from heedful.configs.parse import to_yaml
from heedful.errors import ConfigError
from heedful.files import blocking_file, read_object, read_record, to_json
from heedful.lock import LOCK, FolderLock, is_locked, owner
from heedful.train import skips
from heedful.train.checkpoints import NAME
from heedful.train.environment import with_bases

MARKER = "run.json"
"""The file by which a folder is a run's."""
LOGS = ("metrics.jsonl", "samples.jsonl")
MODELS = ("best", "final")
NOT_ALWAYS = (skips.FILE,)
"""Logs that are there only if there is something to say."""
OURS = {
    MARKER,
    LOCK,
    "config.yaml",
    "environment.json",
    "summary.json",
    "tensorboard",
    "checkpoints",
    "tracking",
    "rollouts",
    *LOGS,
    *NOT_ALWAYS,
    *MODELS,
}
"""All that a run writes into its folder, besides temporary names of these."""
TRACKING = ("track", "track_project", "track_name", "track_offline", "track_wait")
OF_THIS_CALL = ("output", "overwrite", "resume", "allow_change")
"""Settings that say where and how a run is called, not what it does."""
FREE = (
    *OF_THIS_CALL,
    "save_every",
    "save_minutes",
    "keep",
    "distributed_timeout_minutes",
    "memory_check",
    "judge_cache",
    "judge_key_env",
    "reward_concurrency",
    "reward_retry_minutes",
    "reward_token_env",
    "rollouts",
    "sampler_retry_minutes",
    "shard",
    "replicas",
    "sync_every",
    *TRACKING,
)
"""Settings that an unfinished run may go on with whatever they are: no number depends on them."""


ANEW = "the run cannot go on without it: bring it back, choose another folder, or add --overwrite to replace the run"
"""What to do about a file of an unfinished run that cannot be used."""


@dataclass(frozen=True)
class Plan:
    """What becomes of a run that is already in the output folder."""

    resumes: bool = False
    replaces: bool = False
    changes: tuple[str, ...] = ()
    """Settings that are not those with which the run began, as was allowed."""


def check_folder(output: Path) -> None:
    """Refuse a path at which no folder can be. Raises ConfigError."""
    if output.is_file():
        raise ConfigError(f"--output {output} is a file; name a folder")
    blocking = blocking_file(output)
    if blocking is not None:
        raise ConfigError(f"--output {output} cannot be made: {blocking} is a file")


def real_path(output: Path) -> Path:
    """The folder itself, if the path is a link to it."""
    return output.resolve() if output.is_symlink() else output


def check_output(config: RunOptions) -> Plan:
    """Decide what becomes of what is in the output folder, before any work is done. Raises ConfigError.

    A run that was set aside by another which never came to its first step has its name again.
    """
    check_folder(config.output)
    output = real_path(config.output)
    cache: Path | None = getattr(config, "judge_cache", None)
    if cache is not None and cache.resolve().is_relative_to(output.resolve()):
        raise ConfigError(
            f"--judge-cache {cache} is in the folder of the run; name a file elsewhere, for other runs too"
        )
    bring_back(output)
    found = {path.name for path in output.iterdir()} if output.is_dir() else set()
    found = {name for name in found if not _is_temporary(name)}
    if MARKER in found and not {"environment.json", "config.yaml"} <= found and not has_begun(output):
        lock = FolderLock(output)  # refused if that run is only just writing them
        clear(output)  # killed while it wrote its first files
        lock.release()
        found = set()
    if not found - {LOCK}:
        if config.resume not in ("auto", "never"):
            raise ConfigError(f"--resume {config.resume}: there is no run in --output {output}")
        return Plan()
    if not found & {MARKER, "environment.json"}:
        raise ConfigError(
            f"--output {output} holds files that are not a heedful run, so it is left alone; choose another folder"
        )
    if is_locked(output):
        raise ConfigError(
            f"--output {output} is being written by another run ({owner(output)}); wait for it, end it, or choose another "
            "folder"
        )
    if config.overwrite:
        _check_replaceable(output, found, config)
        return Plan(replaces=True)
    return _check_resumable(output, config)


def _check_replaceable(output: Path, found: set[str], config: RunOptions) -> None:
    if config.resume not in ("auto", "never"):
        raise ConfigError("--overwrite starts anew and --resume goes on; leave out one of the two")
    for path in inputs(config):
        if path.exists() and path.resolve().is_relative_to(output.resolve()):
            raise ConfigError(
                f"--output {output} holds {path}, which this run is made from and --overwrite would delete; choose another "
                "folder"
            )
    foreign = sorted(name for name in found - OURS if not _is_temporary(name))
    if foreign:
        raise ConfigError(
            f"--output {output} holds {', '.join(foreign[:3])}, which no run wrote and --overwrite would delete; move it "
            "away, or choose another folder"
        )


def _is_temporary(name: str) -> bool:
    """The name that something of ours has while it is written or replaced."""
    begin, _, end = name.rpartition(".")
    return begin.startswith(".") and begin[1:] in OURS and end in ("heedful-partial", "heedful-replaced")


def _check_resumable(output: Path, config: RunOptions) -> Plan:
    others = "choose another folder, or add --overwrite to replace it"
    if config.resume == "never":
        raise ConfigError(f"--output {output} already holds a run; {others}")
    if not (output / MARKER).exists():
        raise ConfigError(f"--output {output} already holds a run, of a heedful that could not resume; {others}")
    if config.resume != "auto":
        path = Path(config.resume)
        if path.resolve().parent != (output / "checkpoints").resolve():
            raise ConfigError(
                f"--resume {path} is not a checkpoint of the run in --output {output}; name one of its checkpoints/"
            )
    elif (output / "summary.json").exists():
        raise ConfigError(f"--output {output} already holds a run, which is finished; {others}")
    changes = differences(saved_settings(output), settings_of(config))
    refused = {name: values for name, values in changes.items() if name not in config.allow_change}
    if refused:
        listing = "\n".join(f"  {flag(name)}: {old!r} in the run, {new!r} now" for name, (old, new) in refused.items())
        raise ConfigError(
            f"--output {output} holds an unfinished run with other settings, so it does not go on with these:\n{listing}\n"
            f"Use the run's settings, choose another folder, add --overwrite to replace it, or change it on purpose with "
            f"--allow-change {' '.join(name.replace('_', '-') for name in refused)}"
        )
    return Plan(resumes=True, changes=tuple(changes))


def finished(config: RunOptions) -> dict[str, Any] | None:
    """The summary of a finished run of these settings in the output folder; None if there is none. Raises ConfigError."""
    path = config.output / "summary.json"
    if not path.exists() or is_locked(config.output):
        return None
    changes = differences(saved_settings(config.output), settings_of(config))
    if changes:
        name, (old, new) = next(iter(changes.items()))
        raise ConfigError(
            f"--output {config.output} holds a finished run with {flag(name)} {old!r}, and now it is {new!r}; choose "
            "another folder"
        )
    return read_object(path, "choose another folder, or add --overwrite to replace the run", error=ConfigError)


def settings_of(config: RunOptions) -> dict[str, Any]:
    """The settings that a run's numbers depend on, as YAML holds them. See `hidden` for those that hold a secret."""
    settings = yaml.safe_load(to_yaml(config, leave_out=FREE, without_secrets=True))
    return _with_marks(settings, hidden(config))


def hidden(config: RunOptions) -> dict[str, str]:
    """A mark of each setting whose secrets are left out of config.yaml, such as the query of an address, by which another
    value is known as another: 32 bits of a SHA-256 sum, from which no secret can be found."""
    plain = yaml.safe_load(to_yaml(config, leave_out=FREE))
    written = yaml.safe_load(to_yaml(config, leave_out=FREE, without_secrets=True))
    return {
        name: hashlib.sha256(to_json(value).encode("utf-8", "backslashreplace")).hexdigest()[:8]
        for name, value in plain.items()
        if value != written[name]
    }


def _with_marks(settings: dict[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
    return settings | {name: f"{settings.get(name)} (#{mark})" for name, mark in marks.items()}


def saved_settings(output: Path) -> dict[str, Any]:
    """The same of the run in a folder. Raises ConfigError."""
    saved = read_object(output / "config.yaml", ANEW, needs=["model"], error=ConfigError)
    marks = read_object(output / "environment.json", ANEW, error=ConfigError).get("hidden") or {}
    return _with_marks({name: value for name, value in saved.items() if name not in FREE}, marks)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings whose values differ, with both values; None for one that is not there."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {name: (old.get(name), new.get(name)) for name in names}


def inputs(config: RunOptions) -> list[Path]:
    """The local files and folders that a configuration names; some of them do not exist, as Hub names."""
    names = (
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
    paths = [getattr(config, name, None) for name in names]
    for reward in (*getattr(config, "rewards", ()), *getattr(config, "best_by", ())):
        kind, _, rest = reward.partition(":")
        paths.append({"python": rest.rpartition(":")[0], "model": rest}.get(kind))
    return [Path(part) for path in paths if path for part in with_bases(path)]


def aside_prefix(output: Path) -> str:
    """What the name begins with that a run has while another replaces it."""
    return f".{output.name}.replaced-"


def new_prefix(output: Path) -> str:
    """What the name begins with that a new run has until the one that it replaces is aside."""
    return f".{output.name}.heedful-new-"


def asides(output: Path, *, holding: str = "environment.json") -> list[Path]:
    """Runs that were set aside for the one in a folder, the last one first: those that hold what every run holds."""
    named = _named(output, aside_prefix(output))
    ours = [path for path in named if (path / holding).exists() and not path.is_symlink()]
    return sorted(ours, key=lambda path: path.stat().st_ctime_ns, reverse=True)


def _named(output: Path, prefix: str) -> list[Path]:
    """What stands beside a folder under a hidden name of ours."""
    name = re.compile(re.escape(prefix) + "[0-9a-f]{8}")
    try:
        return [path for path in output.parent.iterdir() if name.fullmatch(path.name)]
    except (FileNotFoundError, PermissionError):  # not there yet; may be entered, but not listed
        return []


def bring_back(output: Path) -> None:
    """Give a run its name again if what replaced it never came to its first step, as after a kill."""
    for path in _named(output, new_prefix(output)):
        if not is_locked(path) and {file.name for file in path.iterdir()} <= {LOCK}:
            shutil.rmtree(path)
    older = asides(output)
    if not older or is_locked(output) or has_begun(output):
        return
    if output.exists() and any(path.name not in OURS and not _is_temporary(path.name) for path in output.iterdir()):
        return
    if output.exists():
        clear(output)
        (output / LOCK).unlink(missing_ok=True)
        output.rmdir()
    older[0].rename(output)


def holds_models(output: Path) -> bool:
    """True if a run has left models that nothing goes on from: a last one, or whatever is among its checkpoints."""
    checkpoints = output / "checkpoints"
    return (output / "final").exists() or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def bytes_of_models(output: Path) -> int:
    """What the checkpoints, best/ and final/ of a run take of the disk; not what is set aside, which no new one replaces."""
    found = (output / "checkpoints").glob("step-*")
    folders = [output / name for name in MODELS] + [path for path in found if NAME.fullmatch(path.name)]
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def has_begun(output: Path) -> bool:
    """True if a run has done its first step."""
    if any((output / name).exists() for name in ("checkpoints", "final", "summary.json")):
        return True
    try:
        lines = (output / "metrics.jsonl").read_bytes().split(b"\n")
    except OSError:
        return False
    return any(_step(line) > 0 for line in lines)


def _step(line: bytes) -> int:
    step = (read_record(line) or {}).get("step")
    return step if isinstance(step, int) else 0


def clear(folder: Path) -> None:
    """Remove what a run wrote into its folder, but for its lock."""
    for path in folder.iterdir():
        if path.name == LOCK or not (path.name in OURS or _is_temporary(path.name)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
