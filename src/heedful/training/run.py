"""A run: folder, display, evaluations, checkpoints, and a clean end in every case.

with Run(config, learner, "sft", steps, ...) as run:
    for step in run.steps():
        if run.needs_update(step):
            with run.update():
                run.log(step, learn(...))
        if run.samples_due(step):
            run.show_samples(step, ...)
        if run.evaluation_due(step):
            run.evaluate(step, evaluate(...))
return run.summary
"""

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from heedful.configs.options import TrainingOptions
from heedful.display import Display, counted
from heedful.distributed import ranks
from heedful.distributed.rank_failures import all_stop
from heedful.errors import CheckpointError, ConfigError, HeedfulError, MachineError, Terminated, TrainingError
from heedful.faults import hit
from heedful.kernels.cpu.threads import choose_threads
from heedful.models.save import check_saving, half_dtype_of
from heedful.models.source import resolve
from heedful.redact import command
from heedful.signals import Stops
from heedful.tracking.trackers import Trackers
from heedful.training.alarms import Alarms, Limits, RaisedAlarm
from heedful.training.callbacks import NO_CALLBACKS, Callbacks
from heedful.training.checkpoints import (
    RESUME,
    RunLearner,
    check_space,
    checkpoint_path,
    holds_divided,
    read_state,
    write_parts_of,
)
from heedful.training.early_stopping import EarlyStopping
from heedful.training.output_folder import drop_replaced
from heedful.training.provenance import Artifact
from heedful.training.rank_consistency import check_same_weights
from heedful.training.run_folder import RunFolder
from heedful.training.verdict import Shares, Yardstick, judge

Numbers = Mapping[str, float]


