"""The demo's folder: check that it is free or can go on, and start it with the world's data and a random model."""

import json
import shutil
import uuid
from pathlib import Path

from heedful.checkpoints.tiny import make_tiny_model
from heedful.configs.demo import DemoConfig
from heedful.configs.tiny import TinyConfig
from heedful.demo.world import write_world
from heedful.errors import ConfigError
from heedful.files import complete_or_absent, write_json
from heedful.train.lock import is_locked, owner
from heedful.train.output_folder import aside_prefix, asides, check_folder, has_begun, real_path

MARKER = "demo.json"
STAGES = ("sft", "reward", "ppo")
CONTENTS = {MARKER, "world", "base", *STAGES, "answers.jsonl", "curves.png", "summary.json"}
"""Everything that a demo writes."""


def check_output(config: DemoConfig) -> bool:
    """Check that the output folder is free, or holds only a demo that may be replaced or goes on. Raises ConfigError.

    Returns True if an unfinished demo goes on. A demo that was set aside by another which never came to its first step has
    its name again.
    """
    check_folder(config.output)
    output = real_path(config.output)
    _bring_back(output)
    found = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if not found:
        return False
    foreign = sorted(found - CONTENTS) or ([] if "world" in found else sorted(found))
    if foreign:
        raise ConfigError(
            f"--output {output} holds files that no demo wrote ({', '.join(foreign[:3])}), so it is left alone; choose "
            "another folder"
        )
    for stage in STAGES:
        if is_locked(output / stage):
            raise ConfigError(
                f"--output {output} is being written by another demo ({owner(output / stage)}); wait for it, end it, or "
                "choose another folder"
            )
    if config.overwrite:
        return False
    seed = _seed(output)
    if "summary.json" in found or seed is None:
        raise ConfigError(
            f"--output {output} already holds a demo; choose another folder, or add --overwrite to replace it"
        )
    if seed != config.seed:
        raise ConfigError(
            f"--output {output} holds an unfinished demo with --seed {seed}, got --seed {config.seed}; use the same, choose "
            "another folder, or add --overwrite to replace it"
        )
    return True


def make_beginning(config: DemoConfig, tiny: TinyConfig) -> None:
    """Write the world's data and the random model. An older demo is set aside until this one is done.

    Args:
        config: the demo's folder and seed.
        tiny: the size and the seed of the random model.

    Raises ConfigError if the folder cannot be made.
    """
    output = real_path(config.output)
    aside = output.with_name(f"{aside_prefix(output)}{uuid.uuid4().hex[:8]}")
    try:
        with complete_or_absent(output) as folder:
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
                output.rename(aside)
    except OSError as error:
        if aside.exists() and not output.exists():
            aside.rename(output)
        raise ConfigError(f"--output {output} cannot be made: {error.strerror or error}") from error


def drop_replaced(output: Path) -> None:
    """Remove the demos that a finished one replaces."""
    for old in asides(real_path(output), holding="world"):
        shutil.rmtree(old, ignore_errors=True)


def _bring_back(output: Path) -> None:
    older = asides(output, holding="world")
    stages = [output / stage for stage in STAGES]
    if not older or any(has_begun(stage) or is_locked(stage) for stage in stages):
        return
    if output.is_dir() and {path.name for path in output.iterdir()} - CONTENTS:
        return
    if output.exists():
        shutil.rmtree(output)
    older[0].rename(output)


def _seed(output: Path) -> int | None:
    """The seed of the demo in a folder; None if it is of a heedful that did not write it down."""
    try:
        return int(json.loads((output / MARKER).read_text(encoding="utf-8"))["seed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
