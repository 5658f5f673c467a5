"""Data of the rounds page, read from a project's folder: curves, agreement, win rates, ten answers of each round.

Torch-free: it reads the files of ``heedful round`` (described in `heedful.apps.rounds.round`).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.errors import DataError
from heedful.files import read_object, read_record

MOST_POINTS = 200
"""Most points of a curve; a longer one is thinned evenly, with its first and last point."""
COUNTED = "numbers.json"
"""The file with the numbers of the step ``label``, beside a round's labels."""
REMEDY = "restore it, or remove it to begin its round again"
STEPS = ("sample", "label", "reward", "ppo", "evaluate")
CURVES: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "reward": (
        ("accuracy", "reward/accuracy", "share of pairs"),
        ("accuracy, held out", "eval/accuracy", "share of pairs"),
    ),
    "ppo": (
        ("score", "reward/score_mean", "mean score per response"),
        ("score, held out", "eval/score_mean", "mean score per response"),
        ("KL to the first policy", "reference/kl", "nats per response"),
        ("length", "rollout/response_length", "tokens per response"),
    ),
}
"""Curves by the prefix of a run's folder: name, metric, unit."""


def rounds_of(project: Path) -> dict[str, Any]:
    """Return the data of the page, ready for JSON. Raises DataError for a damaged file.

    ``rounds`` has one object per round, the first one first:

    - ``round``; ``step``: the next one, null if finished; ``settings``
    - ``sample``, ``label``, ``reward``, ``ppo``, ``evaluate``: the notes of these steps, null until they are done, without
      ``items``, ``samples`` and ``statistics``
    - ``agreement``: of people on this round's pairs (`heedful.apps.label.statistics`), or null
    - ``curves``: for each run (``reward``, ``reward-1``, ``ppo``) a list of {``name``, ``metric``, ``unit``, ``points``:
      [[step, value], ...]}
    - ``answers``: ten objects with ``prompt``, ``response``, ``score``, ``previous``, ``previous_score``, and ``judge`` and
      ``previous_judge`` if there is a judge

    ``across`` has lists with one value (or null) per round: ``labels`` (all so far),
    ``accuracy``, ``win_rate``, ``judge``, ``judge_win_rate``, ``kl``, ``agreement``.
    """
    rounds = [_round(project / "rounds" / str(number), number) for number in range(1, last_round(project) + 1)]
    return {"rounds": rounds, "across": _across(rounds)}


def trained_on(project: Path) -> int:
    """Return the number of the last event used in training; 0 before any. Raises DataError for a damaged file."""
    files = project.glob(f"rounds/*/labels/{COUNTED}")
    return max((read_object(path, REMEDY, needs=["events"], error=DataError)["events"] for path in files), default=0)


def last_round(project: Path) -> int:
    """The number of the last round that has begun; 0 if there is none."""
    return next(n for n in itertools.count() if not (project / "rounds" / str(n + 1) / "round.json").exists())


def _round(folder: Path, number: int) -> dict[str, Any]:
    notes = read_notes(folder)
    steps = notes["steps"]
    return {
        "round": number,
        "step": next((name for name in STEPS if name not in steps), None),
        "settings": notes["settings"],
        **{name: _shown(steps.get(name)) for name in STEPS},
        "agreement": _at(steps, ("label", "statistics", "agreement", "pair")),
        "curves": {
            run.name: curves
            for run in sorted(folder.glob("*"))
            if (run / "metrics.jsonl").is_file() and (curves := _curves(run))
        },
        "answers": steps.get("evaluate", {}).get("samples", []),
    }


def _across(rounds: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    def each(step: str, *path: str) -> list[Any]:
        return [_at(one.get(step), path) for one in rounds]

    new_labels = [count if _is_number(count) else None for count in each("label", "pairs")]
    so_far = itertools.accumulate(count or 0 for count in new_labels)
    return {
        "labels": [None if count is None else total for count, total in zip(new_labels, so_far, strict=True)],
        "accuracy": each("reward", "accuracy"),
        "win_rate": each("evaluate", "over_previous", "win_rate"),
        "judge": each("evaluate", "judge_over_previous", "score_mean"),
        "judge_win_rate": each("evaluate", "judge_over_previous", "win_rate"),
        "kl": each("evaluate", "kl"),
        "agreement": each("agreement", "share", "value"),
    }


def _at(content: Any, path: Sequence[str]) -> Any:
    for name in path:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def _shown(note: Mapping[str, Any] | None) -> dict[str, Any] | None:
    hidden = ("samples", "statistics", "items")
    return None if note is None else {name: value for name, value in note.items() if name not in hidden}


def _curves(run: Path) -> list[dict[str, Any]]:
    """The curves of a run, from the complete lines of its metrics; the last may still be written."""
    records = map(read_record, (run / "metrics.jsonl").read_bytes().split(b"\n"))
    lines = [record for record in records if record is not None and _is_number(record.get("step"))]
    found = []
    for name, metric, unit in CURVES.get(run.name.partition("-")[0], ()):
        points = [[line["step"], line[metric]] for line in lines if _is_number(line.get(metric))]
        if len(points) > MOST_POINTS:
            points = [points[round(at * (len(points) - 1) / (MOST_POINTS - 1))] for at in range(MOST_POINTS)]
        if points:
            found.append({"name": name, "metric": metric, "unit": unit, "points": points})
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_notes(folder: Path) -> dict[str, Any]:
    """The content of a round's round.json. Raises DataError for a damaged one."""
    path = folder / "round.json"
    content = read_object(path, REMEDY, needs=("settings", "before", "steps"), error=DataError)
    for name, note in content["steps"].items():
        if not isinstance(note, dict):
            raise DataError(f"{path}: the step {name} must be an object; {REMEDY}")
    return content
