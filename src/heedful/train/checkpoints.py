"""The checkpoints of a run: saved whole or not at all, verified when read, the oldest removed first.

checkpoints/step-000100/            the model in Hugging Face format, as in final/
checkpoints/step-000100/resume/     the state that the run goes on from
checkpoints/step-000100/MANIFEST.json

What is divided among ranks (--shard full) each of them writes itself, below resume/divided/.
"""

import contextlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from heedful.errors import CheckpointError
from heedful.faults import hit
from heedful.files import complete_or_absent, recover, write_text
from heedful.parallel import ranks
from heedful.train.manifest import MANIFEST, verify, write_manifest
from heedful.train.state_file import DIVIDED, holds_divided, read_state, write_divided, write_state

NAME = re.compile(r"step-(\d{6,})")
RESUME = "resume"
PARTS = ".heedful-parts"
"""The end of the name of a folder in which ranks write their parts of a checkpoint."""


class Writes(Protocol):
    """What can write a model to a folder, by itself."""

    def save(self, folder: Path) -> None:
        """Write the model to a folder."""


class Saves(Writes, Protocol):
    """What a run saves: a learner."""

    def whole(self) -> Writes:
        """What writes its models: itself, if they are not divided among ranks; else a copy of them on rank 0. All call it."""

    def state_dict(self) -> dict[str, Any]:
        """All that changes during a run."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that verified."""

    path: Path
    step: int
    state: dict[str, Any]


class Checkpoints:
    """The folder of a run's checkpoints.

    Args:
        run: the run's folder.
        identity: the run's own name, so that no checkpoint of another is taken for one of this.
        keep: how many to keep; 0 keeps all.
    """

    def __init__(self, run: Path, identity: str, keep: int) -> None:
        self.folder, self.identity, self.keep = run / "checkpoints", identity, keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"step-{step:06d}"

    def save(self, step: int, model: Writes, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove older ones. Raises OSError; what was there before is then still there.

        What the ranks have written of a divided state (`write_parts_of`) becomes a part of it.
        """
        with complete_or_absent(self.path(step)) as folder:
            model.save(folder)
            write_state(folder / RESUME, state)
            hit("save.parts")
            if holds_divided(state):
                parts_of(self.folder.parent, step).rename(folder / RESUME / DIVIDED)
            hit("save.state")
            write_manifest(folder, {"run": self.identity, "step": step})
            hit("save.manifest")
        if self.keep:
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old), ignore_errors=True)
        hit("save.pruned")
        return self.path(step)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, whole or not, in their order."""
        if not self.folder.is_dir():
            return []
        found = (NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match and (self.path(int(match[1])) / MANIFEST).exists())

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and a line about each newer one that does not.

        Those are set aside as bad-step-N, with the reason in REASON.txt.
        """
        self._tidy()
        said: list[str] = []
        for path in self.candidates():
            try:
                return self.read(path), said
            except CheckpointError as error:
                aside = self._set_aside(path, str(error))
                said.append(f"{path.name} was not written to its end or is damaged: {error}; it is now {aside.name}")
        return None, said

    def read(self, path: Path) -> Checkpoint:
        """A checkpoint of this run. Raises CheckpointError if it does not verify or is of another run."""
        return Checkpoint(path, self.check(path), read_state(path / RESUME))

    def check(self, path: Path) -> int:
        """The step of a checkpoint. Raises CheckpointError as `read` does, but for its state, which is not read."""
        if path.is_symlink():
            raise CheckpointError("it is a link")
        manifest = verify(path)
        if manifest.get("run") != self.identity:
            raise CheckpointError("it is of another run")
        step = manifest.get("step")
        if not isinstance(step, int) or path.name != self.path(step).name:
            raise CheckpointError(f"it is of step {step}")
        return step

    def go_back_to(self, step: int) -> list[Path]:
        """Set later checkpoints aside as later-step-N. Returns where they are."""
        later = [path for path in self.candidates() if int(path.name.partition("-")[2]) > step]
        return [_renamed(path, f"later-{path.name}") for path in later]

    def set_model_aside(self, name: str) -> list[str]:
        """Set a model of the run, best or final, aside as later-NAME. Returns a line about it, if there is one."""
        model = self.folder.parent / name
        if not model.is_dir():
            return []
        aside = model.rename(_free(self.folder / f"later-{name}"))
        return [f"set aside, as it is of a later step: {aside}"]

    def candidates(self) -> list[Path]:
        """All that is named like a checkpoint, newest first: by the step, not by the time, which clocks set back."""
        if not self.folder.is_dir():
            return []
        found = [(match, path) for path in self.folder.iterdir() if (match := NAME.fullmatch(path.name))]
        return [path for _, path in sorted(((int(match[1]), path) for match, path in found), reverse=True)]

    def _tidy(self) -> None:
        """Remove what was being written when a process was killed."""
        hidden = self.folder.glob(".step-*") if self.folder.is_dir() else ()
        for path in hidden:
            if path.name.endswith(PARTS):
                shutil.rmtree(path, ignore_errors=True)
                continue
            recover(self.folder / path.name.removeprefix(".").rpartition(".")[0])

    def _set_aside(self, path: Path, reason: str) -> Path:
        aside = _renamed(path, f"bad-{path.name}")
        if aside.is_dir() and not aside.is_symlink():
            with contextlib.suppress(OSError):
                write_text(aside / "REASON.txt", reason + "\n")
        return aside


def parts_of(run: Path, step: int) -> Path:
    """Where ranks write their parts of a step's state, before a checkpoint is made of them."""
    return run / "checkpoints" / f".step-{step:06d}{PARTS}"


def write_parts_of(run: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write this rank's parts of a state that is divided among ranks. All ranks call it. Raises OSError on all of them."""
    folder = parts_of(run, step)
    ranks.by_first(lambda: shutil.rmtree(folder, ignore_errors=True))  # of a run that was killed
    try:
        write_divided(folder, state)
    except OSError:
        ranks.by_first(lambda: shutil.rmtree(folder, ignore_errors=True))
        raise


def _renamed(path: Path, name: str) -> Path:
    """Rename within a folder; of equal names the later gets a number."""
    return path.rename(_free(path.with_name(name)))


def _free(path: Path) -> Path:
    """A path at which there is nothing: this one, or one with a number."""
    new, number = path, 1
    while new.exists() or new.is_symlink():
        number += 1
        new = path.with_name(f"{path.name}-{number}")
    return new
