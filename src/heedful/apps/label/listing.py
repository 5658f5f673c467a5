"""The owner's view of labels: a searchable list, and an item with all its labels. Pure functions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.apps.label.answers import response_text
from heedful.apps.label.records import Event, Item, LabelledItem
from heedful.apps.label.rounds_page import trained_on
from heedful.apps.label.statistics import judgements

EXCERPT = 160
"""Most characters of a prompt in the list."""


def chosen(
    labels: Sequence[LabelledItem], *, person: str = "", differ: bool = False, search: str = ""
) -> list[LabelledItem]:
    """Return labels, the newest first.

    Args:
        labels: those to choose from.
        person: only labels of the person with this id; empty: everybody.
        differ: only items about which people differ (`differing`).
        search: only items with this id, or with this text in prompt or answers, ignoring case.
    """
    about = differing(labels) if differ else None
    found: dict[str, bool] = {}
    return [
        one
        for one in reversed(labels)
        if (not person or one.person.person_id == person)
        and (about is None or one.item.item_id in about)
        and (not search or found.setdefault(one.item.item_id, contains(one.item, search)))
    ]


def differing(labels: Sequence[LabelledItem]) -> set[str]:
    """Return the ids of items with different answers or ratings of at least two people.

    Ignores strength, criteria and hidden repeats.
    """
    said: dict[Any, set[int]] = defaultdict(set)
    for one in labels:
        if not one.event.content["repeat"]:
            for unit, value in judgements(one).items():
                said[unit].add(value)
    return {unit[0] for unit, values in said.items() if len(values) > 1}


def contains(item: Item, search: str) -> bool:
    """Return whether an item matches a search."""
    texts = [text_of(item.prompt), *(text_of(one.response) for one in item.candidates)]
    return item.item_id == search or any(search.casefold() in text.casefold() for text in texts)


def text_of(content: Any) -> str:
    """Return a prompt or a response as text; for a conversation, the text of its messages."""
    return str(response_text(content) or "")


def row(one: LabelledItem) -> dict[str, Any]:
    """Return a label as a line of the list, ready for JSON."""
    prompt = one.event.content["answer"]["messages"] if one.item.task == "chat" else one.item.prompt
    return _line(one.item, prompt) | of_label(one)


def row_of_item(item: Item, counts: Mapping[str, int]) -> dict[str, Any]:
    """Return an item as a line of the list of items; ``counts`` are its labels by item."""
    return _line(item, item.prompt) | {"batch": item.batch, "labels": counts.get(item.item_id, 0)}


def _line(item: Item, prompt: Any) -> dict[str, Any]:
    last = prompt[-1] if isinstance(prompt, list | tuple) and prompt else prompt
    return {"item": item.item_id, "task": item.task, "prompt": text_of(last)[:EXCERPT]}


def of_label(one: LabelledItem) -> dict[str, Any]:
    """Return a label's person and answer, and whether an owner has corrected it."""
    event, content = one.event, one.event.content
    answer = dict(content["answer"])
    for name in ("messages", "responses"):
        answer.pop(name, None)
    return {
        "label": event.event_id,
        "person": one.person.person_id,
        "name": one.person.name,
        "at": event.at,
        "answer": answer,
        "comment": content["comment"],
        "flags": list(content["flags"]),
        "seconds": content["seconds"],
        "repeat": content["repeat"],
        "corrected_by": content.get("corrected_by"),
    }


def of_correction(event: Event, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a correction: person, time, old answer, new answer, reason."""
    content = event.content
    by = str(event.person)
    kept = {key: content[key] for key in ("old", "answer", "reason")}
    return {"by": by, "name": names.get(by, by), "at": event.at, **kept}


def is_closed(project: Path, one: LabelledItem) -> bool:
    """Return whether a round has trained on a label (`heedful round`)."""
    return one.event.seq <= trained_on(project)
