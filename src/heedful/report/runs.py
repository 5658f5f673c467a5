"""What a run's folder says of it, for the page: metrics, samples, alarms, settings, what it was made from."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.configs.parse import plain_value
from heedful.configs.trainers import TRAINERS
from heedful.errors import CheckpointError, DataError
from heedful.files import read_object
from heedful.files import read_record as parsed
from heedful.lock import is_locked
from heedful.plot.healthy import HEALTHY, Band
from heedful.plot.run_metrics import RunCurves, read_algorithm, read_run, short_names
from heedful.training.alarms import FILE as ALARMS_FILE
from heedful.training.alarms import RaisedAlarm
from heedful.training.provenance import MUTABLE_ON_RESUME

MODELS = ("final", "best")
"""Folders of a run that later runs start from."""
MOST_PARENTS = 20
ROUNDING = 1e-6
REMEDY = "bring it back, or leave this run out"


@dataclass(frozen=True)
class Parent:
    """A model that a run started from."""

    setting: str
    model: str
    digest: str
    """Its SHA-256 sum or its revision on the Hub when the run began; empty if nobody wrote it down."""
    algorithm: str
    """What trained it; empty if its run is not here."""
    depth: int
    """1 for the run's own, 2 for what that was made from, and so on."""


@dataclass(frozen=True)
class RunRecord:
    """A run as the page shows it."""

    folder: Path
    algorithm: str
    state: str
    """finished, running, or unfinished."""
    curves: RunCurves
    samples: Sequence[Mapping[str, Any]]
    alarms: Sequence[RaisedAlarm]
    settings: Mapping[str, Any]
    """As config.yaml has them; empty if the run is of a version that wrote none."""
    facts: Mapping[str, Any]
    """environment.json."""
    notes: tuple[str, ...]
    """What is missing or was left out, a sentence each."""

    @property
    def name(self) -> str:
        """The run's name beside others."""
        return self.curves.name

    @property
    def last_step(self) -> int:
        """The last step that is logged."""
        return int(max((line["step"] for line in self.curves.metrics), default=0))


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read run folders, also of runs that go on or were cut short. A torn last line of a log is left out.

    Raises CheckpointError if a folder is no run or a file of it is unusable, DataError if a line of a log is damaged.
    """
    return [read_record(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]


def read_record(folder: Path, name: str) -> RunRecord:
    """Read one run (`read_runs`)."""
    curves = read_run(folder, name)
    facts = read_object(folder / "environment.json", REMEDY)
    notes = []
    settings: dict[str, Any] = {}
    if (folder / "config.yaml").exists():
        settings = read_object(folder / "config.yaml", REMEDY)
    else:
        notes.append("The settings are not known: there is no config.yaml.")
    state = "finished" if (folder / "summary.json").exists() else "unfinished"
    if is_locked(folder):
        state = "running"
    alarms, torn_alarms = read_lines(folder / ALARMS_FILE)
    samples, torn_samples = read_lines(folder / "samples.jsonl")
    torn = {
        "metrics.jsonl": _ends_torn(folder / "metrics.jsonl"),
        ALARMS_FILE: torn_alarms,
        "samples.jsonl": torn_samples,
    }
    for name_of_log, is_torn in torn.items():
        if is_torn:
            notes.append(f"The last line of {name_of_log} is only half-written and is left out.")
    return RunRecord(
        folder=folder,
        algorithm=read_algorithm(folder),
        state=state,
        curves=curves,
        samples=[sample for sample in samples if isinstance(sample.get("step"), int) and "response" in sample],
        alarms=[_alarm(line, folder) for line in alarms],
        settings=settings,
        facts=facts,
        notes=tuple(notes),
    )


def read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the objects of a log of JSON Lines, none if there is no file, and whether its last line was torn.

    Raises DataError if another line holds no object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], False
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return records, True
            shown = line[:80].decode("utf-8", "backslashreplace")
            raise DataError(
                f"{path}:{number} is damaged: expected a JSON object, got {shown}; delete the line to see the rest"
            ) from error
        records.append(record)
    return records, False


def _ends_torn(path: Path) -> bool:
    last = path.read_bytes().rpartition(b"\n")[2]
    return bool(last.strip()) and parsed(last) is None


def _alarm(line: Mapping[str, Any], folder: Path) -> RaisedAlarm:
    step, name = line.get("step"), line.get("alarm")
    if not isinstance(step, int) or not isinstance(name, str):
        raise DataError(f"{folder / ALARMS_FILE}: a line has no step or no alarm: {line!r:.80}; delete the line")
    evidence = line.get("evidence")
    return RaisedAlarm(step, name, str(line.get("message", "")), evidence if isinstance(evidence, dict) else {})


# Settings and lineage ---------------------------------------------------------------------------------------------------


def changed_settings(run: RunRecord) -> dict[str, tuple[Any, Any]]:
    """Settings of a run that are not at the default of this version, each with the default; None for those without one."""
    trainer = TRAINERS.get(run.algorithm)
    fields = {} if trainer is None else {field.name: field for field in dataclasses.fields(trainer.settings())}
    found = {}
    for name, value in run.settings.items():
        if name in MUTABLE_ON_RESUME:
            continue
        if name not in fields:
            found[name] = (value, None)
            continue
        default = fields[name].default
        default = None if default is dataclasses.MISSING else plain_value(default)
        if value != default:
            found[name] = (value, default)
    return found


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Settings whose values differ between runs, with the value of each; None for a run without it."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in MUTABLE_ON_RESUME)
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: each for name, each in values.items() if any(one != each[0] for one in each)}


def parents_of(run: RunRecord) -> list[Parent]:
    """Ancestor models of a run, as far as their runs are found on this machine."""
    return list(_parents(run.settings, run.facts, depth=1))


def _parents(settings: Mapping[str, Any], facts: Mapping[str, Any], depth: int) -> Sequence[Parent]:
    digests = {**_mapping(facts.get("models")), **_mapping(facts.get("revisions"))}
    named: dict[str, Any] = {"model": settings.get("model"), "reference": settings.get("reference")}
    rewards = settings.get("rewards")
    for reward in rewards if isinstance(rewards, list) else ():
        kind, _, model = str(reward).partition(":")
        if kind == "model":
            named[f"reward {model}"] = model
    found: list[Parent] = []
    for setting, model in named.items():
        if not isinstance(model, str) or not model:
            continue
        run, algorithm, inherited = Path(model).parent, "", list[Parent]()
        if Path(model).name in MODELS and depth < MOST_PARENTS:
            with contextlib.suppress(CheckpointError):  # a parent that is damaged or gone says nothing
                own = read_object(run / "environment.json", REMEDY)
                algorithm = read_algorithm(run)
                inherited = list(_parents(read_object(run / "config.yaml", REMEDY), own, depth + 1))
        label = "reward" if setting.startswith("reward ") else setting
        found += [Parent(label, model, str(digests.get(model, "")), algorithm, depth), *inherited]
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


# What left its band -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Departure:
    """A metric of a run that left its healthy values."""

    metric: str
    band: Band
    first: int
    """The first step outside."""
    count: int
    steps: int
    """Steps outside, of how many."""
    worst: float
    worst_step: int


def departures(run: RunRecord) -> list[Departure]:
    """The metrics of a run that left their healthy bands (`heedful.plot.HEALTHY`)."""
    found = []
    for metric, band in HEALTHY.items():
        steps, values = run.curves.points(metric)
        outside = [(step, value) for step, value in zip(steps, values, strict=True) if is_outside(value, band)]
        if outside:
            worst_step, worst = max(outside, key=lambda point: _distance(point[1], band))
            first = int(outside[0][0])
            found.append(Departure(metric, band, first, len(outside), len(steps), worst, int(worst_step)))
    return found


def is_outside(value: float, band: Band) -> bool:
    """Whether a value is outside a band, by more than rounding; one that is not finite is."""
    return _distance(value, band) > ROUNDING


def _distance(value: float, band: Band) -> float:
    if not math.isfinite(value):
        return math.inf
    below = 0.0 if band.low is None else max(0.0, band.low - value)
    above = 0.0 if band.high is None else max(0.0, value - band.high)
    return below + above


def seconds_until(run: RunRecord, step: int) -> float | None:
    """Seconds of training up to and with a step: the sum of its logged times; None if there are none."""
    spent = [
        sum(line.get(name, 0.0) for name in ("time/rollout", "time/score", "time/update"))
        for line in run.curves.metrics
        if line["step"] <= step
    ]
    return sum(spent) if any(spent) else None
