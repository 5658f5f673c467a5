"""What a run's folder says of it, for the page: metrics, samples, alarms, settings, what it was made from."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.apps.plot.healthy import HEALTHY, Band
from heedful.apps.plot.run_metrics import RunCurves, read_algorithm, read_lines, read_run, short_names
from heedful.configs.parse import plain_value
from heedful.configs.trainers import TRAINERS
from heedful.errors import CheckpointError, DataError
from heedful.files import read_object
from heedful.lock import is_locked
from heedful.training.alarms import FILE as ALARMS_FILE
from heedful.training.alarms import RaisedAlarm
from heedful.training.provenance import MUTABLE_ON_RESUME

MODELS = ("final", "best")
"""Folders of a run that later runs start from."""
MOST_PARENTS = 20
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
    """As config.yaml has them."""
    facts: Mapping[str, Any]
    """environment.json."""
    notes: tuple[str, ...]
    """What was left out, a sentence each."""

    @property
    def name(self) -> str:
        return self.curves.name

    @property
    def last_step(self) -> int:
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
    state = "finished" if (folder / "summary.json").exists() else "unfinished"
    if is_locked(folder):
        state = "running"
    alarms, torn_alarms = read_lines(folder / ALARMS_FILE)
    samples, torn_samples = read_lines(folder / "samples.jsonl")
    torn = {
        "metrics.jsonl": curves.is_torn,
        ALARMS_FILE: torn_alarms,
        "samples.jsonl": torn_samples,
    }
    return RunRecord(
        folder=folder,
        algorithm=read_algorithm(folder),
        state=state,
        curves=curves,
        samples=[sample for sample in samples if isinstance(sample.get("step"), int) and "response" in sample],
        alarms=[_alarm(line, folder) for line in alarms],
        settings=read_object(folder / "config.yaml", REMEDY),
        facts=facts,
        notes=tuple(
            f"The last line of {log} is only half-written and is left out." for log, is_torn in torn.items() if is_torn
        ),
    )


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
        points = run.curves.points(metric)
        outside = [(step, value) for step, value in points if band.excess(value)]
        if outside:
            worst_step, worst = max(outside, key=lambda point: band.excess(point[1]))
            first = int(outside[0][0])
            found.append(Departure(metric, band, first, len(outside), len(points), worst, int(worst_step)))
    return found


def seconds_until(run: RunRecord, step: int) -> float | None:
    """Seconds of training up to and with a step: the sum of its logged times; None if there are none."""
    spent = [
        sum(line.get(name, 0.0) for name in ("time/rollout", "time/score", "time/update"))
        for line in run.curves.metrics
        if line["step"] <= step
    ]
    return sum(spent) if any(spent) else None
