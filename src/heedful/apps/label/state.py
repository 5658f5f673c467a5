"""State of a project, the sum of its events: items, people, counting labels, items left."""

import bisect
import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from heedful.apps.label.answers import may_overlap
from heedful.apps.label.records import Candidate, Event, Item, LabelledItem, Person
from heedful.errors import DataError

NOT_COUNTED = ("held-out", "refused")
"""Standings with labels that do not complete an item: for evaluation only, or not trusted."""


KINDS: tuple[str, ...] = get_args(get_type_hints(Event)["kind"])
OPTIONAL = ("batch", "gold", "suggestion")
"""Fields of an item that are written only if they are not empty."""


class NewerError(DataError):
    """A project was written by a newer heedful."""

    def __init__(self, found: str) -> None:
        super().__init__(f"{found}: the project was written by a newer heedful; update heedful, do not edit the file")


def item_content(item: Item) -> dict[str, Any]:
    """Return the content of the event that adds an item."""
    content = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)} | {
        "candidates": [{"response": one.response, "source": one.source} for one in item.candidates]
    }
    return {name: value for name, value in content.items() if value or name not in OPTIONAL}


def item_from(content: Mapping[str, Any]) -> Item:
    """Return the item of an `item_content`."""
    return Item(**{**content, "candidates": tuple(Candidate(**one) for one in content["candidates"])})


