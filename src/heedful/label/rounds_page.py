"""What the page of rounds shows, read from a project's folder: curves, agreement, win rates, ten answers of each round.

Torch-free: it reads what ``heedful round`` writes (`heedful.rounds.notes` describes the files).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.errors import DataError
from heedful.files import read_object, read_record

MOST_POINTS = 200
"""Points of a curve; of a longer one, so many are shown, evenly spaced, with its first and last."""
COUNTED = "numbers.json"
"""The file beside a round's labels that has the numbers of the step ``label``."""
ROUND = ("settings", "steps")
"""Keys of a round.json that must be there."""
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
"""By the beginning of a run's folder: the name of a curve, its metric, and its unit."""


def rounds_of(project: Path) -> dict[str, Any]:
    """Return what the page shows, ready for JSON. Raises DataError for a damaged file.

    ``rounds`` has one object per round, the first one first:

    - ``round``; ``step``: what is next, null if it is finished; ``settings``
    - ``sample``, ``label``, ``reward``, ``ppo``, ``evaluate``: the notes of these steps, null until they are done, without
      ``items``, ``samples`` and ``statistics``
    - ``agreement``: that of people about this round's pairs (`heedful.label.statistics`), or null
    - ``curves``: of each run (``reward``, ``reward-1``, ``ppo``) a list of {``name``, ``metric``, ``unit``, ``points``:
      [[step, value], ...]}
    - ``answers``: ten objects with ``prompt``, ``response``, ``score``, ``previous``, ``previous_score``, and ``judge`` and
      ``previous_judge`` if there is a judge

    ``across`` has what changes from round to round, each a list with one value per round, or null: ``labels`` (all so far),
    ``accuracy``, ``win_rate``, ``judge``, ``judge_win_rate``, ``kl``, ``agreement``.
    """
    state = read_noted(project / "rounds.json", "rounds", "settings")
    began = 0 if state is None else int(state["rounds"])
    rounds = [_round(project / "rounds" / str(number), number) for number in range(1, began + 1)]
    return {"rounds": rounds, "across": _across(rounds)}


def trained_on(project: Path) -> tuple[int, frozenset[int]]:
    """Return the number of the last event that a round has trained on, and the rounds that have trained and say no number.

    Raises DataError for a damaged file.
    """
    state = read_noted(project / "rounds.json", "rounds", "settings")
    last, silent = 0, set()
    for number in range(1, (0 if state is None else int(state["rounds"])) + 1):
        folder = project / "rounds" / str(number)
        note = read_noted(folder / "labels" / COUNTED)
        if note is None:
            note = (read_noted(folder / "round.json", *ROUND) or {"steps": {}})["steps"].get("label")
        if note is not None and "events" not in note:
            silent.add(number)
        last = max(last, (note or {}).get("events", 0))
    return last, frozenset(silent)


def _round(folder: Path, number: int) -> dict[str, Any]:
    notes = read_noted(folder / "round.json", *ROUND) or {"settings": {}, "steps": {}}
    steps = notes["steps"]
    statistics = steps.get("label", {}).get("statistics") or {}
    return {
        "round": number,
        "step": next((name for name in STEPS if name not in steps), None),
        "settings": notes["settings"],
        **{name: _without(steps.get(name), "samples", "statistics", "items") for name in STEPS},
        "agreement": (statistics.get("agreement") or {}).get("pair"),
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

    new_labels = each("label", "pairs")
    return {
        "labels": [None if count is None else sum(new_labels[: at + 1]) for at, count in enumerate(new_labels)],
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


def _without(note: Mapping[str, Any] | None, *names: str) -> dict[str, Any] | None:
    return None if note is None else {name: value for name, value in note.items() if name not in names}


def _curves(run: Path) -> list[dict[str, Any]]:
    lines = _metrics(run / "metrics.jsonl")
    kind = run.name.partition("-")[0]
    found = []
    for name, metric, unit in CURVES.get(kind, ()):
        points = [[line["step"], line[metric]] for line in lines if _is_number(line.get(metric))]
        if points:
            found.append({"name": name, "metric": metric, "unit": unit, "points": _thinned(points)})
    return found


def _thinned(points: list[Any]) -> list[Any]:
    if len(points) <= MOST_POINTS:
        return points
    return [points[round(at * (len(points) - 1) / (MOST_POINTS - 1))] for at in range(MOST_POINTS)]


def _metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics; a run that is being written may end in half of one."""
    records = map(read_record, path.read_bytes().split(b"\n"))
    return [record for record in records if record is not None and _is_number(record.get("step"))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_noted(path: Path, *needs: str) -> dict[str, Any] | None:
    """What a round has written into a JSON file; None if there is none. Raises DataError for a damaged one.

    ``needs`` are keys that must be there.
    """
    if not path.exists():
        return None
    remedy = "restore it, or remove it to begin its round anew"
    content = read_object(path, remedy, needs=needs, error=DataError)
    for name, note in (content.get("steps") or {}).items():
        if not isinstance(note, dict):
            raise DataError(f"{path}: the step {name} is no object; {remedy}")
    return content