class Run:
    """An open run. As a context manager it finishes, or saves a checkpoint to resume from.

    An unfinished run in the output folder resumes from its newest checkpoint, bit for bit as if it had not been
    interrupted (on a CPU in float32).

    If the run ends early after its first step (an exception, Ctrl-C or a request to terminate), a checkpoint of the last
    complete step is saved, and its path displayed. After an error in the middle of an update, the current model is saved as
    ``checkpoints/step-N-partial``, and the run resumes from the checkpoint before. If a run fails before its first
    step, the folder is restored. ``final/`` is written right after the last step, before anything else can fail.

    Of several ranks only rank 0 writes and displays; it selects the checkpoint to resume from, which all ranks read. A
    request to stop that reaches any rank stops all at their next synchronisation.

    Args:
        config: the settings; its ``output`` is the folder.
        learner: the models to save and restore.
        algorithm: the command's name.
        total_steps: optimizer steps (rollout batches for online algorithms) unless stopped early.
        objective: the evaluation metric that selects the best model.
        higher_is_better: whether a higher objective is better.
        shown: metrics of the progress bar, with their labels.
        parents: the models that the run starts from; their hashes are recorded.
        facts: facts for the summary that are known in advance, such as counts of records.
        notes: further lines to display at the start.
        more_data: inputs besides ``data`` and ``eval_data``, mostly files.
        yardstick: the metric of evaluations by which the run is judged at its end; None if nothing is held out.
        callbacks: the user's functions to call after steps, evaluations and saves.
        alarms: the alarms that watch the metrics; None for none.

    Raises ConfigError if early stopping has no evaluations, or the folder cannot be used; CheckpointError if the model
    cannot be saved, or an unfinished run has no usable checkpoint; MachineError if the disk is too full.
    """

    def __init__(
        self,
        config: TrainingOptions,
        learner: RunLearner,
        algorithm: str,
        total_steps: int,
        *,
        objective: str,
        higher_is_better: bool,
        shown: Mapping[str, str],
        parents: Sequence[str],
        facts: Mapping[str, Any],
        notes: Sequence[str] = (),
        more_data: Sequence[str | Artifact] = (),
        yardstick: Yardstick | None,
        callbacks: Callbacks = NO_CALLBACKS,
        alarms: Alarms | None = None,
    ) -> None:
        if config.early_stopping_patience and yardstick is None:
            raise ConfigError(
                "--early-stopping-patience counts evaluations, but nothing is held out: set --eval-fraction or --eval-data"
            )
        self.config, self.learner, self.total_steps, self.objective = config, learner, total_steps, objective
        self.summary: dict[str, Any] = {"algorithm": algorithm, **facts}
        self._callbacks, self._yardstick = callbacks, yardstick
        self.done = 0
        self._looked_at = -1
        """The last step with samples and evaluation done; 0 is the initial model."""
        self._stopping = EarlyStopping(config.early_stopping_patience, higher_is_better=higher_is_better)
        self._first_evaluation: Numbers | None = None
        self._last_evaluation: Numbers = {}
        self._shares: list[Shares] = []
        """What the held-out records added to the yardstick in the first and in the last evaluation."""
        self._stopped_by: str | None = None
        self._last_step: Numbers = {}
        self._has_final = False
        self._save_dtype = half_dtype_of(resolve(config.model, config)) if config.save_dtype == "base" else None
        self._already_reported: list[str] = []
        self._alarms = alarms or Alarms(Limits(), names=())
        self._seconds_before = 0.0
        self._stops = Stops(waits=ranks.size() > 1)
        ranks.on_rank_zero(lambda: check_saving(*learner.parts()))
        ranks.on_rank_zero(lambda: check_space(config, learner))
        self._display = Display(algorithm, total_steps, shown)
        self._folder: RunFolder | None = None
        """The run's folder, only on rank 0, which does all writing."""
        models = learner.parts()[0]
        weights = sum(weight.numel() for model in models for weight in model.parameters())
        # a program that calls heedful has its own threads
        threads = choose_threads(weights, models[0].device) if command() else ""

        def open_folder() -> tuple[Path, str, Path | None, list[str]]:
            data = [one for one in (config.data, config.eval_data, *more_data) if one]
            about = {"total_steps": total_steps, "objective": objective}
            folder = self._folder = RunFolder(config, algorithm, data=data, models=parents, facts=about)
            found = folder.checkpoint
            return folder.path, folder.made_from, found.path if found else None, folder.notes

        self.path, self._made_from, self._continues_from, folder_notes = ranks.on_rank_zero(open_folder)
        self._trackers = Trackers(config, self.path)
        self._opening = [*(f"{name}: {_in_words(fact)}" for name, fact in facts.items()), *notes, *folder_notes]
        self._opening += [threads] if threads else []

    def __enter__(self) -> "Run":
        self._display.__enter__()
        try:
            if self._continues_from is not None:
                self._resume(self._continues_from)
                ranks.any_of(False)  # all have read it
            check_same_weights(self.learner.optimizer)
            for line in self._opening:
                self._display.note(line)
            self._has_moved = False
            self._hook = self.learner.optimizer.register_step_pre_hook(self._moves)
            self._started = self._last_saved = time.monotonic()
            self._mark()
            self._stops.open()
            hit("run.started")
        except BaseException as error:
            self._stops.close()
            self._display.__exit__(type(error), error, None)
            self._close_folder(error)
            raise
        return self

    def _resume(self, checkpoint: Path) -> None:
        """Resume from a checkpoint. Raises CheckpointError if it is unreadable, or from another learner."""
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"rank {ranks.rank()} does not see {checkpoint}, from which rank 0 resumes; --output must be a folder "
                "shared by all machines"
            )
        checked = self._folder.checkpoint if self._folder else None
        state = checked.state if checked else read_state(checkpoint / RESUME)
        try:
            self.learner.load_state_dict(state["learner"])
            run = state["run"]
            self.done, self._looked_at = run["done"], run["looked_at"]
            self._first_evaluation, self._last_evaluation = run["first_evaluation"], run["last_evaluation"]
            self._last_step, self._already_reported = run["last_step"], list(run["suppressed"])
            self._stopped_by = run["stopped_by"]
            if self._yardstick is not None and run["held_out"] == self._yardstick.identity:
                self._shares = run["shares"]
            else:
                self._yardstick = None  # the first evaluation is of other prompts
            self._stopping.load_state_dict(run["patience"])
            self._alarms.load_state_dict(run["alarms"])
            self._seconds_before = run["seconds"]
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: its checkpoint does not fit this run: {error}; start anew with --overwrite"
            ) from error
        if self._folder:
            self._opening += self._folder.rewind(self._stopping, self.objective)
        self._stopping.best = ranks.broadcast(self._stopping.best)
        if run["made_from"] != self._made_from:
            self._stopping.best = None
            self._opening.append("best/ is chosen anew, as settings, data or models have changed")
        self._opening.append(f"resumes after step {self.done} of {self.total_steps}")

    def _moves(self, *_: Any) -> None:
        """Called before each optimizer step: from now on the weights differ from the last mark."""
        self._has_moved = True

    def _mark(self) -> None:
        """Record the run's state to resume from. Tensors are not copied; they are valid until the next update."""
        self._state = {
            "learner": self.learner.state_dict(),
            "run": {
                "done": self.done,
                "looked_at": self._looked_at,
                "first_evaluation": self._first_evaluation,
                "last_evaluation": self._last_evaluation,
                "shares": self._shares,
                "held_out": self._yardstick.identity if self._yardstick else None,
                "last_step": self._last_step,
                "stopped_by": self._stopped_by,
                "suppressed": list(self._already_reported),
                "patience": self._stopping.state_dict(),
                "alarms": self._alarms.state_dict(),
                "seconds": self._seconds(),
                "made_from": self._made_from,
            },
            "logs": self._folder.log_sizes() if self._folder else {},
        }
        self._has_moved = False

    def _seconds(self) -> float:
        return round(self._seconds_before + time.monotonic() - self._started, 2)

    def steps(self) -> Iterator[int]:
        """0 for the initial model, then 1, 2, ... up to the last, or until evaluations stop improving or a callback stops.

        A resumed run begins after its last step, or with it, if it was interrupted during that step's evaluation.
        """
        first = self.done if self._looked_at < self.done else self.done + 1
        for step in range(first, self.total_steps + 1):
            stopped_by = self._stopped_by or self._out_of_patience()
            if stopped_by is not None:
                self._display.note(f"stopped at step {self.done} by {stopped_by}")
                break
            yield step
            self._looked_at = step
            if self.samples_due(step) or self.evaluation_due(step):
                self._mark()
            else:  # nothing has changed since the update
                self._state["run"]["looked_at"] = step
            self._save_if_due(step)
            self._stops.poll(ranks.largest)
        self._save_final()
        hit("run.learned")

    def _out_of_patience(self) -> str | None:
        patience = counted(self.config.early_stopping_patience, "evaluation")
        return f"early stopping: {patience} in a row without improvement" if self._stopping.exhausted else None

    def needs_update(self, step: int) -> bool:
        """True if a step still needs its update; False for 0, and for one that only needs its evaluation."""
        return step > self.done

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Context of an update, its `log` and its checks; delays requests to stop until it is done.

        Raises TrainingError if an alarm ends the run.
        """
        before = self.done
        self._stops.poll(ranks.largest)
        with self._stops.shield():
            try:
                yield
            finally:
                if self.done != before:  # logged, so complete
                    self._mark()
        self._stops.poll(ranks.largest)
        if self.done != before:
            self._stopped_by = self._callbacks.step(self.done, self._last_step) or self._stopped_by
            self._alarms.check()

    def log(self, step: int, metrics: Numbers, *, note: str | None = None) -> None:
        """Write and display a step's metrics. ``note`` is an optional message; repeats are suppressed."""
        hit("step.learned")
        self._write(step, metrics)
        self.done, self._last_step = step, dict(metrics)
        hit("step.logged")
        self._display.update(step, metrics)
        if ranks.is_first():
            self._trackers.start()
        if note is not None and note not in self._already_reported:
            self._already_reported.append(note)
            self._display.note(f"step {step}: {note}")
        self._report(self._alarms.see(step, metrics))
        if step == self.total_steps:
            self._save_final()

    def samples_due(self, step: int) -> bool:
        """True every ``sample_every`` steps and at the last one; never if that is 0."""
        return step > 0 and self.config.sample_every > 0 and self._due(step, self.config.sample_every)

    def evaluation_due(self, step: int) -> bool:
        """True before the first step, every ``eval_every`` steps and at the last one."""
        return step == 0 or self._due(step, self.config.eval_every)

    def _due(self, step: int, every: int) -> bool:
        is_last = step == self.total_steps or self._stopped_by is not None
        return is_last or (every > 0 and step % every == 0)

    def show_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write and display a table of samples."""
        if rows:
            if self._folder:
                self._folder.log_samples(step, rows)
            self._display.table(f"step {step}", rows)

    def evaluate(self, step: int, metrics: Numbers, shares: Shares) -> None:
        """Write metrics on held-out data, and save the model as ``best/`` if none was better before.

        ``shares`` is what each record adds to the yardstick. Does nothing without metrics (nothing is held out). Raises
        TrainingError if an alarm ends the run.
        """
        if not metrics:
            return
        hit("evaluation")
        check_same_weights(self.learner.optimizer)
        metrics = ranks.broadcast(dict(metrics))
        if self._first_evaluation is None:
            self._first_evaluation = dict(metrics)
        self._last_evaluation = dict(metrics)
        self._shares = [*self._shares[:1], shares]
        self._write(step, metrics)
        self._display.note(f"step {step}: " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        if self._stopping.update(metrics[self.objective], step):
            with self._stops.shield():
                self._save("best")
            self._callbacks.save(step, self.path / "best")
        self._report(self._alarms.see_evaluation(step, metrics))
        hit("evaluated")
        self._stopped_by = self._callbacks.evaluation(step, metrics) or self._stopped_by
        self._alarms.check()

    def _report(self, raised: Sequence[RaisedAlarm]) -> None:
        """Write alarms down and show them, but for those that end the run: its error shows these."""
        for alarm in raised:
            if self._folder:
                self._folder.log_alarm(alarm)
            if alarm.alarm not in self._alarms.stop_on:
                self._display.note(alarm.text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_divided = holds_divided(self._state)
        are_all_here = error is not None and is_divided and all_stop(error)
        if error is not None and not are_all_here:
            ranks.give_up(error)
        try:
            if error is None:
                try:
                    self._finish()
                except BaseException as late:
                    if ranks.is_first() and not is_divided:
                        self._save_what_was_learned(late)
                    raise
            elif self.done and (are_all_here or ranks.is_first()):
                if are_all_here or not is_divided:
                    self._save_what_was_learned(error)
                else:
                    self._report_end(
                        error,
                        "the model is not saved, because the other ranks, which have shards of it, did not stop at "
                        "the same point; " + self._where_it_continues(),
                    )
            if isinstance(error, HeedfulError) and error.status != MachineError.status:
                error.status = max(error.status, TrainingError.status)  # the run had begun
        finally:
            self._stops.close()
            self._hook.remove()
            self._display.__exit__(kind, error, trace)
            self._close_folder(error)
            if ranks.is_first():
                for line in self._trackers.close(finished=error is None):
                    self._display.note(line)

    def _write(self, step: int, metrics: Numbers) -> None:
        if self._folder:
            self._folder.log(step, metrics)

    def _close_folder(self, error: BaseException | None) -> None:
        if self._folder:
            self._folder.close(error)

    def _finish(self) -> None:
        verdict = judge(self._yardstick, *self._shares) if self._yardstick and len(self._shares) == 2 else None
        self.summary |= {
            "steps": self.done,
            "stopped_early": self.done < self.total_steps,
            "stopped_by": self._stopped_by or self._out_of_patience(),
            "seconds": self._seconds(),
            "first_evaluation": dict(self._first_evaluation or {}),
            "last_evaluation": dict(self._last_evaluation),
            "best": {"step": self._stopping.best_step, self.objective: self._stopping.best},
            "verdict": verdict and verdict._asdict(),
            "last_step": dict(self._last_step),
            "alarms": [{"step": one.step, "alarm": one.alarm} for one in self._alarms.raised],
        }
        if self._folder:
            self._folder.finish(self.summary)
        hit("run.finished")

    def _report_end(self, error: BaseException, what_is_left: str) -> None:
        name = type(error).__name__
        if isinstance(error, KeyboardInterrupt):
            name = "Ctrl-C"
        elif isinstance(error, Terminated):
            name = signal.Signals(error.status - 128).name
        self._display.note(f"stopped by {name} after step {self.done} of {self.total_steps}; {what_is_left}")

    def _where_it_continues(self) -> str:
        last = self._last_checkpoint()
        return f"the run resumes from {last.name}" if last else "there is no checkpoint to resume from"

    def _last_checkpoint(self) -> Path | None:
        return self._folder.checkpoints[-1] if self._folder and self._folder.checkpoints else None

    def _save_what_was_learned(self, error: BaseException) -> None:
        again = "the same command"
        if self.config.overwrite:
            again += " without --overwrite"
        elif self.config.resume != "auto":
            again += " without --resume"
        try:
            if self._has_moved:
                name = f"checkpoints/step-{self.done + 1:06d}-partial"
                self._save(name)
                left = (
                    f"in the middle of an update; {self._where_it_continues()}, and the current model is "
                    f"{self.path / name}"
                )
            else:
                with self._stops.shield():
                    path = self._save_checkpoint(self.done)
                left = f"{again} resumes from {path}"
                if self._has_final:
                    left = f"the model is {self.path / 'final'}, and {again} does the rest"
        except Exception as second:  # such as a full disk: report the first error
            last = self._last_checkpoint()
            newest = f"; {last} is the newest one" if last else ""
            left = f"no checkpoint could be saved: {type(second).__name__}: {second}{newest}"
        self._report_end(error, left)

    def _save_if_due(self, step: int) -> None:
        """Write a checkpoint if it is due. A full disk does not end the run: the next due checkpoint is tried again."""
        minutes = (time.monotonic() - self._last_saved) / 60
        by_time = ranks.broadcast(0 < self.config.save_minutes <= minutes and step < self.total_steps)
        if step == 0 or not (by_time or (self.config.save_every and step % self.config.save_every == 0)):
            return
        self._last_saved = time.monotonic()
        with self._stops.shield():
            try:
                path = self._save_checkpoint(step)
            except OSError as error:
                self._display.note(
                    f"step {step}: the checkpoint could not be written: {error}; the run continues without it"
                )
                return
        self._callbacks.save(step, path)

    def _save(self, name: str) -> None:
        """Write the model to a subfolder on rank 0, after gathering shards. Collective."""
        model = self.learner.unsharded()
        if self._folder:
            with ranks.alone():
                self._folder.save(model, name, self._save_dtype)

    def _save_checkpoint(self, step: int) -> Path:
        """Write a checkpoint of a step on rank 0, unless it exists; every rank writes its shards. Collective."""
        is_divided = holds_divided(self._state)
        path = checkpoint_path(self.path, step)
        is_there = is_divided and ranks.broadcast(path.exists())
        if is_divided and not is_there:
            write_parts_of(self.path, step, self._state)
        model = self.learner if is_there else self.learner.unsharded()
        if self._folder:
            with ranks.alone():
                self._folder.save_checkpoint(step, model, self._state)
        return path

    def _save_final(self) -> None:
        if not self._has_final:
            with self._stops.shield():
                self._save("final")
                self._has_final = True
                if self._folder:
                    drop_replaced(self.path)
            self._callbacks.save(self.done, self.path / "final")


def _in_words(fact: Any) -> str:
    """A fact of the summary without the signs of JSON."""
    if isinstance(fact, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_in_words(value)}" for name, value in fact.items())
    if isinstance(fact, list):
        return ", ".join(map(_in_words, fact))
    return f"{fact:,.4g}" if isinstance(fact, float) else f"{fact:,}" if isinstance(fact, int) else str(fact)
