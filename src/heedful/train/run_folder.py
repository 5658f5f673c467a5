"""The folder of a run: configuration, environment, metrics, samples, models, checkpoints, summary."""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

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
    read_record,
    recover,
    sync,
    to_json,
    write_json,
    write_text,
)
from heedful.lock import LOCK, FolderLock
from heedful.redact import redact, without_secrets_of
from heedful.train.checkpoints import Checkpoint, Checkpoints, Writes
from heedful.train.environment import SOURCES, Given, digest, environment, same_sources
from heedful.train.manifest import SCHEMA
from heedful.train.output_folder import (
    ANEW,
    LOGS,
    MARKER,
    MODELS,
    NOT_ALWAYS,
    OF_THIS_CALL,
    Plan,
    aside_prefix,
    asides,
    check_output,
    clear,
    hidden,
    holds_models,
    inputs,
    new_prefix,
    real_path,
    settings_of,
)
from heedful.train.patience import Patience

NO_LOCKS = (
    "the file system of --output has no locks, so nothing keeps a second process out of the folder: start one at a time"
)


class RunFolder:
    """An open run folder: a new run, or an unfinished one that goes on. Made when everything else has been checked.

    A run that is replaced is set aside under a hidden name until the new one has its ``final/``. If the new one fails before
    its first step, the older one has its name again, and if there was none, the folder is as it was.

    Args:
        config: the run's settings.
        command: the trainer's name.
        data: what the run is made from, mostly files; their hashes are written down, and an unfinished run goes on only with
            these.
        models: models that it is made from, likewise.
        about: what else to write down of the run, for those who list it.

    Raises ConfigError if the folder cannot be used, CheckpointError if an unfinished run has no checkpoint that verifies.
    """

    def __init__(
        self,
        config: RunOptions,
        command: str,
        *,
        data: Sequence[str | Given],
        models: Sequence[str],
        about: Mapping[str, Any] | None = None,
    ) -> None:
        files = [str(path) for path in inputs(config) if path.is_file()]  # code of rewards, a template
        facts = environment(command, config, data=[*data, *files], models=models)  # which may take minutes
        facts["hidden"] = hidden(config)
        self.made_from = digest([settings_of(config), {kind: facts[kind] for kind in SOURCES}])
        """A sum of the settings, data and models: another in the state of a checkpoint means that they have changed."""
        plan = check_output(config)
        self.path = real_path(config.output)
        self.notes: list[str] = []
        self.checkpoint: Checkpoint | None = None
        """What the run goes on from; None if it is new."""
        self._config, self._facts = config, facts
        self._aside: Path | None = None
        self._lock: FolderLock | None = None
        self._resumes = plan.resumes
        self._logs = contextlib.ExitStack()
        self._is_new_folder = not self.path.exists()
        self._has_stepped = False
        try:
            try:
                self._take(plan)
            except OSError as error:
                if isinstance(error, HeedfulError):
                    raise
                raise ConfigError(f"--output {self.path} cannot be made: {in_words(error)}") from error
            if self._lock is not None and not self._lock.keeps_others_out:
                self.notes.append(NO_LOCKS)
            if plan.resumes:
                self._find_checkpoint()
            if self.checkpoint is None:
                self._begin(command, about or {})
                self._open_logs()
            hit("run.opened")
        except BaseException:  # a full disk, say
            self._undo()
            raise

    def _take(self, plan: Plan) -> None:
        """Hold the folder, empty or with the run that goes on."""
        if plan.replaces:
            held = FolderLock(self.path)  # refused if somebody writes to it
            try:
                self._aside, self._lock = self._exchange()
            finally:
                held.release()
            (self._aside / LOCK).unlink(missing_ok=True)
        else:
            self.path.mkdir(parents=True, exist_ok=not self._is_new_folder)
            self._lock = FolderLock(self.path)

    def _exchange(self) -> tuple[Path, FolderLock]:
        """Set the older run aside. The new folder is locked before anybody can see it; returns both."""
        number = uuid.uuid4().hex[:8]
        aside, new = (self.path.with_name(f"{start(self.path)}{number}") for start in (aside_prefix, new_prefix))
        new.mkdir()
        lock = FolderLock(new)
        try:
            self.path.rename(aside)
            hit("run.aside")
            new.rename(self.path)  # refused if somebody has brought the older run back
        except BaseException:
            lock.release()
            new.rmdir()
            with contextlib.suppress(OSError):
                aside.rename(self.path)
            raise
        lock.path = self.path / LOCK
        return aside, lock

    def _find_checkpoint(self) -> None:
        """Read the checkpoint to go on from, if the unfinished run has come to one. Raises CheckpointError, ConfigError."""
        config, facts = self._config, self._facts
        self._checkpoints = Checkpoints(
            self.path, read_object(self.path / MARKER, ANEW, needs=["run"])["run"], config.keep
        )
        before = read_object(self.path / "environment.json", ANEW, needs=["versions"])
        self.notes += same_sources(before, facts, allowed=config.allow_change)
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
            self.checkpoint, bad = self._checkpoints.newest()
            self.notes += bad
            self._goes_back = bool(bad)
            if self.checkpoint is None and (bad or holds_models(self.path)):
                reason = "; ".join(bad) or "it was cut short before its first checkpoint"
                raise CheckpointError(
                    f"--output {self.path} holds models of an unfinished run, but no checkpoint to go on from ({reason}); "
                    "choose another folder, or add --overwrite to start anew"
                )
        self._has_stepped = self.checkpoint is not None
        if self.checkpoint is None:  # it was killed before it had anything to keep
            clear(self.path)

    def go_on(self, patience: Patience, objective: str) -> list[str]:
        """Bring the folder back to where the checkpoint was, whose state has been loaded. Returns what there is to say.

        If that is not the newest that there was, best/ and final/ of later steps are set aside, and best/ is chosen anew: the
        one that the checkpoint knows of is gone. After a mere kill the run comes to the same ones again.

        Args:
            patience: what the checkpoint knows of best/.
            objective: the metric by which that was chosen.
        """
        assert self.checkpoint is not None
        check_logs(self.path, self.checkpoint.state["logs"])  # from here on the folder changes
        notes = [f"set aside: {later}" for later in self._checkpoints.go_back_to(self.checkpoint.step)]
        (self.path / "summary.json").unlink(missing_ok=True)
        for name in MODELS:
            recover(self.path / name)
        if self._goes_back:
            notes += self._set_aside_later_models(patience, objective)
        if not (self.path / "best").is_dir():  # set aside now, or when the run went on before
            patience.best = None
        self._write_settings()
        notes += cut_logs(self.path, self.checkpoint.state["logs"])
        time.sleep(1)  # TensorBoard reads files in the order of their names, which begin with the second
        self._open_logs()
        self.checkpoint = None  # its tensors are in the learner now
        return notes

    def _set_aside_later_models(self, patience: Patience, objective: str) -> list[str]:
        """Set best/ and final/ aside if they are of later steps than the checkpoint, by what the metrics say of those."""
        assert self.checkpoint is not None
        with (self.path / "metrics.jsonl").open("rb") as file:
            file.seek(self.checkpoint.state["logs"]["metrics.jsonl"])
            later = lines_of(file.read())
        notes = []
        if any(line["step"] > self.checkpoint.step for line in later):
            notes += self._checkpoints.set_model_aside("final")
        if patience.would_improve(line[objective] for line in later if objective in line):
            notes += self._checkpoints.set_model_aside("best")
        return notes

    def _begin(self, command: str, about: Mapping[str, Any]) -> None:
        """Write what is known before the first step."""
        identity = uuid.uuid4().hex
        marker = {"schema": SCHEMA, "run": identity, "algorithm": command, **about}
        write_json(self.path / MARKER, marker)
        self._checkpoints = Checkpoints(self.path, identity, self._config.keep)
        hit("run.named")
        self._write_settings()

    def _write_settings(self) -> None:
        write_json(self.path / "environment.json", self._facts)
        write_text(self.path / "config.yaml", to_yaml(self._config, leave_out=OF_THIS_CALL, without_secrets=True))

    def _open_logs(self) -> None:
        """Open what is written to in every step."""
        self._metrics = self._logs.enter_context((self.path / "metrics.jsonl").open("ab"))
        self._samples = self._logs.enter_context((self.path / "samples.jsonl").open("ab"))
        self._tensorboard = SummaryWriter(str(self.path / "tensorboard"))
        self._logs.callback(self._tensorboard.close)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, and the same numbers for TensorBoard."""
        self._has_stepped = self._has_stepped or step > 0
        self._write_line(self._metrics, {"step": step, **metrics})
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Lines of samples.jsonl."""
        for sample in samples:
            self._write_line(self._samples, {"step": step, **sample}, without_secrets_of(self._config))

    def log_sizes(self) -> dict[str, int]:
        """Bytes of every log as it is now, so that a run that goes on from here can cut off what came later."""
        self._tensorboard.flush()
        files = [self.path / name for name in (*LOGS, *NOT_ALWAYS) if (self.path / name).exists()]
        files += sorted((self.path / "tensorboard").iterdir())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in files}

    def save_checkpoint(self, step: int, model: Writes, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, unless it is there. The logs are on the disk before it. Raises OSError."""
        path = self._checkpoints.path(step)
        if not path.exists():
            for name in state["logs"]:
                sync(self.path / name)
            self._checkpoints.save(step, model, state)
        return path

    def has_checkpoint(self, step: int) -> bool:
        """Whether the checkpoint of a step is there."""
        return self._checkpoints.path(step).exists()

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that is there."""
        steps = self._checkpoints.steps()
        return self._checkpoints.path(steps[-1]) if steps else None

    def save(self, model: Writes, *names: str) -> None:
        """Write a model to a folder of the run's."""
        with complete_or_absent(self.path.joinpath(*names)) as partial:
            model.save(partial)

    def drop_replaced(self) -> None:
        """Remove the runs that this one replaces: it has its final/."""
        for old in asides(self.path):
            shutil.rmtree(old, ignore_errors=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json: the run is complete."""
        write_json(self.path / "summary.json", redact(summary))

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk: what was to be written is told already
            self._logs.close()
        if error is not None and not self._has_stepped:
            self._undo()
        elif self._lock is not None:
            self._lock.release()

    def _undo(self) -> None:
        """Leave the older run, or nothing, or the unfinished run as it is."""
        with contextlib.suppress(OSError):
            self._logs.close()
        if self._lock is None:  # the folder is somebody else's, or not there
            is_ours = False
        else:
            is_ours = not self._resumes
            if is_ours:
                clear(self.path)
            self._lock.release()
        with contextlib.suppress(OSError):  # the first error is the one to report
            if is_ours and self._is_new_folder:
                self.path.rmdir()
            if self._aside is not None:
                self._aside.rename(self.path)  # in the place of the new one, which is empty

    @staticmethod
    def _write_line(file: Any, record: Mapping[str, Any], hide: Callable[[str], str] = str) -> None:
        with naming(Path(file.name)):
            file.write((hide(to_json(record)) + "\n").encode("utf-8", "backslashreplace"))
            file.flush()


def lines_of(content: bytes) -> list[dict[str, Any]]:
    """The lines of metrics; one that was cut short is left out."""
    return [record for record in map(read_record, content.split(b"\n")) if record is not None and "step" in record]


def check_logs(run: Path, sizes: Mapping[str, int]) -> None:
    """Check that the logs of a run can be cut back to sizes they had. Raises CheckpointError."""
    for name, size in sizes.items():
        path = run / name
        if path.is_symlink() or not path.resolve().is_relative_to(run.resolve()):
            raise CheckpointError(f"{path} is outside of its run")
        if name in LOGS and not _has(path, size):
            raise CheckpointError(
                f"{path} is missing or shorter than it was at the checkpoint; bring it back, or start anew with "
                "--overwrite"
            )


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size >= size


def cut_logs(run: Path, sizes: Mapping[str, int]) -> list[str]:
    """Cut the logs of a run back to sizes they had, and remove those that are newer. Returns what could not be done."""
    said = []
    for name, size in sizes.items():
        path = run / name
        if not _has(path, size):
            lost = "TensorBoard will not show the earlier steps" if path.parent != run else "its earlier lines are lost"
            said.append(f"{path} is missing or was changed: {lost}")
            continue
        os.truncate(path, size)
    for path in [*(run / "tensorboard").glob("events.*"), *(run / name for name in NOT_ALWAYS)]:
        if path.relative_to(run).as_posix() not in sizes:
            path.unlink(missing_ok=True)
    return said
