"""Read the metrics of runs from folders, trainers' results, and tables; matplotlib-free."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from heedful.apps.plot.panels import panels_of, panels_of_table
from heedful.configs.trainers import Panel
from heedful.errors import CheckpointError, ConfigError, DataError
from heedful.files import read_object

if TYPE_CHECKING:
    import pandas

    from heedful.training.result import TrainingResult

COMMAND = re.compile(r"heedful ([a-z0-9]+(?:-[a-z0-9]+)*)")
Run = Union[str, Path, "TrainingResult", "pandas.DataFrame", Sequence[Mapping[str, float]]]
"""A run's folder, a trainer's result, a table of metrics, or a list with the metrics of each step."""


@dataclass(frozen=True)
class RunCurves:
    """The drawn part of a run."""

    name: str
    """Name in the legend."""
    panels: tuple[Panel, ...]
    metrics: Sequence[Mapping[str, float]]
    """Lines of metrics.jsonl; each has a ``step``."""

    is_torn: bool = False
    """Whether the last line of its metrics.jsonl is only half-written."""

    def points(self, metric: str | None) -> list[tuple[float, float]]:
        """Return the steps at which a metric was logged, with its values. A value that was not finite is NaN."""
        return [(line["step"], line[metric]) for line in self.metrics if metric is not None and metric in line]


def runs_of(runs: Any, names: Sequence[str] | None) -> list[RunCurves]:
    """Return one run, several in a list, or several by their names, for drawing.

    Raises ConfigError if there are none, or not one name per run; CheckpointError and DataError as `read_run`.
    """
    if isinstance(runs, Mapping):
        names, runs = list(runs) if names is None else names, list(runs.values())
    elif not isinstance(runs, list | tuple) or (runs and isinstance(runs[0], Mapping)):
        runs = [runs]
    if not runs:
        raise ConfigError("plot.curves: runs is empty; give at least one run, such as 'runs/ppo'")
    if names is not None and len(names) != len(runs):
        raise ConfigError(f"plot.curves: names has length {len(names)} for {len(runs)} runs; give one name per run")
    places = [run if isinstance(run, str | Path) else getattr(run, "folder", None) for run in runs]
    folders = [None if place is None else Path(place) for place in places]
    shown = names or names_of(folders)
    return [
        read_run(folder, name) if folder is not None else read_table(run, name)
        for run, folder, name in zip(runs, folders, shown, strict=True)
    ]


def names_of(folders: Sequence[Path | None]) -> list[str]:
    """Return a name for each run: that of its folder (`short_names`), or the number of a table."""
    short = iter(short_names([folder for folder in folders if folder is not None]))
    return [f"run {number}" if folder is None else next(short) for number, folder in enumerate(folders, 1)]


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' paths without the parts that all of them start with; the last part of each always stays."""
    paths = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return [path.relative_to(shared).as_posix() for path in paths]


def read_run(folder: Path, name: str) -> RunCurves:
    """Read the algorithm and the metrics of a run folder. ``name`` is the run's name in the legend.

    Raises CheckpointError if the folder is not a run, does not name its algorithm, or has not logged a step yet, and
    DataError if a line of metrics.jsonl is damaged.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        inside = sorted(str(below.parent) for below in folder.glob("*/metrics.jsonl"))
        beside = str(folder.parent) if (folder.parent / "metrics.jsonl").is_file() else ""
        hint = f"; did you mean {' '.join(inside) or beside}?" if inside or beside else ""
        state = "is not a run: it has no metrics.jsonl" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"--runs: {folder} {state}{hint}")
    algorithm = read_algorithm(folder)
    panels, (metrics, is_torn) = panels_of(algorithm), read_lines(path, metrics=True)
    if not any(panel.training in line for panel in panels for line in metrics):
        raise CheckpointError(f"--runs: {path} has nothing to draw: no step of {algorithm} is logged in it yet")
    return RunCurves(name, panels, metrics, is_torn)


def read_table(table: Any, name: str) -> RunCurves:
    """Read a table of metrics: a `pandas.DataFrame` with steps as its index, or a list with a dict per step.

    A dict may have a ``step``; otherwise steps are counted from 1. Raises ConfigError if there is no number in it.
    """
    rows = table
    if hasattr(table, "to_dict"):
        filled = table.astype(object).where(table.notna(), None)
        rows = [
            {"step": step, **{k: v for k, v in row.items() if v is not None}}
            for step, row in zip(table.index.tolist(), filled.to_dict("records"), strict=True)
        ]
    metrics = [{"step": number, **row} for number, row in enumerate(rows, 1)]
    logged = {metric for row in metrics for metric in row} - {"step"}
    if not logged:
        raise ConfigError("plot.curves: the table of metrics is empty; give at least one step with one metric")
    return RunCurves(name, panels_of_table(logged), metrics)


def read_algorithm(folder: Path) -> str:
    """Return the algorithm named in a run folder's environment.json. Raises CheckpointError if there is none."""
    path = folder / "environment.json"
    form = (
        "it names the algorithm that ran: copy it from the original run, or write "
        '{"command": "heedful ALGORITHM"}, such as heedful ppo'
    )
    command = read_object(path, form, needs=["command"])["command"]
    named = COMMAND.fullmatch(command)
    if not named:
        raise CheckpointError(f"{path} does not name an algorithm: got {command!r:.80}; {form}")
    return named[1]


def read_lines(path: Path, *, metrics: bool = False) -> tuple[list[dict[str, Any]], bool]:
    """Return the objects of a log of JSON Lines, none without the file, and whether its last line is only half-written.

    Of ``metrics`` each has a step, and only numbers; null, written for a number that is not finite, becomes NaN.

    Raises DataError for another damaged line.
    """
    records = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8", "replace"))
            if not isinstance(record, dict):
                raise TypeError("no object")
            records.append(_numbers(record) if metrics else record)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError):
                return records, True  # the run goes on, or was killed
            wanted = "an object of numbers with a step" if metrics else "a JSON object"
            shown = line.decode("utf-8", "backslashreplace")
            raise DataError(
                f"{path}:{number} is damaged: expected {wanted}, got {shown:.80}; delete the line to see the rest"
            ) from error
    return records, False


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    if any(type(value) not in (int, float, type(None)) for value in record.values()):
        raise TypeError("not a number")  # true, or a number as text
    int(record["step"])
    return {name: math.nan if value is None else float(value) for name, value in record.items()}
