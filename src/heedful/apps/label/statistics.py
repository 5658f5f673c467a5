"""Statistics of a project's labels: on people, the page and the reward model (docs/labelling-statistics.md).

Agreement between people is by task (ratings and rankings contradict each other 60 % of the time: Bansal et al. 2023, arXiv
2308.15812). Statistics on the page or one person are over all tasks, each comparison counting once, and by task in
``by_task``. Hidden repeats, screening items, gold questions and imported labels are always kept separate.
"""

import dataclasses
import math
import statistics as numbers
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from heedful.apps.label.agreement import (
    agreements,
    cohen_kappa,
    fleiss_kappa,
    krippendorff_alpha,
    majority,
    share,
)
from heedful.apps.label.answers import JUDGED, response_text, sides, worked_seconds
from heedful.apps.label.exporting import is_imported
from heedful.apps.label.people import agreement, is_import
from heedful.apps.label.project import Project
from heedful.apps.label.records import LabelledItem, Person
from heedful.configs.label import Criterion
from heedful.data.readers import read_records
from heedful.display import counted
from heedful.errors import DataError

REFERENCES = (
    {
        "name": "chat",
        "value": 0.63,
        "half_width": None,
        "who": "researchers and crowd workers, pairs of answers in a chat",
        "paper": "Bai et al. 2022, arXiv 2204.05862",
    },
    {
        "name": "training",
        "value": 0.726,
        "half_width": 0.015,
        "who": "training labellers of InstructGPT with each other",
        "paper": "Ouyang et al. 2022, arXiv 2203.02155, section 3.4",
    },
    {
        "name": "held_out",
        "value": 0.773,
        "half_width": 0.013,
        "who": "held-out labellers of InstructGPT with each other",
        "paper": "Ouyang et al. 2022, arXiv 2203.02155, section 3.4",
    },
)
"""Published agreement of people on answers of language models."""
MOST_SHOWN = 20
"""Length of the list of items with the largest disagreement between people and the reward model."""

Unit = tuple[str, int, int]
"""A unit of agreement: an item, and for a ranking the two compared candidates."""


def statistics(
    labels: Sequence[LabelledItem],
    people: Sequence[Person],
    *,
    scores: Mapping[str, Sequence[float]] | None = None,
    criteria: Sequence[Criterion] = (),
) -> dict[str, Any]:
    """Return all statistics, ready for JSON. A share is an object of `heedful.apps.label.agreement.Share`; null means n/a.

    Args:
        labels: counting labels, from `heedful.apps.label.project.Project.labels`.
        people: everybody of the project.
        scores: the reward model's score of each candidate, by item (`read_scores`).
        criteria: of the project; values for its earlier criteria are ignored.

    Raises DataError if an item has not one score for each candidate.
    """
    parts = _sorted_out(labels)
    first, repeats, screening, gold = (parts[name] for name in ("", "repeats", "screening", "gold"))
    trusted = [one for one in first if one.person.standing in ("active", "held-out")]
    habits = {one.event.event_id: {name: habit(one) for name, habit in HABITS.items()} for one in first}
    of_others = _units(trusted, judgements)
    of_person = [_grouped(part, lambda one: one.person.person_id) for part in (first, repeats, screening, gold)]

    def person(who: Person) -> dict[str, Any]:
        own, own_repeats, own_screening, own_gold = (part.get(who.person_id, []) for part in of_person)
        seconds = [time for one in own if (time := worked_seconds(one.event.content)) is not None]
        compared = {one.event.event_id: _like_the_others(one, of_others) for one in own}
        return {
            "person": who.person_id,
            "name": who.name,
            "role": who.role,
            "standing": who.standing,
            "labels": len(own),
            "self_consistency": _self_consistency([*own, *own_screening], own_repeats),
            **_habits(own, habits),
            "median_seconds": numbers.median(seconds) if seconds else None,
            "suggestion_followed": _share(own, _followed),
            "per_day": _per_day(own),
            "screening": _screening_agreement(own_screening, screening),
            "gold": _share(own_gold, _as_known),
            "agreement": _share(
                own, lambda one: [is_so for is_so in compared[one.event.event_id] if is_so is not None]
            ),
            "undecided": sum(some.count(None) for some in compared.values()),
        }

    return {
        "labels": len(first),
        "items": len({one.item.item_id for one in first}),
        "left_out": {name: len(parts[name]) for name in ("repeats", "screening", "imported", "gold")},
        "gold": _share(gold, _as_known),
        "suggestion_followed": _share(first, _followed),
        "corrected": sum("corrected_by" in one.event.content for one in labels),
        "references": [dict(reference) for reference in REFERENCES],
        "agreement": {task: _agreement([one for one in trusted if one.item.task == task]) for task in JUDGED},
        "criteria": {one.name: _criterion(one, first, trusted) for one in criteria},
        "self_consistency": _self_consistency(first + screening, repeats),
        **_habits(first, habits),
        "median_seconds": _median_seconds(first),
        "by_task": _by_task(first, screening, repeats, habits),
        "per_day": _per_day(first),
        "people": [person(who) for who in people if not is_import(who)],
        "model": None if scores is None else _model(first, scores),
    }


