"""A run: its folder, its display, its evaluations, and what is left of it however it ends.

with Run(config, learner, "sft", steps, ...) as run:
    run.evaluate(0, evaluate(...))
    for step in run.steps():
        run.log(step, learn(...))
        run.save(step)
        if run.samples_due(step):
            run.show_samples(step, ...)
        if run.evaluation_due(step):
            run.evaluate(step, evaluate(...))
return run.summary
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from heedful.configs.options import TrainingOptions
from heedful.display import Display
from heedful.errors import ConfigError
from heedful.files import complete_or_absent
from heedful.train.patience import Patience
from heedful.train.run_folder import RunFolder

Numbers = Mapping[str, float]


class Saves(Protocol):
    """What a run saves: a learner."""

    def save(self, folder: Path) -> None:
        """Write the model to a folder."""


class Run:
    """An open run. As a context manager it ends well or leaves a usable model.

    ``final/`` is written right after the last step, before anything that may still fail. If the run ends early after its
    first step, by an exception, Ctrl-C or a request to terminate, what was learned so far is saved under ``checkpoints/``
    and the display says where. If it fails before its first step, the folder is as it was before.

    Args:
        config: the settings; its ``output`` is the folder.
        learner: what is saved.
        algorithm: the command's name.
        total_steps: optimizer steps (rollout batches for online algorithms) if nothing stops it early.
        objective: the metric of the evaluations that decides which model is best.
        higher_is_better: whether it should rise.
        shown: metrics of the progress bar, with their labels.
        parents: the models that the run starts from; their hashes are written down.
        facts: what is known before the run and belongs in its summary, such as counts of records.
        notes: further lines to show at the start.
        more_data: files that the run reads besides ``data`` and ``eval_data``.
        can_evaluate: whether anything is held out.

    Raises ConfigError if the run would stop early by evaluations that it cannot make, or the folder cannot be used.
    """

    def __init__(
        self,
        config: TrainingOptions,
        learner: Saves,
        algorithm: str,
        total_steps: int,
        *,
        objective: str,
        higher_is_better: bool,
        shown: Mapping[str, str],
        parents: Sequence[str],
        facts: Mapping[str, Any],
        notes: Sequence[str] = (),
        more_data: Sequence[str] = (),
        can_evaluate: bool,
    ) -> None:
        if config.patience and not can_evaluate:
            raise ConfigError(
                "--patience counts evaluations, but nothing is held out: set --eval-fraction or --eval-data"
            )
        self.config, self.learner, self.total_steps, self.objective = config, learner, total_steps, objective
        self.summary: dict[str, Any] = {"algorithm": algorithm, **facts}
        self.done = 0
        self._patience = Patience(config.patience, higher_is_better=higher_is_better)
        self._evaluations: list[Numbers] = []
        self._last_step: Numbers = {}
        self._has_final = False
        self._suppressed: set[str] = set()
        data = [path for path in (config.data, config.eval_data, *more_data) if path]
        self._display = Display(algorithm, total_steps, shown)
        self._opening = [*(f"{name}: {fact}" for name, fact in facts.items()), *notes]
        self._folder = RunFolder(config, algorithm, data=data, models=parents)  # last: from here on there is a run

    def __enter__(self) -> "Run":
        self._folder.__enter__()
        self._display.__enter__()
        for line in self._opening:
            self._display.note(line)
        self._started = time.perf_counter()
        return self

    def steps(self) -> Iterator[int]:
        """1, 2, ... up to the last step, or until evaluations stop improving."""
        for step in range(1, self.total_steps + 1):
            yield step
            if self._patience.exhausted and step < self.total_steps:
                self._display.note(
                    f"stopped at step {step}: {self.config.patience} evaluations in a row without improvement"
                )
                break
        self._save_final()

    def log(self, step: int, metrics: Numbers, *, note: str | None = None) -> None:
        """Write a step's metrics down and show them. ``note`` is an optional message; repeats are suppressed."""
        self.done, self._last_step = step, metrics
        self._folder.log(step, metrics)
        self._display.update(step, metrics)
        if note is not None and note not in self._suppressed:
            self._suppressed.add(note)
            self._display.note(f"step {step}: {note}")

    def save(self, step: int) -> None:
        """Write a checkpoint if one is due, and ``final/`` after the last step."""
        if self.config.save_every and step % self.config.save_every == 0:
            self._save("checkpoints", f"step-{step:06d}")
        if step == self.total_steps:
            self._save_final()

    def samples_due(self, step: int) -> bool:
        """True every ``sample_every`` steps and at the last one; never if that is 0."""
        return self.config.sample_every > 0 and self._due(step, self.config.sample_every)

    def evaluation_due(self, step: int) -> bool:
        """True every ``eval_every`` steps and at the last one."""
        return self._due(step, self.config.eval_every)

    def show_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show a table of samples and write it down."""
        if rows:
            self._folder.log_samples(step, rows)
            self._display.table(f"step {step}", rows)

    def evaluate(self, step: int, metrics: Numbers) -> None:
        """Write down metrics on held-out data, and keep the model as ``best/`` if no earlier one was better.

        Without metrics (nothing is held out) this does nothing.
        """
        if not metrics:
            return
        self._evaluations.append(metrics)
        self._folder.log(step, metrics)
        self._display.note(f"step {step}: " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        if self._patience.update(metrics[self.objective], step):
            self._save("best")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
            elif self.done and not self._has_final:
                self._save_what_was_learned(error)
            elif self._has_final:
                self._display.note(
                    f"the run was complete but for what follows its last step; its model is {self._final}"
                )
        finally:
            self._display.__exit__(kind, error, trace)
            self._folder.__exit__(kind, error, trace)

    def _finish(self) -> None:
        evaluations = self._evaluations or [{}]
        self.summary |= {
            "steps": self.done,
            "stopped_early": self.done < self.total_steps,
            "seconds": round(time.perf_counter() - self._started, 2),
            "first_evaluation": dict(evaluations[0]),
            "last_evaluation": dict(evaluations[-1]),
            "best": {"step": self._patience.best_step, self.objective: self._patience.best},
            "last_step": dict(self._last_step),
        }
        self._folder.finish(self.summary)

    def _save_what_was_learned(self, error: BaseException) -> None:
        name = f"step-{self.done:06d}-interrupted"
        reason = f"stopped by {type(error).__name__} after step {self.done} of {self.total_steps}"
        try:
            self._save("checkpoints", name)
        except Exception as second:  # a full disk, say: the first error is the one to report
            self._display.note(f"{reason}; the model could not be saved: {type(second).__name__}: {second}")
        else:
            self._display.note(f"{reason}; what was learned so far is in {self._folder.path / 'checkpoints' / name}")

    def _due(self, step: int, every: int) -> bool:
        return step == self.total_steps or (every > 0 and step % every == 0)

    @property
    def _final(self) -> Path:
        return self._folder.path / "final"

    def _save_final(self) -> None:
        if not self._has_final:
            self._save("final")
            self._has_final = True

    def _save(self, *names: str) -> None:
        with complete_or_absent(self._folder.path.joinpath(*names)) as partial:
            self.learner.save(partial)
