"""The folder of a run: configuration, environment, metrics, samples, models, checkpoints, summary."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils.tensorboard import SummaryWriter

from heedful.configs.options import RunOptions
from heedful.configs.parse import to_yaml
from heedful.errors import CheckpointError, ConfigError, HeedfulError
from heedful.faults import hit
from heedful.files import (
    complete_or_absent,
    in_words,
    naming,
    read_object,
    recover,
    sync,
    to_json,
    write_json,
    write_text,
)
from heedful.lock import FolderLock
from heedful.models.save import round_saved
from heedful.redact import redact, without_secrets_of
from heedful.training import alarms
from heedful.training.alarms import RaisedAlarm
from heedful.training.checkpoints import SCHEMA, Checkpoint, Checkpoints, Writes, checkpoint_path
from heedful.training.early_stopping import EarlyStopping
from heedful.training.output_folder import (
    LOGS,
    MARKER,
    MODELS,
    NOT_ALWAYS,
    bring_back,
    check_output,
    clear,
    holds_models,
    logged,
    real_path,
    set_aside,
)
from heedful.training.provenance import (
    PER_INVOCATION,
    RESTART_HINT,
    Artifact,
    check_same_sources,
    environment,
    made_from,
    settings_of,
)

NO_LOCKS = (
    "the file system of --output has no locks, so a second process in the same folder is not detected: start only one"
)


class RunFolder:
    """An open run folder: a new run, or a resumed one. Created after all other checks.

    If a new run fails before its first step, the folder is restored: empty, absent, or with the replaced run.

    Args:
        config: the run's settings.
        command: the trainer's name.
        data: inputs of the run, mostly files; their hashes are recorded, and a run resumes only with the same.
        models: parent models, recorded likewise.
        facts: further content of run.json, for lists of runs.
        compiled: whether layers are compiled; recorded, so that a resumed run does the same.

    Raises ConfigError if the folder cannot be used, CheckpointError if an unfinished run has no valid checkpoint.
    """

    def __init__(
        self,
        config: RunOptions,
        command: str,
        *,
        data: Sequence[str | Artifact],
        models: Sequence[str],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = config
        self._environment = environment(command, config, data=data, models=models)  # may take minutes
        self.made_from = made_from(settings_of(config), self._environment)
        """A hash of settings, data and models. Another one in a checkpoint means that they have changed since."""
        plan = check_output(config)
        self.path = real_path(config.folder)
        self.notes: list[str] = []
        self.checkpoint: Checkpoint | None = None
        """The checkpoint to resume from; None for a new run."""
        self._lock: FolderLock | None = None
        self._is_new = False
        """Whether the folder's files are this run's; they are removed if it makes no step."""
        self._is_new_folder = not self.path.exists()
        self._has_stepped = False
        self._logs = contextlib.ExitStack()
        try:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(self.path)  # raises if another process uses it
                if plan.replaces:
                    set_aside(self.path)
                self._is_new = not plan.resumes
            except OSError as error:
                if isinstance(error, HeedfulError):
                    raise
                raise ConfigError(
                    f"--output {self.path} cannot be made: {in_words(error)}; choose another folder"
                ) from error
            if not self._lock.keeps_others_out:
                self.notes.append(NO_LOCKS)
            if plan.resumes:
                self._find_checkpoint()
            if self.checkpoint is None:
                self._begin(command, facts or {})
                self._open_logs()
            hit("run.opened")
        except BaseException:  # such as a full disk
            self._undo()
            raise

    def _find_checkpoint(self) -> None:
        """Read the checkpoint to resume from, if the run has one. Raises CheckpointError, ConfigError."""
        config = self._config
        identity = read_object(self.path / MARKER, RESTART_HINT, needs=["run"])["run"]
        self._checkpoints = Checkpoints(self.path, identity, config.save_total_limit)
        before = read_object(self.path / "environment.json", RESTART_HINT, needs=["versions"])
        self.notes += check_same_sources(before, self._environment, allowed=config.allow_change)
        self._goes_back = config.resume not in ("auto", "never")
        if self._goes_back:
            path = Path(config.resume)
            try:
                self.checkpoint = self._checkpoints.read(path)
            except CheckpointError as error:
                raise CheckpointError(
                    f"--resume {path}: {error}; choose another checkpoint, or --resume auto"
                ) from error
        else:
            self.checkpoint, damaged = self._checkpoints.newest()
            self.notes += damaged
            self._goes_back = bool(damaged)
            if self.checkpoint is None and (damaged or holds_models(self.path)):
                reason = "; ".join(damaged) or "it was interrupted before its first checkpoint"
                raise CheckpointError(
                    f"--output {self.path} has models of an unfinished run, but no checkpoint to resume from ({reason}); "
                    "choose another folder, or add --overwrite to start anew"
                )
        self._has_stepped = self.checkpoint is not None
        if self.checkpoint is None:  # killed before its first checkpoint
            clear(self.path)

    def rewind(self, stopping: EarlyStopping, objective: str) -> list[str]:
        """Rewind the folder to the loaded checkpoint. Returns notes on what was done.

        If it is not the newest checkpoint, best/ and final/ of later steps are set aside, and best/ is selected anew,
        since the checkpoint's one no longer exists. After a kill the run reproduces the same ones.

        Args:
            stopping: the checkpoint's state of best/.
            objective: the metric that selected it.
        """
        assert self.checkpoint is not None
        sizes = self.checkpoint.state["logs"]
        check_logs(self.path, sizes)  # from here on the folder changes
        notes = [f"set aside: {later}" for later in self._checkpoints.go_back_to(self.checkpoint.step)]
        (self.path / "summary.json").unlink(missing_ok=True)
        for name in MODELS:
            recover(self.path / name)
        if self._goes_back:
            later = list(logged(self.path, after=sizes["metrics.jsonl"]))
            if any(record["step"] > self.checkpoint.step for record in later):
                notes += self._checkpoints.set_model_aside("final")
            if stopping.would_improve(record[objective] for record in later if objective in record):
                notes += self._checkpoints.set_model_aside("best")
        if not (self.path / "best").is_dir():  # set aside now or earlier
            stopping.best = None
        self._write_settings()
        notes += cut_logs(self.path, sizes)
        _await_later_second(self.path / "tensorboard")
        self._open_logs()
        self.checkpoint = None  # the learner now has its tensors
        return notes

    def _begin(self, command: str, facts: Mapping[str, Any]) -> None:
        """Write the files known before the first step."""
        identity = uuid.uuid4().hex
        write_json(self.path / MARKER, {"schema": SCHEMA, "run": identity, "algorithm": command, **facts})
        self._checkpoints = Checkpoints(self.path, identity, self._config.save_total_limit)
        hit("run.named")
        self._write_settings()

    def _write_settings(self) -> None:
        write_json(self.path / "environment.json", self._environment)
        write_text(self.path / "config.yaml", to_yaml(self._config, leave_out=PER_INVOCATION, without_secrets=True))

    def _open_logs(self) -> None:
        """Open the logs written in every step."""
        self._metrics = self._logs.enter_context((self.path / "metrics.jsonl").open("ab"))
        self._samples = self._logs.enter_context((self.path / "samples.jsonl").open("ab"))
        self._tensorboard = SummaryWriter(str(self.path / "tensorboard"))
        self._logs.callback(self._tensorboard.close)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl, and the same numbers for TensorBoard."""
        self._has_stepped = self._has_stepped or step > 0
        _write_line(self._metrics, {"step": step, **metrics})
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write lines of samples.jsonl."""
        for sample in samples:
            _write_line(self._samples, {"step": step, **sample}, without_secrets_of(self._config))

    def log_alarm(self, alarm: RaisedAlarm) -> None:
        """Write a line of alarms.jsonl."""
        with (self.path / alarms.FILE).open("ab") as file:
            _write_line(file, alarm._asdict())

    def log_sizes(self) -> dict[str, int]:
        """Current size of every log in bytes, so that resuming can cut off later lines."""
        self._tensorboard.flush()
        files = [self.path / name for name in (*LOGS, *NOT_ALWAYS) if (self.path / name).exists()]
        files += sorted((self.path / "tensorboard").iterdir())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in files}

    def save_checkpoint(self, step: int, model: Writes, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, unless it exists, after flushing the logs to disk. Raises OSError."""
        if not checkpoint_path(self.path, step).exists():
            for name in state["logs"]:
                sync(self.path / name)
            self._checkpoints.save(step, model, state)

    @property
    def checkpoints(self) -> list[Path]:
        """Existing checkpoints, ordered by step."""
        return [checkpoint_path(self.path, step) for step in self._checkpoints.steps()]

    def save(self, model: Writes, name: str, dtype: torch.dtype | None) -> None:
        """Write a model to a subfolder of the run; with a dtype, its float32 weights are rounded to it."""
        with complete_or_absent(self.path / name) as partial:
            model.save(partial)
            if dtype is not None:
                round_saved(partial, dtype)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json: the run is complete."""
        write_json(self.path / "summary.json", redact(summary))

    def close(self, error: BaseException | None) -> None:
        """Close the folder at the end of a run, after success or an error."""
        if error is not None and not self._has_stepped:
            self._undo()
            return
        with contextlib.suppress(OSError):  # a full disk; already reported when the line was written
            self._logs.close()
        if self._lock is not None:
            self._lock.release()

    def _undo(self) -> None:
        """Restore the previous state: the replaced run, an empty folder, or the unfinished run."""
        with contextlib.suppress(OSError):
            self._logs.close()
        if self._lock is not None:  # else another process owns the folder
            with contextlib.suppress(OSError):  # report the first error
                if self._is_new:
                    clear(self.path)
                    bring_back(self.path)
            self._lock.release()
            if self._is_new_folder:
                with contextlib.suppress(OSError):
                    self.path.rmdir()


def _await_later_second(events: Path) -> None:
    """Wait until a new events file has a later second in its name: TensorBoard reads files in the order of their
    names."""
    newest = max((int(path.name.split(".")[3]) for path in events.glob("events.out.tfevents.*")), default=0)
    time.sleep(min(1.0, max(0.0, newest + 1 - time.time())))  # does not wait for a clock that was set back


def _write_line(file: IO[bytes], record: Mapping[str, Any], hide: Callable[[str], str] = str) -> None:
    with naming(Path(file.name)):
        file.write((hide(to_json(record)) + "\n").encode("utf-8", "backslashreplace"))
        file.flush()


def check_logs(run: Path, sizes: Mapping[str, int]) -> None:
    """Check that a run's logs can be truncated to earlier sizes. Raises CheckpointError."""
    for name, size in sizes.items():
        path = run / name
        if path.is_symlink() or not path.resolve().is_relative_to(run.resolve()):
            raise CheckpointError(f"{path} is outside of its run")
        if name in LOGS and not _has(path, size):
            raise CheckpointError(
                f"{path} is missing or shorter than at the checkpoint; restore it, or start anew with --overwrite"
            )


def cut_logs(run: Path, sizes: Mapping[str, int]) -> list[str]:
    """Truncate a run's logs to earlier sizes, and remove newer logs. Returns notes on failures."""
    notes = []
    for name, size in sizes.items():
        path = run / name
        if _has(path, size):
            os.truncate(path, size)
            continue
        lost = "TensorBoard will not show the earlier steps" if path.parent != run else "its earlier lines are lost"
        notes.append(f"{path} is missing or was changed: {lost}")
    for path in [*(run / "tensorboard").glob("events.*"), *(run / name for name in NOT_ALWAYS)]:
        if path.relative_to(run).as_posix() not in sizes:
            path.unlink(missing_ok=True)
    return notes


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size >= size