def project_statistics(project: Project) -> dict[str, Any]:
    """Return the current statistics of a project, with the scores in its folder if any."""
    scores = read_scores(project.folder / "scores.jsonl") or None
    now = project.snapshot()
    labels = now.counting()
    found = statistics(labels, now.people, scores=scores, criteria=project.settings.criteria_asked)
    found["left_out"]["withdrawn"] = len(now.labels) - len(labels)
    return found


def read_scores(path: Path) -> dict[str, list[float]]:
    """Read scores.jsonl: one object per line with ``item`` and ``scores``, one per candidate.

    The last line of an item counts. Empty if there is no such file. Raises DataError, with file and line, for anything else.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return {}
    found = {}
    for record in read_records(str(path), columns={}):
        item, scores = record.fields.get("item"), record.fields.get("scores")
        if not isinstance(item, str) or not isinstance(scores, list) or not all(map(_is_number, scores)):
            raise DataError(f'{record.source}: expected {{"item": "...", "scores": [a number for each candidate]}}')
        found[item] = [float(score) for score in scores]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _sorted_out(labels: Sequence[LabelledItem]) -> dict[str, list[LabelledItem]]:
    """Labels by group: "" for those compared, else the reason why not."""

    def part(one: LabelledItem) -> str:
        if is_imported(one.event):
            return "imported"
        if one.event.content.get("repeat"):
            return "repeats"
        if one.item.screening:
            return "screening"
        return "" if one.item.gold is None else "gold"

    return defaultdict(list, _grouped(labels, part))


def _grouped(labels: Iterable[LabelledItem], key: Callable[[LabelledItem], str]) -> dict[str, list[LabelledItem]]:
    found: dict[str, list[LabelledItem]] = defaultdict(list)
    for one in labels:
        found[key(one)].append(one)
    return found


def _share(labels: Iterable[LabelledItem], say: Callable[[LabelledItem], Iterable[float]]) -> dict[str, Any] | None:
    """The share over the values of all labels, with items as independent groups; None without values."""
    return _share_of((one.item.item_id, say(one)) for one in labels)


def _share_of(values: Iterable[tuple[str, Iterable[float]]]) -> dict[str, Any] | None:
    groups: dict[str, list[float]] = defaultdict(list)
    for item, some in values:
        groups[item].extend(map(float, some))
    found = share(list(groups.values()))
    return None if found is None else dataclasses.asdict(found)


def judgements(one: LabelledItem) -> dict[Unit, int]:
    """Return a label's value for each unit of its item: -1 if the first candidate is better, 1 the second, 0 a tie.

    For a rating, the rating; empty for tasks that cannot be compared.
    """
    answer, item = one.event.content["answer"], one.item
    if item.task == "pair":
        return {(item.item_id, 0, 1): _side(answer["preferred"])}
    if item.task == "ranking":
        return {(item.item_id, i, j): side for (i, j), side in sides(answer["ranks"]).items()}
    return {(item.item_id, 0, 0): answer["rating"]} if item.task == "rating" else {}


def _side(preferred: int | None) -> int:
    return 0 if preferred is None else 2 * preferred - 1


def _degrees(one: LabelledItem) -> dict[Unit, int]:
    """As `judgements`, but a preference is weighted by its strength, -4 to 4; without one it has no value."""
    if one.item.task != "pair":
        return judgements(one)
    strength = one.event.content["answer"].get("strength")
    side = _side(one.event.content["answer"]["preferred"])
    return {} if side and strength is None else {(one.item.item_id, 0, 1): side * (strength or 0)}


def _units(
    labels: Iterable[LabelledItem], say: Callable[[LabelledItem], dict[Unit, int]]
) -> dict[Unit, dict[str, int]]:
    """Values by unit and person."""
    units: dict[Unit, dict[str, int]] = defaultdict(dict)
    for one in labels:
        for unit, value in say(one).items():
            units[unit][one.person.person_id] = value
    return units


def _agreement_share(units: Mapping[Unit, Iterable[int]]) -> dict[str, Any] | None:
    """Share of equal pairs of values within units."""
    return _share_of((unit[0], agreements(list(values))) for unit, values in units.items())


def _agreement(labels: Sequence[LabelledItem]) -> dict[str, Any] | None:
    """Agreement on the items of one task; None if no two people labelled the same item."""
    units = {unit: values for unit, values in _units(labels, judgements).items() if len(values) > 1}
    if not units:
        return None
    values = {unit: list(said.values()) for unit, said in units.items()}
    is_rating = labels[0].item.task == "rating"
    degrees = [list(said.values()) for said in _units(labels, _degrees).values()]
    decided = {unit: [value for value in some if value] for unit, some in values.items()}
    return {
        "items": len({unit[0] for unit in units}),
        "share": _agreement_share(values),
        "without_ties": None if is_rating else _agreement_share(decided),
        "cohen": _cohen(units.values()),
        "fleiss": fleiss_kappa([*values.values()]),
        "alpha_nominal": krippendorff_alpha([*values.values()]),
        "alpha_ordinal": krippendorff_alpha(degrees, "ordinal"),
        "alpha_interval": krippendorff_alpha(degrees, "interval") if is_rating else None,
    }


def _cohen(units: Iterable[Mapping[str, int]]) -> list[dict[str, Any]]:
    pairs: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for said in units:
        for one, other in combinations(sorted(said), 2):
            pairs[one, other].append((said[one], said[other]))
    return [{"people": list(two), "units": len(p), "kappa": cohen_kappa(p)} for two, p in sorted(pairs.items())]


def _criterion(criterion: Criterion, labels: Sequence[LabelledItem], trusted: Sequence[LabelledItem]) -> dict[str, Any]:
    """Statistics of one criterion. A unit is an answer; its value is the index among the criterion's values."""
    places = {value: place for place, value in enumerate(criterion.values, 1)}

    def say(one: LabelledItem) -> dict[Unit, int]:
        said = one.event.content["answer"].get("criteria") or ()
        values = ((i, of_answer.get(criterion.name)) for i, of_answer in enumerate(said))
        return {(one.item.item_id, i, i): places[value] for i, value in values if value in places}

    counts = Counter(place for one in labels for place in say(one).values())
    units = {unit: [*said.values()] for unit, said in _units(trusted, say).items() if len(said) > 1}
    total = counts.total()
    is_scale = isinstance(criterion.values[0], int)
    return {
        "answers": total,
        "counts": {str(value): counts[place] for value, place in places.items()},
        "mean": sum(place * n for place, n in counts.items()) / total if is_scale and total else None,
        "agreement": _agreement_share(units),
        "alpha_nominal": krippendorff_alpha([*units.values()]),
        "alpha_ordinal": krippendorff_alpha([*units.values()], "ordinal"),
        "alpha_interval": krippendorff_alpha([*units.values()], "interval") if is_scale else None,
    }