class State:
    """The sum of events. It changes only by `apply`, and depends only on the events.

    A label counts until it is retracted. An item is done when ``needed`` people have labelled it, without people who label
    for evaluation only or were refused; screening items and repeats never count as work.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.items: dict[str, Item] = {}
        self.screening: list[Item] = []
        """The items of the screening set."""
        self.gold: list[Item] = []
        """The gold questions."""
        self.tasks: set[str] = set()
        """The tasks of the items."""
        self.people: dict[str, Person] = {}
        self.instructions: list[str] = []
        self.sent: dict[tuple[str, str], Event] = {}
        """Events by person and nonce."""
        self.counting: dict[str, Event] = {}
        """Labels and skips that were not retracted, by event id, in order."""
        self.trail: dict[str, list[Event]] = {}
        """The same by person."""
        self.undone: dict[str, list[Event]] = {}
        """What redo restores: each person's undone labels and skips since their last new one, the latest last."""
        self.labels_by: Counter[tuple[str, str]] = Counter()
        """Number of counting labels by person and day, such as 2026-03-01; the day "" has the total."""
        self.answers: dict[str, dict[str, Event]] = {}
        """Labels by item and person, without repeats; for a chat only its last turn."""
        self.judged = 0
        """How many items may overlap."""
        self.overlapping = 0
        """How many of them need several people."""
        self.corrections: dict[str, list[Event]] = {}
        """Corrections by owners, by the label's event id."""
        self.batches: dict[str, Event] = {}
        """Start time of each import, by batch."""
        self.withdrawn: set[str] = set()
        """Ids of withdrawn items: they are not assigned, and their labels do not count."""
        self.work: set[str] = set()
        """Ids of items to label, without withdrawn and screening items and gold questions."""
        self.left: list[int] = []
        """Positions of items that are not done, in order."""
        self._position: dict[str, int] = {}
        self._order: list[Item] = []

    @property
    def seq(self) -> int:
        """The number of the last event; 0 if there is none."""
        return len(self.events)

    def apply(self, event: Event) -> None:
        """Add the next event. Raises DataError if it cannot follow, NewerError if its kind is not known."""
        if event.seq != self.seq + 1:
            raise DataError(f"event {event.seq} follows event {self.seq}; the events in between are missing")
        if isinstance(event.kind, str) and event.kind not in KINDS:
            raise NewerError(f"events of the kind {event.kind!r:.60} are not known")
        try:
            getattr(self, f"_{event.kind}")(event, event.content)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"event {event.seq} ({event.kind}) is not complete: {error}") from error
        self.events.append(event)
        if event.nonce is not None and event.person is not None:
            self.sent[event.person, event.nonce] = event

    def _lost(self, _event: Event, _content: Mapping[str, Any]) -> None:
        pass

    def _item(self, _event: Event, content: Mapping[str, Any]) -> None:
        item = item_from(content)
        self._position[item.item_id] = len(self._order)
        self._order.append(item)
        self.items[item.item_id] = item
        self.tasks.add(item.task)
        self._sort(item)

    def _sort(self, item: Item) -> None:
        """Add the next item, in order, to the sets it belongs to."""
        self.judged += may_overlap(item)
        self.overlapping += may_overlap(item) and item.needed > 1
        if item.screening:
            self.screening.append(item)
        elif item.gold is not None:
            self.gold.append(item)
        else:
            self.work.add(item.item_id)
            if not self.is_done(item):
                self.left.append(self._position[item.item_id])

    def _person(self, _event: Event, content: Mapping[str, Any]) -> None:
        person = Person(**content)
        before = self.people.get(person.person_id)
        self.people[person.person_id] = person
        if before is not None and (before.standing in NOT_COUNTED) != (person.standing in NOT_COUNTED):
            self._sort_all()

    def _sort_all(self) -> None:
        self.screening, self.gold, self.work, self.left = [], [], set(), []
        self.judged = self.overlapping = 0
        for item in self._order:
            if item.item_id not in self.withdrawn:
                self._sort(item)

    def _import(self, event: Event, content: Mapping[str, Any]) -> None:
        self.batches[content["batch"]] = event

    def _withdraw(self, _event: Event, content: Mapping[str, Any]) -> None:
        changed = {one.item_id for one in self.of_batch(content["batch"])} if content["batch"] else {*content["items"]}
        self.withdrawn = self.withdrawn | changed if content["withdrawn"] else self.withdrawn - changed
        self._sort_all()

    def of_batch(self, batch: str) -> list[Item]:
        """Return the items that an import added."""
        return [item for item in self._order if item.batch == batch]

    def _instructions(self, _event: Event, content: Mapping[str, Any]) -> None:
        self.instructions.append(content["text"])

    def _label(self, event: Event, content: Mapping[str, Any]) -> None:
        days, answers_item = _days(event), self._answers_item(event)  # first: an invalid event changes nothing
        self._count(event)
        self.labels_by.update(days)
        if answers_item:
            self.answers.setdefault(content["item"], {})[str(event.person)] = event
            self._look_again(content["item"])

    def _skip(self, event: Event, _content: Mapping[str, Any]) -> None:
        self._count(event)

    def _retract(self, _event: Event, content: Mapping[str, Any]) -> None:
        old = self.counting[content["event"]]
        del self.counting[old.event_id]
        trail = self.trail[str(old.person)]
        del trail[next(i for i in reversed(range(len(trail))) if trail[i].event_id == old.event_id)]
        self.undone.setdefault(str(old.person), []).append(old)
        item = old.content["item"]
        if old.kind == "label":
            self.labels_by.subtract(_days(old))
        if old.kind == "label" and self._answers_item(old):
            del self.answers[item][str(old.person)]
            self._look_again(item)

    def _correct(self, event: Event, content: Mapping[str, Any]) -> None:
        old = self.counting[content["event"]]
        changed = {"answer": content["answer"], "corrected_by": event.person}
        new = dataclasses.replace(old, content={**old.content, **changed})
        self.counting[old.event_id] = new
        trail = self.trail[str(old.person)]
        trail[trail.index(old)] = new
        of_item = self.answers.get(old.content["item"], {})
        if of_item.get(str(old.person)) is old:
            of_item[str(old.person)] = new
        self.corrections.setdefault(old.event_id, []).append(event)

    def _count(self, event: Event) -> None:
        _ = self.items[event.content["item"]], self.people[str(event.person)]
        self.counting[event.event_id] = event
        self.trail.setdefault(str(event.person), []).append(event)
        undone = self.undone.pop(str(event.person), [])
        if undone and event.content.get("again") == undone[-1].event_id:
            self.undone[str(event.person)] = undone[:-1]

    def _answers_item(self, event: Event) -> bool:
        chat = self.items[event.content["item"]].task == "chat"
        return not event.content["repeat"] and (not chat or bool(event.content["answer"]["last"]))

    def _look_again(self, item_id: str) -> None:
        """Update whether an item is left to label."""
        item, position = self.items[item_id], self._position[item_id]
        place = bisect.bisect_left(self.left, position)
        is_left = place < len(self.left) and self.left[place] == position
        should = item_id in self.work and not self.is_done(item)
        if should and not is_left:
            self.left.insert(place, position)
        elif is_left and not should:
            del self.left[place]

    def person(self, person_id: str) -> Person:
        """Return a person by id. Raises DataError if there is none."""
        person = self.people.get(person_id)
        if person is None:
            raise DataError(f"there is no person {person_id!r:.80} in this project")
        return person

    def not_done(self) -> list[Item]:
        """Return the items that are not done, in their order."""
        return [self._order[position] for position in self.left]

    def at(self, position: int) -> Item:
        """Return the item that was added at a position, from 0."""
        return self._order[position]

    def counted(self, item_id: str) -> int:
        """Return how many people have labelled an item, without those who label for evaluation only or were refused."""
        return sum(self.people[person].standing not in NOT_COUNTED for person in self.answers.get(item_id, ()))

    def is_done(self, item: Item) -> bool:
        """True if enough people have labelled an item."""
        return self.counted(item.item_id) >= item.needed

    def turns(self, person_id: str, item_id: str) -> tuple[Event, ...]:
        """Return a person's labels of the turns of a chat."""
        return tuple(
            event
            for event in self.trail.get(person_id, [])
            if event.kind == "label" and event.content["item"] == item_id
        )

    def labels(self, *, also_withdrawn: bool = False) -> list[LabelledItem]:
        """Return the counting labels in order; with ``also_withdrawn``, also those of withdrawn items."""
        return [
            LabelledItem(self.items[event.content["item"]], self.people[str(event.person)], event)
            for event in self.counting.values()
            if event.kind == "label" and (also_withdrawn or event.content["item"] not in self.withdrawn)
        ]


def _days(event: Event) -> list[tuple[str, str]]:
    """Keys of `State.labels_by` for a label."""
    return [(str(event.person), event.at[:10]), (str(event.person), "")]
