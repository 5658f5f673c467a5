"""What the labels of a project say about people, the page and the reward model (docs/labelling-statistics.md).

Agreement between people is by task (ratings and rankings contradict each other 60 % of the time: Bansal et al. 2023, arXiv
2308.15812). What says something about the page or one person is of all tasks together, each comparison counting once, and by
task in ``by_task``. Never mixed with others: hidden repeats, screening items, labels that came with an imported file.
"""

import dataclasses
import math
import statistics as numbers
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from heedful.configs.label import Criterion
from heedful.data.readers import read_records
from heedful.errors import DataError
from heedful.label.agreement import (
    AgreementShare,
    agreements,
    cohen_kappa,
    fleiss_kappa,
    krippendorff_alpha,
    majority,
    share,
)
from heedful.label.answers import worked_seconds
from heedful.label.exporting import is_imported
from heedful.label.people import agreement, is_import
from heedful.label.project import Project
from heedful.label.records import LabelledItem, Person

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
"""Published agreement of people about answers of language models."""
COMPARED = ("pair", "ranking", "rating")
"""Tasks whose answers by several people can be compared."""
MOST_SHOWN = 20
"""Items in the list of those that people and the reward model order most differently."""

Unit = tuple[str, int, int]
"""Something to agree about: an item, and of a ranking the two candidates that are compared."""


def statistics(
    labels: Sequence[LabelledItem],
    people: Sequence[Person],
    *,
    scores: Mapping[str, Sequence[float]] | None = None,
    criteria: Sequence[Criterion] = (),
) -> dict[str, Any]:
    """Return all statistics, ready for JSON. A share is an object of `heedful.label.agreement.Share`; null means n/a.

    Args:
        labels: those that count, as `heedful.label.project.Project.labels` returns them.
        people: everybody of the project.
        scores: the reward model's score of each candidate, by item (`read_scores`).
        criteria: those of the project; of what labels say by others, which it had before, there are no statistics.

    Raises DataError if an item has not one score for each candidate.
    """
    first, repeats, screening, imported, gold = _sorted_out(labels)
    trusted = [one for one in first if one.person.standing in ("active", "held-out")]
    with_others = _with_the_others(first, trusted)
    habits = {one.event.event_id: tuple(habit(one) for habit in HABITS) for one in first}
    by_person = [_by_person(some) for some in (first, repeats, screening)]
    shown = [person for person in people if not is_import(person)]
    return {
        "labels": len(first),
        "items": len({one.item.item_id for one in first}),
        "left_out": {
            "repeats": len(repeats),
            "screening": len(screening),
            "imported": len(imported),
            "gold": len(gold),
        },
        "gold": _json(gold_accuracy(gold)),
        "suggestion_followed": _json(_suggestions_followed(first)),
        "corrected": sum("corrected_by" in one.event.content for one in labels),
        "references": [dict(reference) for reference in REFERENCES],
        "agreement": {task: _agreement([one for one in trusted if one.item.task == task]) for task in COMPARED},
        "criteria": {one.name: _criterion(one, first, trusted) for one in criteria},
        "self_consistency": _json(_self_consistency(first + screening, repeats)),
        **_habits(first, habits),
        "by_task": _by_task(first, screening, repeats, habits),
        "per_day": _per_day(first),
        "people": [
            _person(person, habits, *(some.get(person.person_id, []) for some in by_person))
            | {"screening": _json(screening_agreement(person.person_id, screening))}
            | {"gold": _json(gold_accuracy([one for one in gold if one.person.person_id == person.person_id]))}
            | with_others.get(person.person_id, {"agreement": None, "undecided": 0})
            for person in shown
        ],
        "model": None if scores is None else _model(first, scores),
    }


def project_statistics(project: Project) -> dict[str, Any]:
    """Return the statistics of a project as it is now, with the scores in its folder if there are any."""
    scores = read_scores(project.folder / "scores.jsonl") or None
    labels = project.labels()
    found = statistics(labels, project.people(), scores=scores, criteria=project.settings.criteria_asked)
    found["left_out"]["withdrawn"] = len(project.labels(also_withdrawn=True)) - len(labels)
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