def _self_consistency(first: Sequence[LabelledItem], repeats: Sequence[LabelledItem]) -> dict[str, Any] | None:
    """How often people repeat their first answer on a hidden repeat."""
    again = {(one.person.person_id, one.item.item_id) for one in repeats}
    before = {key: judgements(one) for one in first if (key := (one.person.person_id, one.item.item_id)) in again}

    def is_same(one: LabelledItem) -> list[bool]:
        said = before.get((one.person.person_id, one.item.item_id))
        return [] if said is None else [said[unit] == value for unit, value in judgements(one).items()]

    return _share(repeats, is_same)


def _habits(labels: Sequence[LabelledItem], habits: Mapping[str, Mapping[str, list[bool]]]) -> dict[str, Any]:
    """Signs that the page or haste decides instead of the answers; ``habits`` has `HABITS` by event."""
    found = [(one.item.item_id, habits[one.event.event_id]) for one in labels]
    return {name: _share_of((item, of_label[name]) for item, of_label in found) for name in HABITS}


def _median_seconds(labels: Sequence[LabelledItem]) -> dict[str, float]:
    by_task = {
        task: [seconds for one in some if (seconds := worked_seconds(one.event.content)) is not None]
        for task, some in sorted(_grouped(labels, lambda one: one.item.task).items())
    }
    return {task: numbers.median(seconds) for task, seconds in by_task.items() if seconds}


def _by_task(
    first: Sequence[LabelledItem],
    screening: Sequence[LabelledItem],
    repeats: Sequence[LabelledItem],
    habits: Mapping[str, Mapping[str, list[bool]]],
) -> dict[str, dict[str, Any]]:
    """The habits and the self-consistency of each task that was labelled."""
    found: dict[str, dict[str, Any]] = {}
    for task in sorted({one.item.task for one in first}):
        own, seen, again = ([one for one in some if one.item.task == task] for some in (first, screening, repeats))
        found[task] = {**_habits(own, habits), "self_consistency": _self_consistency(own + seen, again)}
    return found


def _left(one: LabelledItem) -> list[bool]:
    """Whether the answer on the left was preferred; empty for a tie."""
    preferred = one.event.content["answer"].get("preferred")
    return [] if preferred is None else [one.event.content["order"][0] == preferred]


