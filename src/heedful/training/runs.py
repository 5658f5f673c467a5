"""The runs in a folder and their states: finished, running, resumable."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.errors import CheckpointError, ConfigError
from heedful.files import read_object
from heedful.lock import is_locked, owner
from heedful.training.checkpoints import Checkpoints
from heedful.training.output_folder import MARKER, holds_models, logged
from heedful.training.provenance import saved_settings


@dataclass(frozen=True)
class RunState:
    """The state of a run, read from its folder."""

    path: Path
    algorithm: str
    state: str
    """finished, running or unfinished."""
    step: int
    total_steps: int | None
    metric: str
    """Last value of the metric that selects the best model; empty before the first evaluation."""
    note: str
    """Where an unfinished run resumes, or why it cannot."""


def find_runs(folder: Path) -> Iterator[RunState]:
    """The runs in a folder and its subfolders, ordered by path. Skips hidden folders and links."""
    for parent, folders, files in os.walk(folder):
        if MARKER in files or {"environment.json", "config.yaml"} <= set(files):
            folders.clear()
            yield state_of(Path(parent))
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def state_of(run: Path) -> RunState:
    """The state of the run in a folder."""
    marker: dict[str, Any] = {}
    damage = ""
    try:
        marker = read_object(run / MARKER, "bring it back", needs=["run"])
    except CheckpointError as error:
        damage = str(error)
    objective = marker.get("objective")
    step, metric = 0, ""
    for record in logged(run):
        step = record["step"]
        if objective is not None and isinstance(record.get(objective), int | float):
            metric = f"{objective} {record[objective]:.4g}"
    state, note = _state(run, marker, damage)
    return RunState(run, marker.get("algorithm", "?"), state, step, marker.get("total_steps"), metric, note)


def _state(run: Path, marker: dict[str, Any], damage: str) -> tuple[str, str]:
    if is_locked(run):
        return "running", owner(run)
    if (run / "summary.json").exists():
        return "finished", damage
    try:
        saved_settings(run)
    except ConfigError as error:
        damage = damage or str(error)
    return "unfinished", f"cannot resume: {damage}" if damage else _where_from(run, marker["run"])


def _where_from(run: Path, identity: str) -> str:
    """Where an unfinished run resumes."""
    checkpoints, damaged = Checkpoints(run, identity, keep=0), ""
    for path in checkpoints.candidates():
        try:
            return f"{damaged}resumes from step {checkpoints.check(path)}"
        except CheckpointError as error:
            damaged += f"{path.name} is damaged: {error}; "
    return f"{damaged}cannot resume" if damaged or holds_models(run) else "starts again: it has no checkpoint yet"
