"""The folder of a run as ranks other than the first see it: they go on from its checkpoint, and write nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from heedful.configs.options import RunOptions
from heedful.errors import CheckpointError
from heedful.parallel import ranks
from heedful.train.checkpoints import RESUME, Checkpoint, Writes
from heedful.train.environment import Given
from heedful.train.patience import Patience
from heedful.train.run_folder import RunFolder
from heedful.train.state_file import read_state


@dataclass
class ReadOnlyFolder:
    """What `RunFolder` does, without doing it."""

    path: Path
    made_from: str
    checkpoint: Checkpoint | None
    notes: list[str] = field(default_factory=list)
    last_checkpoint: Path | None = None

    def go_on(self, patience: Patience, objective: str) -> list[str]:  # noqa: ARG002  the interface has it
        """Rank 0 does it."""
        self.checkpoint = None  # its tensors are in the learner now
        return []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 does it."""

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Rank 0 does it."""

    def log_sizes(self) -> dict[str, int]:
        """None are written here."""
        return {}

    def save_checkpoint(self, step: int, model: Writes, state: Mapping[str, Any]) -> Path:  # noqa: ARG002  the interface has it
        """Rank 0 does it."""
        return self.path

    def has_checkpoint(self, step: int) -> bool:  # noqa: ARG002  the interface has it
        """Rank 0 knows."""
        return False

    def save(self, model: Writes, *names: str) -> None:
        """Rank 0 does it."""

    def drop_replaced(self) -> None:
        """Rank 0 does it."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Rank 0 does it."""

    def __enter__(self) -> "ReadOnlyFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""


def open_folder(
    config: RunOptions, command: str, *, data: Sequence[str | Given], models: Sequence[str], about: Mapping[str, Any]
) -> RunFolder | ReadOnlyFolder:
    """The run's folder, which rank 0 opens; what it raises is raised on every rank. The arguments are those of `RunFolder`.

    Raises CheckpointError if this rank cannot read the checkpoint that the run goes on from.
    """
    opened: list[RunFolder] = []

    def open_it() -> tuple[Path, str, Path | None, int]:
        folder = RunFolder(config, command, data=data, models=models, about=about)
        opened.append(folder)
        found = folder.checkpoint
        return folder.path, folder.made_from, None if found is None else found.path, 0 if found is None else found.step

    path, made_from, checkpoint, step = ranks.by_first(open_it)
    if opened:
        return opened[0]
    if checkpoint is None:
        return ReadOnlyFolder(path, made_from, None)
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"rank {ranks.rank()} sees no {checkpoint}, which rank 0 goes on from; --output must be a folder that all "
            "machines see"
        )
    return ReadOnlyFolder(path, made_from, Checkpoint(checkpoint, step, read_state(checkpoint / RESUME)))
