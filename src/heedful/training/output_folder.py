"""Use of the output folder: start in an empty one, replace the run in it, resume it, or refuse.

A replaced run (``--overwrite``) moves into the hidden subfolder ``.replaced`` until the new run has its ``final/``. If
the new run ends before its first step, the old one moves back: at once after an error, at the next start after a kill.
"""

import shutil
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.configs.options import RunOptions
from heedful.configs.settings import flag
from heedful.errors import ConfigError
from heedful.faults import hit
from heedful.files import blocking_file, read_object, read_record
from heedful.lock import LOCK, FolderLock, is_locked, owner
from heedful.training import alarms, non_finite
from heedful.training.provenance import content_hashes, differences, inputs, saved_settings, settings_of

MARKER = "run.json"
"""The file that marks a folder as a run."""
LOGS = ("metrics.jsonl", "samples.jsonl")
NOT_ALWAYS = (non_finite.FILE, alarms.FILE)
"""Optional logs."""
MODELS = ("best", "final")
CONTENTS = {
    MARKER,
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
"""All files and folders of a run, besides its lock and temporary names."""
IN_MEMORY = "inputs"
"""The folder of inputs from memory (`heedful.training.from_python`); kept if the run is replaced."""
REPLACED = ".replaced"
"""The folder of a replaced run."""
OTHERS = "choose another folder, or add --overwrite to replace the run"
"""Advice on a run that is in the way."""
MOVING = ".replaced-partial"
"""Its name while a run moves in or out; missing files are in the output folder."""


@dataclass(frozen=True)
class FolderPlan:
    """The decision on a run already in the output folder."""

    resumes: bool = False
    replaces: bool = False
    changes: tuple[str, ...] = ()
    """Settings that differ from the unfinished run's, as allowed by ``--allow-change``."""


def check_folder(output: Path) -> None:
    """Raises ConfigError for a path that cannot be a folder."""
    if output.is_file():
        raise ConfigError(f"--output {output} is a file; name a folder")
    blocking = blocking_file(output)
    if blocking is not None:
        raise ConfigError(f"--output {output} cannot be made: {blocking} is a file")


def real_path(output: Path) -> Path:
    """The path with links resolved."""
    return output.resolve() if output.is_symlink() else output


def check_output(config: RunOptions) -> FolderPlan:
    """Decide what to do with the output folder's contents, before any work. Raises ConfigError.

    Interrupted operations are repaired first: a replaced run whose successor made no step moves back, and a new run
    without its first files is removed.
    """
    check_folder(config.folder)
    output = real_path(config.folder)
    cache: Path | None = getattr(config, "judge_cache", None)
    if cache is not None and cache.resolve().is_relative_to(output.resolve()):
        raise ConfigError(
            f"--judge-cache {cache} is in the run's folder; choose a file elsewhere, so that other runs can use it"
        )
    _repair(output)
    found = set(_foreign(output)) | {path.name for path in _contents(output)}
    if not found:
        if config.resume not in ("auto", "never"):
            raise ConfigError(f"--resume {config.resume}: there is no run in --output {output}")
        return FolderPlan()
    if not found & {MARKER, "environment.json"}:
        raise ConfigError(f"--output {output} has files that are not from a heedful run; choose another folder")
    if is_locked(output):
        raise ConfigError(
            f"--output {output} is being written by another run ({owner(output)}); wait for it, end it, or choose another "
            "folder"
        )
    if config.overwrite:
        _check_replaceable(output, config)
        return FolderPlan(replaces=True)
    return _check_resumable(output, config)


def _check_replaceable(output: Path, config: RunOptions) -> None:
    if config.resume not in ("auto", "never"):
        raise ConfigError("--overwrite starts a new run and --resume continues one; leave out one of the two")
    for path in inputs(config):
        place = path.resolve()
        if path.exists() and place.is_relative_to(output.resolve()) and place.parent != output.resolve() / IN_MEMORY:
            raise ConfigError(
                f"--output {output} has {path}, which this run needs and --overwrite would delete; choose another "
                "folder"
            )
    foreign = sorted(_foreign(output))
    if foreign:
        raise ConfigError(
            f"--output {output} has {', '.join(foreign[:3])}, which is not from a run and --overwrite would delete; move it "
            "away, or choose another folder"
        )


def _check_resumable(output: Path, config: RunOptions) -> FolderPlan:
    if config.resume == "never":
        raise ConfigError(f"--output {output} already has a run; {OTHERS}")
    if not (output / MARKER).exists():
        raise ConfigError(f"--output {output} has a run without its {MARKER}, so it cannot resume; {OTHERS}")
    if config.resume != "auto":
        path = Path(config.resume)
        if path.resolve().parent != (output / "checkpoints").resolve():
            raise ConfigError(
                f"--resume {path} is not a checkpoint of the run in --output {output}; choose one of its checkpoints/"
            )
    elif (output / "summary.json").exists():
        raise ConfigError(f"--output {output} already has a finished run; {OTHERS}")
    changes = differences(saved_settings(output), settings_of(config))
    refused = {name: values for name, values in changes.items() if name not in config.allow_change}
    if refused:
        listing = "\n".join(f"  {flag(name)}: {old!r} in the run, {new!r} now" for name, (old, new) in refused.items())
        raise ConfigError(
            f"--output {output} has an unfinished run with other settings, so it cannot resume with these:\n{listing}\n"
            f"Use the run's settings, choose another folder, add --overwrite to replace it, or allow the change with "
            f"--allow-change {' '.join(name.replace('_', '-') for name in refused)}"
        )
    return FolderPlan(resumes=True, changes=tuple(changes))


def finished(config: RunOptions) -> dict[str, Any] | None:
    """The summary of a finished run with these settings in the output folder, or None. Raises ConfigError."""
    output = config.folder
    path = output / "summary.json"
    if not path.exists() or is_locked(output):
        return None
    changes = differences(saved_settings(output), settings_of(config))
    if changes:
        name, (old, new) = next(iter(changes.items()))
        raise ConfigError(
            f"--output {output} already has a finished run, with {flag(name)} {old!r}, not {new!r}; {OTHERS}"
        )
    return read_object(path, OTHERS, error=ConfigError)


def finished_before(config: RunOptions) -> dict[str, Any] | None:
    """The summary of the finished run that a command would repeat; None if there is none, or if another run is asked for.

    Raises ConfigError for a finished run with other settings, or whose data or models have changed since.
    """
    if config.overwrite or config.resume != "auto":
        return None
    summary = finished(config)
    if summary is None:
        return None
    environment = read_object(config.folder / "environment.json", OTHERS, error=ConfigError)
    for before in (environment.get("data") or {}, environment.get("models") or {}):
        for now in content_hashes(list(before)):
            changed = [name for name, found in now.items() if found != before[name]]
            if changed:
                raise ConfigError(
                    f"--output {config.folder} already has a finished run, and {changed[0]} has changed since then; {OTHERS}"
                )
    return summary


def holds_models(output: Path) -> bool:
    """True if a run has models besides valid checkpoints: ``final/``, or anything in ``checkpoints/``."""
    checkpoints = output / "checkpoints"
    return (output / "final").exists() or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def has_begun(output: Path) -> bool:
    """True if a run has completed its first step."""
    if any((output / name).exists() for name in ("checkpoints", "final", "summary.json")):
        return True
    return any(record["step"] > 0 for record in logged(output))


def logged(run: Path, after: int = 0) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl from a byte on. Skips a torn last line and an unreadable file."""
    try:
        lines = (run / "metrics.jsonl").read_bytes()[after:].split(b"\n")
    except OSError:
        return
    for record in map(read_record, lines):
        if record is not None and isinstance(record.get("step"), int):
            yield record


def clear(output: Path, contents: Set[str] = CONTENTS) -> None:
    """Remove a run's files, except its lock and a replaced run.

    Here and below, ``contents`` names the files for folders other than runs.
    """
    for path in _contents(output, contents):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def set_aside(output: Path, contents: Set[str] = CONTENTS) -> None:
    """Move the run in a folder, with any run it had replaced, into `REPLACED`. After an error nothing has moved."""
    (output / MOVING).mkdir()
    try:
        for path in [*_contents(output, contents), *output.glob(REPLACED)]:
            path.rename(output / MOVING / path.name)
            hit("run.moving")
    except BaseException:
        bring_back(output)
        raise
    (output / MOVING).rename(output / REPLACED)
    hit("run.aside")


def bring_back(output: Path, contents: Set[str] = CONTENTS) -> None:
    """Move a replaced run back, in place of one that made no step; does nothing without one."""
    if not (output / MOVING).exists():
        if not (output / REPLACED).exists():
            return
        clear(output, contents)
        (output / REPLACED).rename(output / MOVING)
    for path in (output / MOVING).iterdir():
        path.rename(output / path.name)
    (output / MOVING).rmdir()


def drop_replaced(output: Path) -> None:
    """Remove the replaced run."""
    shutil.rmtree(output / REPLACED, ignore_errors=True)


def _repair(output: Path) -> None:
    """Repair a folder after a kill, so that it has a run or is empty."""
    is_cut_short = (output / MOVING).exists()
    if not is_cut_short and has_begun(output):
        return
    has_first_files = all((output / name).exists() for name in ("environment.json", "config.yaml"))
    is_only_named = _has_marker(output) and not has_first_files
    if is_cut_short or (output / REPLACED).exists() or is_only_named:
        with FolderLock(output):  # raises if another process is writing them
            if is_only_named and not is_cut_short:
                clear(output)
            bring_back(output)


def _has_marker(output: Path) -> bool:
    """Whether the folder has the `MARKER` of a run, and not another file of that name."""
    try:
        return {"schema", "run"} <= (read_record((output / MARKER).read_bytes()) or {}).keys()
    except OSError:
        return False


def _contents(output: Path, contents: Set[str] = CONTENTS) -> list[Path]:
    """A run's files and folders."""
    return [path for path in _entries(output) if path.name in contents or is_temporary(path.name, contents)]


def _foreign(output: Path) -> list[str]:
    """Names that are not from a run."""
    ours = {*CONTENTS, LOCK, IN_MEMORY, REPLACED, MOVING}
    return [path.name for path in _entries(output) if path.name not in ours and not is_temporary(path.name)]


def _entries(output: Path) -> Iterator[Path]:
    return output.iterdir() if output.is_dir() else iter(())


def is_temporary(name: str, contents: Set[str] = CONTENTS) -> bool:
    """Whether a name is the temporary name of one of a run's files."""
    begin, _, end = name.rpartition(".")
    return begin.startswith(".") and begin[1:] in contents and end in ("heedful-partial", "heedful-replaced")
