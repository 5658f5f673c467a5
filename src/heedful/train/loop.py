"""The loop of every trainer: step, log, sample, evaluate, save, stop. What a step does is the trainer's business."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.configs.options import RunOptions, TrainingOptions
from heedful.display import Display
from heedful.errors import ConfigError
from heedful.files import complete_or_absent
from heedful.train.optimization import Patience
from heedful.train.run_folder import RunFolder

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Trainer:
    """What one algorithm does in the loop."""

    step: Callable[[int], Numbers]
    """Do step i (from 0) and return its metrics."""
    save: Callable[[Path], None]
    """Write the model to a folder."""
    evaluate: Callable[[], Numbers] | None
    """Metrics on held-out data; None where there is none."""
    samples: Callable[[], Sequence[Mapping[str, Any]]]
    """Rows for the table of samples."""
    objective: str
    """The metric of ``evaluate`` that decides which model is best."""
    higher_is_better: bool
    note: Callable[[Numbers], str | None] = lambda _: None
    """What to tell of a step with these metrics, if anything; the same text is told once."""


def run(
    trainer: Trainer,
    config: TrainingOptions,
    *,
    algorithm: str,
    total_steps: int,
    shown: Mapping[str, str],
    parents: Sequence[str],
    facts: Mapping[str, Any],
    notes: Sequence[str] = (),
    more_data: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a trainer in a run folder of its own and return what summary.json holds.

    ``shown`` are the metrics of the progress bar, ``parents`` the models the run starts from, ``facts`` what is known before
    it starts and belongs into the summary, such as the counts of records, ``more_data`` the files it reads besides the
    data.

    Raises ConfigError where the run would stop early by evaluations that it cannot make.
    """
    if config.patience and trainer.evaluate is None:
        raise ConfigError("--patience counts evaluations, but nothing is held out: set --eval-fraction or --eval-data")
    data_files = [path for path in (config.data, config.eval_data, *more_data) if path]
    with (
        RunFolder(config, algorithm, data=data_files, models=parents) as folder,
        Display(algorithm, total_steps, shown) as display,
    ):
        for note in (*(f"{name}: {fact}" for name, fact in facts.items()), *notes):
            display.note(note)
        outcome = _loop(trainer, config, total_steps=total_steps, folder=folder, display=display)
        summary = {"algorithm": algorithm, **facts, **outcome}
        folder.finish(summary)
    return summary


def _loop(
    trainer: Trainer, config: RunOptions, *, total_steps: int, folder: RunFolder, display: Display
) -> dict[str, Any]:
    """Run the steps: how many, why it stopped, first, best and last evaluation.

    The model is evaluated before the first step, every ``eval_every`` steps and after the last; ``best/`` holds the best
    of these and ``final/`` the last.
    """
    started = time.perf_counter()
    patience = Patience(config.patience, higher_is_better=trainer.higher_is_better)
    first = last_evaluation = _evaluate(trainer, 0, patience, folder, display)
    metrics: Numbers = {}
    told: set[str] = set()
    done = 0
    for done in range(1, total_steps + 1):
        metrics = trainer.step(done - 1)
        folder.log(done, metrics)
        display.update(done, metrics)
        note = trainer.note(metrics)
        if note is not None and note not in told:
            told.add(note)
            display.note(f"step {done}: {note}")
        if config.sample_every and _due(done, config.sample_every, total_steps):
            _show_samples(trainer, done, folder, display)
        if _due(done, config.eval_every, total_steps):
            last_evaluation = _evaluate(trainer, done, patience, folder, display)
        if config.save_every and done % config.save_every == 0:
            _save(trainer, folder.path / "checkpoints" / f"step-{done:06d}")
        if patience.exhausted:
            display.note(f"stopped at step {done}: {config.patience} evaluations in a row without improvement")
            break
    _save(trainer, folder.path / "final")
    return {
        "steps": done,
        "stopped_early": done < total_steps,
        "seconds": round(time.perf_counter() - started, 2),
        "first_evaluation": dict(first),
        "last_evaluation": dict(last_evaluation),
        "best": {"step": patience.best_step, trainer.objective: patience.best},
        "last_step": dict(metrics),
    }


def _due(step: int, every: int, total_steps: int) -> bool:
    """Every so many steps, and at the last one."""
    return step == total_steps or (every > 0 and step % every == 0)


def _save(trainer: Trainer, path: Path) -> None:
    with complete_or_absent(path) as partial:
        trainer.save(partial)


def _evaluate(trainer: Trainer, step: int, patience: Patience, folder: RunFolder, display: Display) -> Numbers:
    if trainer.evaluate is None:
        return {}
    metrics = trainer.evaluate()
    folder.log(step, metrics)
    display.note(f"step {step}: " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    if patience.update(metrics[trainer.objective], step):
        _save(trainer, folder.path / "best")
    return metrics


def _show_samples(trainer: Trainer, step: int, folder: RunFolder, display: Display) -> None:
    rows = trainer.samples()
    if rows:
        folder.log_samples(step, rows)
        display.table(f"step {step}", rows)