def _longer(one: LabelledItem) -> list[bool]:
    """For each preference between answers of different length whether the longer one, in characters, was preferred."""
    responses = (
        [said["response"] for said in one.event.content["answer"]["responses"]]
        if one.item.task == "chat"
        else [candidate.response for candidate in one.item.candidates]
    )
    lengths = [len(response_text(response) or "") for response in responses]
    return [(lengths[i] < lengths[j]) == (side > 0) for i, j, side in _sides(one) if side and lengths[i] != lengths[j]]


def _ties(one: LabelledItem) -> list[bool]:
    return [side == 0 for _, _, side in _sides(one)]


def _both_bad(one: LabelledItem) -> list[bool]:
    answer = one.event.content["answer"]
    return [bool(answer["both_bad"])] if "both_bad" in answer else []


def _sides(one: LabelledItem) -> list[tuple[int, int, int]]:
    """The better one of every two answers of a pair, a ranking or a turn, as in `judgements`."""
    if one.item.task == "chat":
        return [(0, 1, _side(one.event.content["answer"]["preferred"]))]
    return [] if one.item.task == "rating" else [(i, j, side) for (_, i, j), side in judgements(one).items()]


HABITS: dict[str, Callable[[LabelledItem], list[bool]]] = {
    "left": _left,
    "longer": _longer,
    "ties": _ties,
    "both_bad": _both_bad,
}


def _per_day(labels: Iterable[LabelledItem]) -> list[dict[str, Any]]:
    """Labels per day (UTC), without empty days."""
    days = Counter(one.event.at[:10] for one in labels)
    return [{"day": day, "labels": days[day]} for day in sorted(days)]


def _like_the_others(one: LabelledItem, units: Mapping[Unit, Mapping[str, int]]) -> list[bool | None]:
    """Whether a label agrees with the majority of the others on each unit; None where they are tied."""
    found: list[bool | None] = []
    for unit, value in judgements(one).items():
        others = [said for person, said in units.get(unit, {}).items() if person != one.person.person_id]
        most = majority(others)
        found += [] if not others else [None if most is None else value == most]
    return found


def _screening_agreement(own: Sequence[LabelledItem], labels: Sequence[LabelledItem]) -> dict[str, Any] | None:
    """Agreement of a person's screening labels with the owner's; None if they share no item."""
    owners: dict[str, LabelledItem] = {}
    for one in labels:
        if one.person.role == "owner" and own and one.person != own[0].person:
            owners.setdefault(one.item.item_id, one)
    shared = [one for one in own if one.item.item_id in owners]
    return _share(shared, lambda one: [_agree(one, owners[one.item.item_id].event.content["answer"])])


def _as_known(one: LabelledItem) -> list[float]:
    """Agreement of a gold question's label with the known answer."""
    return [] if one.item.gold is None else [_agree(one, one.item.gold)]


def _agree(one: LabelledItem, answer: Mapping[str, Any]) -> float:
    return agreement(one.item.task, answer, one.event.content["answer"])


def _followed(one: LabelledItem) -> list[bool]:
    """Whether an answer equals the suggestion, if one was shown."""
    followed = one.event.content.get("suggestion_followed")
    return [] if followed is None else [followed]


def _model(labels: Sequence[LabelledItem], scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Agreement of the reward model with people, and the items with the largest disagreement."""
    margins: dict[str, list[float]] = defaultdict(list)
    items, said = {}, defaultdict(list)
    for one in labels:
        own = scores.get(one.item.item_id)
        if own is None or one.item.task not in ("pair", "ranking"):
            continue
        if len(own) != len(one.item.candidates):
            raise DataError(
                f"scores: item {one.item.item_id} has {counted(len(own), 'score')} for "
                f"{counted(len(one.item.candidates), 'candidate')}; score the items again"
            )
        items[one.item.item_id] = one.item
        said[one.item.item_id].append(dict(one.event.content["answer"]))
        margins[one.item.item_id] += [(own[j] - own[i]) * side for i, j, side in _sides(one) if side]
    right = _share_of((item, [0.5 if m == 0 else float(m > 0) for m in some]) for item, some in margins.items())
    mean = {item: math.fsum(some) / len(some) for item, some in margins.items() if some}
    worst = sorted((item for item in mean if mean[item] < 0), key=lambda item: (mean[item], item))[:MOST_SHOWN]
    return {
        "agreement": right,
        "items": [
            {
                "item": item,
                "task": items[item].task,
                "prompt": items[item].prompt,
                "answers": [candidate.response for candidate in items[item].candidates],
                "scores": list(scores[item]),
                "labels": said[item],
                "margin": mean[item],
            }
            for item in worst
        ],
    }
