"""The demo's folder: check that it is free or resumable, and write the world's data and the random model into it."""

import contextlib
import json
from pathlib import Path

from heedful.apps.demo.world import write_world
from heedful.configs.tools import DemoConfig, TinyConfig
from heedful.data.loading import demonstration_texts
from heedful.errors import ConfigError
from heedful.files import complete_or_absent, in_words, write_json
from heedful.lock import LOCK, FolderLock, is_locked, owner
from heedful.models.tiny import make_tiny_model
from heedful.training.output_folder import (
    MOVING,
    REPLACED,
    bring_back,
    check_folder,
    has_begun,
    is_temporary,
    real_path,
    set_aside,
)

MARKER = "demo.json"
RUNS = ("sft", "reward", "ppo")
CONTENTS = {MARKER, "world", "base", *RUNS, "answers.jsonl", "curves.png", "summary.json"}
"""Names of all files and folders of a demo."""
LABELS = "labels"
"""Further names if its user labels."""
OURS = CONTENTS | {LABELS}


def check_output(config: DemoConfig) -> bool:
    """Check that the output folder is free, or holds only a demo to replace or resume. Raises ConfigError.

    Returns True if an unfinished demo will be resumed. Restores a demo that was set aside for a new one if the new one never
    reached its first step.
    """
    check_folder(config.output)
    output = real_path(config.output)
    stages = [output / stage for stage in RUNS]
    for folder in (output, *stages):
        if is_locked(folder):
            raise ConfigError(_busy(output).replace("{owner}", owner(folder)))
    if (output / MOVING).exists() or ((output / REPLACED).exists() and not any(map(has_begun, stages))):
        with FolderLock(output, refusal=_busy(output)):
            bring_back(output, OURS)
    names = {path.name for path in output.iterdir()} - {LOCK, REPLACED} if output.is_dir() else set()
    found = {name for name in names if not is_temporary(name, OURS)}  # a kill leaves half-written files
    if not found:
        return False
    foreign = sorted(found - OURS) or ([] if {"world", MARKER} & found else sorted(found))
    if foreign:
        raise ConfigError(
            f"--output {output} holds files that no demo wrote ({', '.join(foreign[:3])}), so it is left alone; choose "
            "another folder"
        )
    if config.overwrite:
        return False
    try:
        seed = int(json.loads((output / MARKER).read_text(encoding="utf-8"))["seed"])
    except (OSError, ValueError, KeyError, TypeError):  # damaged
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


def _busy(output: Path) -> str:
    return (
        f"--output {output} is being written by another demo ({{owner}}); wait for it, end it, or choose another folder"
    )


def make_beginning(config: DemoConfig, tiny: TinyConfig, *, resumes: bool = False) -> FolderLock:
    """Lock the folder, and write missing parts of the world's data and the random model. Returns the lock.

    A demo that is not resumed is set aside until the new one is done, and restored after an error. Raises ConfigError if the
    folder cannot be made.
    """
    output = real_path(config.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as on_failure:
            lock = on_failure.enter_context(FolderLock(output, refusal=_busy(output)))
            if not resumes and {path.name for path in output.iterdir()} - {LOCK}:
                set_aside(output, OURS)
                on_failure.callback(bring_back, output, OURS)
            _write_beginning(output, config.seed, tiny)
            on_failure.pop_all()
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be made: {in_words(error)}") from error
    return lock


def _write_beginning(output: Path, seed: int, tiny: TinyConfig) -> None:
    write_json(output / MARKER, {"seed": seed})
    if not (output / "world").is_dir():
        with complete_or_absent(output / "world") as folder:
            write_world(folder, seed)
    if not (output / "base").is_dir():
        texts = demonstration_texts(str(output / "world" / "demonstrations.jsonl"))
        make_tiny_model(
            tiny.architecture,
            output / "base",
            hidden_size=tiny.hidden_size,
            num_layers=tiny.num_layers,
            max_length=tiny.max_length,
            initializer_range=tiny.initializer_range,
            seed=tiny.seed,
            texts=texts,
            vocab_size=tiny.vocab_size,
        )
