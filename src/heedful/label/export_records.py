"""Turn labels into the records that trainers read (docs/data.md). Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.label.records import Candidate, Event, Item, LabelledItem

Fields = dict[str, Any]

OURS = (
    "text", "messages", "prompt", "completion", "chosen", "rejected", "margin", "responses", "ranks", "label",
    "rating", "group_id", "feedback", "criteria", "chosen_criteria", "rejected_criteria", "completion_criteria",
    "suggestion", "suggestion_followed",
)  # fmt: skip
"""Columns that an export writes itself. Those of an imported record were read; its others go through."""
MARGINS: Mapping[str, tuple[float, ...]] = {"small": (0.0, 1 / 3, 2 / 3, 1.0), "large": (0.0, 1.0, 2.0, 3.0)}
"""Margin of each strength, 1 to 4 (Touvron et al. 2023, Llama 2, table 27)."""
GOOD, BAD = 5, 3
"""A rating of at least 5 of 7 is good for KTO, one of at most 3 bad; 4 is neither."""


@dataclass(frozen=True)
class Made:
    """What a label becomes."""

    kind: str
    """The file that it belongs to: preferences, demonstrations, ratings, ties, or contradictions."""
    fields: Fields


def record_of(item: Item, event: Event, margin: str) -> Made:
    """Return the record of a label.

    Args:
        item: what was labelled.
        event: the label.
        margin: "none", or what a strength becomes, of `MARGINS`.
    """
    answer, kept = event.content["answer"], {k: v for k, v in item.columns.items() if k not in OURS}
    prompt = answer["messages"] if item.task == "chat" else item.prompt
    fields = {**kept, "prompt": prompt}
    if item.task in ("pair", "chat"):
        answers = _said(answer["responses"]) if item.task == "chat" else item.candidates
        made = _pair(fields, answers, answer["preferred"], _margin(item, event, margin), answer.get("criteria"))
    elif item.task == "ranking":
        made, answers = _ranking(fields, item.candidates, answer["ranks"], answer.get("criteria")), item.candidates
    elif item.task == "correction":
        edited = Candidate(answer["text"])
        made, answers = _pair(fields, (edited, *item.candidates), 0, None), item.candidates
    elif item.task == "rating":
        answers = item.candidates
        rated = {"completion": written(answers[0]), "rating": answer["rating"]}
        rated |= {"completion_criteria": answer["criteria"][0]} if "criteria" in answer else {}
        made = Made("ratings", {**fields, **rated})
    else:
        made, answers = Made("demonstrations", {**fields, "completion": answer["text"]}), item.candidates
    followed = {k: v for k, v in event.content.items() if k == "suggestion_followed"}
    return Made(made.kind, {**made.fields, **followed, "feedback": _feedback(item, event, answers)})


def pairs_of(fields: Fields, group: str) -> list[Fields]:
    """Return a preference as pairs, for trainers that read nothing else: a ranking's every two answers of different rank.

    ``group_id`` is the same for all pairs of one label.
    """
    if "ranks" not in fields:
        return [{**fields, "group_id": group}]
    rest = {k: v for k, v in fields.items() if k not in ("responses", "ranks", "criteria")}
    said = fields.get("criteria", [None] * len(fields["ranks"]))
    ranked = list(zip(fields["responses"], fields["ranks"], said, strict=True))
    return [
        {**rest, "chosen": better, "rejected": worse, "group_id": group} | _by_criteria(of_better, of_worse)
        for better, rank, of_better in ranked
        for worse, other, of_worse in ranked
        if rank < other
    ]


def _by_criteria(chosen: Any, rejected: Any) -> Fields:
    return {} if chosen is None else {"chosen_criteria": chosen, "rejected_criteria": rejected}


def labelled_of(fields: Fields) -> Fields | None:
    """Return a rating as a good or bad response; None for one that is neither."""
    if BAD < fields["rating"] < GOOD:
        return None
    rest = {k: v for k, v in fields.items() if k != "rating"}
    return {**rest, "label": fields["rating"] >= GOOD}


def item_record(item: Item, labels: Sequence[LabelledItem] = ()) -> Fields:
    """Return an item, and what people said about it, as a record that can be imported again."""
    kept = {k: v for k, v in item.columns.items() if k not in OURS}
    fields = {**kept, "prompt": item.prompt}
    if item.candidates:
        fields["responses"] = [
            {"response": one.response} | ({} if one.source is None else {"source": dict(one.source)})
            for one in item.candidates
        ]
    if item.suggestion is not None:
        fields["suggestion"] = dict(item.suggestion)
    known = {"item": item.item_id, "task": item.task, "round": item.round, "chosen_by": item.chosen_by}
    return {
        **fields,
        "feedback": known
        | ({"screening": True} if item.screening else {})
        | ({} if item.gold is None else {"gold": dict(item.gold)})
        | ({"labels": [_label(one) for one in labels]} if labels else {}),
    }


def _label(one: LabelledItem) -> Fields:
    content = one.event.content
    kept = {"comment": content.get("comment"), "flags": list(content.get("flags", ()))}
    known = {"person": one.person.name, "standing": one.person.standing, "answer": dict(content["answer"])}
    followed = {k: v for k, v in content.items() if k == "suggestion_followed"}
    return known | {name: value for name, value in kept.items() if value} | followed


def written(candidate: Candidate) -> Any:
    """Return an answer as readers take it: text, or a list of one message."""
    return candidate.response if isinstance(candidate.response, str) else [candidate.response]


def is_imported(event: Event) -> bool:
    """True for a label that came with an imported file: it took no time here."""
    return event.content["seconds"] is None


def _said(responses: Sequence[Mapping[str, Any]]) -> tuple[Candidate, ...]:
    return tuple(Candidate(one["response"], one.get("source")) for one in responses)


def _pair(
    fields: Fields, answers: Sequence[Candidate], preferred: int | None, margin: float | None, criteria: Any = None
) -> Made:
    responses = [written(one) for one in answers]
    if preferred is None:
        said = {} if criteria is None else {"criteria": criteria}
        return Made("ties", {**fields, "responses": responses, "ranks": [0, 0], **said})
    pair = {"chosen": responses[preferred], "rejected": responses[1 - preferred]}
    if criteria is not None:
        pair |= _by_criteria(criteria[preferred], criteria[1 - preferred])
    kind = "contradictions" if responses[0] == responses[1] else "preferences"
    return Made(kind, {**fields, **pair} | ({} if margin is None else {"margin": margin}))


def _ranking(fields: Fields, answers: Sequence[Candidate], ranks: Sequence[int], criteria: Any) -> Made:
    place = {rank: i for i, rank in enumerate(sorted(set(ranks)))}
    responses, ranks = [written(one) for one in answers], [place[rank] for rank in ranks]
    both = list(zip(responses, ranks, strict=True))
    apart = any(one == other and rank != theirs for one, rank in both for other, theirs in both)
    kind = "contradictions" if apart else "preferences" if len(place) > 1 else "ties"
    said = {} if criteria is None else {"criteria": criteria}
    return Made(kind, {**fields, "responses": responses, "ranks": ranks, **said})


def _margin(item: Item, event: Event, margin: str) -> float | None:
    """The margin that a file had, if the label came with it; else that of the strength, if there is one. "none" is none."""
    if margin == "none":
        return None
    if is_imported(event):
        return item.columns.get("margin")
    strength = event.content["answer"].get("strength")
    return None if strength is None else MARGINS[margin][strength - 1]


def _feedback(item: Item, event: Event, answers: Sequence[Candidate]) -> Fields:
    """Where a record comes from. Keys that say nothing are left out."""
    content, answer = event.content, event.content["answer"]
    sources = [None if one.source is None else dict(one.source) for one in answers]
    found = {
        "event": event.event_id,
        "item": item.item_id,
        "person": event.person,
        "task": item.task,
        "round": item.round,
        "chosen_by": item.chosen_by,
        "strength": answer.get("strength"),
        "rating_flags": list(answer.get("flags", ())),
        "flags": list(content.get("flags", ())),
        "comment": content.get("comment"),
        "corrected_by": content.get("corrected_by"),
        "sources": sources if any(sources) else None,
    }
    return {key: value for key, value in found.items() if value not in (None, [], "")}
