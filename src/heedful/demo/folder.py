"""The demo's folder: check that it is free or can go on, and start it with the world's data and a random model."""

import contextlib
import json
import re
import shutil
import uuid
from pathlib import Path

from heedful.configs.tools import DemoConfig, TinyConfig
from heedful.demo.world import write_world
from heedful.errors import ConfigError
from heedful.files import complete_or_absent, in_words, write_json
from heedful.lock import LOCK, FolderLock, is_locked, owner
from heedful.models.tiny import make_tiny_model
from heedful.train.output_folder import check_folder, has_begun, real_path

MARKER = "demo.json"
RUNS = ("sft", "reward", "ppo")
CONTENTS = {MARKER, "world", "base", *RUNS, "answers.jsonl", "curves.png", "summary.json"}
"""Everything that a demo writes."""
LABELS = "labels"
"""What it writes besides if its user labels."""


def check_output(config: DemoConfig) -> bool:
    """Check that the output folder is free, or holds only a demo that may be replaced or goes on. Raises ConfigError.

    Returns True if an unfinished demo goes on. A demo that was set aside by another which never came to its first step has
    its name again.
    """
    check_folder(config.output)
    output = real_path(config.output)
    _bring_back(output)
    found = {path.name for path in output.iterdir()} - {LOCK} if output.is_dir() else set()
    _refuse_locked(output)
    if not found:
        return False
    foreign = sorted(found - CONTENTS - {LABELS}) or ([] if "world" in found else sorted(found))
    if foreign:
        raise ConfigError(
            f"--output {output} holds files that no demo wrote ({', '.join(foreign[:3])}), so it is left alone; choose "
            "another folder"
        )
    if config.overwrite:
        return False
    try:
        seed = int(json.loads((output / MARKER).read_text(encoding="utf-8"))["seed"])
    except (OSError, ValueError, KeyError, TypeError):  # of a heedful that did not write it down
        seed = None
    if "summary.json" in found or seed is None:
        raise ConfigError(
            f"--output {output} already holds a demo; choose another folder, or add --overwrite to replace it"
        )
    other = ""
    if seed != config.seed:
        other = f"with --seed {seed}, got --seed {config.seed}"
    elif (LABELS in found) != config.label and found & {"reward", LABELS}:
        other = f"{'with' if LABELS in found else 'without'} --label"
    if other:
        raise ConfigError(
            f"--output {output} holds an unfinished demo {other}; use the same, choose another folder, or add --overwrite "
            "to replace it"
        )
    return True


def _refuse_locked(output: Path) -> None:
    """Raise ConfigError if a demo, or one of its stages, is being written."""
    for folder in (output, *(output / stage for stage in RUNS)):
        if is_locked(folder):
            raise ConfigError(
                f"--output {output} is being written by another demo ({owner(folder)}); wait for it, end it, or choose "
                "another folder"
            )


def make_beginning(config: DemoConfig, tiny: TinyConfig) -> FolderLock:
    """Write the world's data and the random model, and lock the folder before anybody can see it. Returns the lock.

    An older demo is set aside until this one is done. Raises ConfigError if the folder cannot be made.
    """
    output = real_path(config.output)
    aside = output.with_name(f".{output.name}.replaced-{uuid.uuid4().hex[:8]}")
    try:
        with contextlib.ExitStack() as unless_made, complete_or_absent(output) as folder:
            lock = unless_made.enter_context(FolderLock(folder))
            write_world(folder / "world", config.seed)
            make_tiny_model(
                tiny.architecture,
                folder / "base",
                hidden_size=tiny.hidden_size,
                num_layers=tiny.num_layers,
                max_length=tiny.max_length,
                initializer_range=tiny.initializer_range,
                seed=tiny.seed,
            )
            write_json(folder / MARKER, {"seed": config.seed})
            if output.is_dir() and any(output.iterdir()):
                _refuse_locked(output)  # somebody may have been quicker
                output.rename(aside)
                (aside / LOCK).unlink(missing_ok=True)
            lock.path = output / LOCK
            unless_made.pop_all()
    except OSError as error:
        if aside.exists() and not output.exists():
            aside.rename(output)
        raise ConfigError(f"--output {output} cannot be made: {in_words(error)}") from error
    return lock


def drop_replaced(output: Path) -> None:
    """Remove the demos that a finished one replaces."""
    for old in _asides(real_path(output)):
        shutil.rmtree(old, ignore_errors=True)


def _asides(output: Path) -> list[Path]:
    """Demos that were set aside for the one in a folder, the last one first."""
    name = re.compile(re.escape(f".{output.name}.replaced-") + "[0-9a-f]{8}")
    try:
        found = [path for path in output.parent.iterdir() if name.fullmatch(path.name) and not path.is_symlink()]
    except (FileNotFoundError, PermissionError):  # not there yet; may be entered, but not listed
        return []
    return sorted((path for path in found if (path / "world").exists()), key=lambda p: -p.stat().st_ctime_ns)


def _bring_back(output: Path) -> None:
    older = _asides(output)
    stages = [output / stage for stage in RUNS]
    if not older or any(map(has_begun, stages)) or any(map(is_locked, (output, *stages))):
        return
    if output.is_dir() and {path.name for path in output.iterdir()} - CONTENTS - {LOCK, LABELS}:
        return
    if output.exists():
        shutil.rmtree(output)
    older[0].rename(output)