def _sorted_out(labels: Sequence[LabelledItem]) -> tuple[list[LabelledItem], ...]:
    """Labels as they are compared; hidden repeats; those of screening items, with a file, and of gold questions."""
    parts: tuple[list[LabelledItem], ...] = ([], [], [], [], [])
    for one in labels:
        kind = 3 if is_imported(one.event) else 1 if one.event.content.get("repeat") else 2 if one.item.screening else 0
        parts[4 if kind == 0 and one.item.gold is not None else kind].append(one)
    return parts


def judgements(one: LabelledItem) -> dict[Unit, int]:
    """Return what a label says about each unit of its item: -1 if the first candidate is better, 1 the second, 0 a tie.

    Of a rating it is the rating; of a task that cannot be compared, nothing.
    """
    answer, item = one.event.content["answer"], one.item
    if item.task == "pair":
        return {(item.item_id, 0, 1): _side(answer["preferred"])}
    if item.task == "ranking":
        ranks = answer["ranks"]
        return {
            (item.item_id, i, j): (ranks[i] > ranks[j]) - (ranks[i] < ranks[j])
            for i, j in combinations(range(len(ranks)), 2)
        }
    return {(item.item_id, 0, 0): answer["rating"]} if item.task == "rating" else {}


def _side(preferred: int | None) -> int:
    return 0 if preferred is None else 2 * preferred - 1


def _degrees(one: LabelledItem) -> dict[Unit, int]:
    """As `judgements`, but a preference counts as much as its strength, -4 to 4; without one it says nothing."""
    if one.item.task != "pair":
        return judgements(one)
    strength = one.event.content["answer"].get("strength")
    side = _side(one.event.content["answer"]["preferred"])
    return {} if side and strength is None else {(one.item.item_id, 0, 1): side * (strength or 0)}


def _units(
    labels: Iterable[LabelledItem], say: Callable[[LabelledItem], dict[Unit, int]]
) -> dict[Unit, dict[str, int]]:
    """What each person says about each unit."""
    units: dict[Unit, dict[str, int]] = defaultdict(dict)
    for one in labels:
        for unit, value in say(one).items():
            units[unit][one.person.person_id] = value
    return units


def _by_item(values: Iterable[tuple[Unit, Iterable[float]]]) -> list[list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for unit, some in values:
        groups[unit[0]].extend(some)
    return list(groups.values())


def _agreement(labels: Sequence[LabelledItem]) -> dict[str, Any] | None:
    """Agreement about the items of one task; None if no two people labelled the same item."""
    units = {unit: values for unit, values in _units(labels, judgements).items() if len(values) > 1}
    if not units:
        return None
    values = [list(of_unit.values()) for of_unit in units.values()]
    is_rating = labels[0].item.task == "rating"
    degrees = [list(of_unit.values()) for of_unit in _units(labels, _degrees).values()]
    decided = _by_item((unit, agreements([v for v in said.values() if v])) for unit, said in units.items())
    return {
        "items": len({unit[0] for unit in units}),
        "share": _json(share(_by_item((unit, agreements(list(said.values()))) for unit, said in units.items()))),
        "without_ties": None if is_rating else _json(share(decided)),
        "cohen": _cohen(units.values()),
        "fleiss": fleiss_kappa(values),
        "alpha_nominal": krippendorff_alpha(values),
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
    """What people say about answers by one criterion. A unit is an answer; its value the place among the criterion's."""
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
        "agreement": _json(share(_by_item((unit, agreements(values)) for unit, values in units.items()))),
        "alpha_nominal": krippendorff_alpha([*units.values()]),
        "alpha_ordinal": krippendorff_alpha([*units.values()], "ordinal"),
        "alpha_interval": krippendorff_alpha([*units.values()], "interval") if is_scale else None,
    }


def _self_consistency(first: Sequence[LabelledItem], repeats: Sequence[LabelledItem]) -> AgreementShare | None:
    """How often people say about a hidden repeat what they said the first time."""
    again = {(one.person.person_id, one.item.item_id) for one in repeats}
    before = {key: judgements(one) for one in first if (key := (one.person.person_id, one.item.item_id)) in again}
    values = [
        (unit, [float(before[key][unit] == value)])
        for one in repeats
        if (key := (one.person.person_id, one.item.item_id)) in before
        for unit, value in judgements(one).items()
    ]
    return share(_by_item(values))


def _habits(labels: Sequence[LabelledItem], habits: Mapping[str, Sequence[list[float]]]) -> dict[str, Any]:
    """What may show that the page, or haste, decides in place of the answers; ``habits`` has `HABITS` by event."""
    groups: tuple[dict[str, list[float]], ...] = tuple(defaultdict(list) for _ in HABITS)
    for one in labels:
        for group, values in zip(groups, habits[one.event.event_id], strict=True):
            group[one.item.item_id].extend(values)
    left, longer, ties, both_bad = (share(list(group.values())) for group in groups)
    by_task: dict[str, list[float]] = defaultdict(list)
    for one in labels:
        if (seconds := worked_seconds(one.event.content)) is not None:
            by_task[one.item.task].append(seconds)
    return {
        "left": _json(left),
        "longer": _json(longer),
        "ties": _json(ties),
        "both_bad": _json(both_bad),
        "median_seconds": {task: numbers.median(times) for task, times in sorted(by_task.items())},
    }


def _by_task(
    first: Sequence[LabelledItem],
    screening: Sequence[LabelledItem],
    repeats: Sequence[LabelledItem],
    habits: Mapping[str, Sequence[list[float]]],
) -> dict[str, dict[str, Any]]:
    """The habits and the self-consistency of each task that was labelled."""
    found: dict[str, dict[str, Any]] = {}
    for task in sorted({one.item.task for one in first}):
        own, seen, again = ([one for one in some if one.item.task == task] for some in (first, screening, repeats))
        shares = _habits(own, habits)
        found[task] = {name: shares[name] for name in ("left", "longer", "ties", "both_bad")}
        found[task]["self_consistency"] = _json(_self_consistency(own + seen, again))
    return found


def _left(one: LabelledItem) -> list[float]:
    """Whether the answer on the left was preferred; nothing for a tie."""
    preferred = one.event.content["answer"].get("preferred")
    return [] if preferred is None else [float(one.event.content["order"][0] == preferred)]


def _longer(one: LabelledItem) -> list[float]:
    """For each preference between answers of different length whether the longer one, in characters, was preferred."""
    answer = one.event.content["answer"]
    responses = (
        [said["response"] for said in answer["responses"]]
        if one.item.task == "chat"
        else [candidate.response for candidate in one.item.candidates]
    )
    lengths = [len(text if isinstance(text, str) else text.get("content") or "") for text in responses]
    return [
        float((lengths[i] < lengths[j]) == (side > 0))
        for i, j, side in _sides(one)
        if side and lengths[i] != lengths[j]
    ]


def _ties(one: LabelledItem) -> list[float]:
    return [float(side == 0) for _, _, side in _sides(one)]


def _both_bad(one: LabelledItem) -> list[float]:
    answer = one.event.content["answer"]
    return [float(bool(answer["both_bad"]))] if "both_bad" in answer else []


def _sides(one: LabelledItem) -> list[tuple[int, int, int]]:
    """Which of every two answers of a pair, a ranking or a turn is better, as in `judgements`."""
    if one.item.task == "chat":
        return [(0, 1, _side(one.event.content["answer"]["preferred"]))]
    return [] if one.item.task == "rating" else [(i, j, side) for (_, i, j), side in judgements(one).items()]


HABITS: tuple[Callable[[LabelledItem], list[float]], ...] = (_left, _longer, _ties, _both_bad)


def _per_day(labels: Iterable[LabelledItem]) -> list[dict[str, Any]]:
    """Labels per day (UTC) on which there was one."""
    days = Counter(one.event.at[:10] for one in labels)
    return [{"day": day, "labels": days[day]} for day in sorted(days)]


def _person(
    person: Person,
    habits: Mapping[str, Sequence[list[float]]],
    own: Sequence[LabelledItem],
    own_repeats: Sequence[LabelledItem],
    own_screening: Sequence[LabelledItem],
) -> dict[str, Any]:
    """What one person's own labels say."""
    seconds = [time for one in own if (time := worked_seconds(one.event.content)) is not None]
    return {
        "person": person.person_id,
        "name": person.name,
        "role": person.role,
        "standing": person.standing,
        "labels": len(own),
        "self_consistency": _json(_self_consistency([*own, *own_screening], own_repeats)),
        **_habits(own, habits),
        "median_seconds": numbers.median(seconds) if seconds else None,
        "suggestion_followed": _json(_suggestions_followed(own)),
        "per_day": _per_day(own),
    }


def _by_person(labels: Iterable[LabelledItem]) -> dict[str, list[LabelledItem]]:
    found: dict[str, list[LabelledItem]] = defaultdict(list)
    for one in labels:
        found[one.person.person_id].append(one)
    return found


def _with_the_others(labels: Sequence[LabelledItem], trusted: Sequence[LabelledItem]) -> dict[str, dict[str, Any]]:
    """How often each person says what most of the others say; the others are those who are active or held out."""
    units = _units(trusted, judgements)
    agreeing: dict[str, list[tuple[Unit, list[float]]]] = defaultdict(list)
    undecided: Counter[str] = Counter()
    for one in labels:
        person = one.person.person_id
        for unit, value in judgements(one).items():
            others = [v for other, v in units.get(unit, {}).items() if other != person]
            if not others:
                continue
            most = majority(others)
            if most is None:
                undecided[person] += 1
            else:
                agreeing[person].append((unit, [float(value == most)]))
    return {
        person: {"agreement": _json(share(_by_item(agreeing[person]))), "undecided": undecided[person]}
        for person in {one.person.person_id for one in labels}
    }


def screening_agreement(person_id: str, labels: Sequence[LabelledItem]) -> AgreementShare | None:
    """Return how far a person agrees with the owner on screening items (`people.agreement`); None if they share no item.

    Args:
        person_id: the person.
        labels: labels of screening items.
    """
    owners: dict[str, LabelledItem] = {}
    for one in labels:
        if one.person.role == "owner" and one.person.person_id != person_id:
            owners.setdefault(one.item.item_id, one)
    own = [one for one in labels if one.person.person_id == person_id and one.item.item_id in owners]
    return share([[agreement(one.item.task, _answer(owners[one.item.item_id]), _answer(one))] for one in own])


def gold_accuracy(labels: Sequence[LabelledItem]) -> AgreementShare | None:
    """Return how far labels of gold questions agree with the known answers (`people.agreement`); None if there are none."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one in labels:
        if one.item.gold is not None:
            groups[one.item.item_id].append(agreement(one.item.task, dict(one.item.gold), _answer(one)))
    return share(list(groups.values()))


def _suggestions_followed(labels: Iterable[LabelledItem]) -> AgreementShare | None:
    """How often an answer says what was suggested, of the labels of which the page showed a suggestion."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one in labels:
        if (followed := one.event.content.get("suggestion_followed")) is not None:
            groups[one.item.item_id].append(float(followed))
    return share(list(groups.values()))


def _answer(one: LabelledItem) -> dict[str, Any]:
    return dict(one.event.content["answer"])


def _model(labels: Sequence[LabelledItem], scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """How often the reward model prefers what people prefer, and the items that they order most differently."""
    margins: dict[str, list[float]] = defaultdict(list)
    items, said = {}, defaultdict(list)
    for one in labels:
        own = scores.get(one.item.item_id)
        if own is None or one.item.task not in ("pair", "ranking"):
            continue
        if len(own) != len(one.item.candidates):
            raise DataError(
                f"scores: item {one.item.item_id} has {len(own)} scores for {len(one.item.candidates)} candidates; "
                "score the items again"
            )
        items[one.item.item_id] = one.item
        said[one.item.item_id].append(dict(one.event.content["answer"]))
        margins[one.item.item_id] += [(own[j] - own[i]) * side for i, j, side in _sides(one) if side]
    right = [[0.5 if margin == 0 else float(margin > 0) for margin in some] for some in margins.values()]
    mean = {item: math.fsum(some) / len(some) for item, some in margins.items() if some}
    worst = sorted((item for item in mean if mean[item] < 0), key=lambda item: (mean[item], item))[:MOST_SHOWN]
    return {
        "agreement": _json(share(right)),
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


def _json(found: AgreementShare | None) -> dict[str, Any] | None:
    return None if found is None else dataclasses.asdict(found)
