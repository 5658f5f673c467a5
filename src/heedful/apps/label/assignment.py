"""Choose the next item for a person, count the items left, and explain why there is none. Read-only."""

from collections import Counter
from collections.abc import Sequence

from heedful.apps.label.answers import JUDGED, may_overlap
from heedful.apps.label.records import Item, Person, draw, order_of
from heedful.apps.label.state import State
from heedful.apps.label.store import Lease, Transaction
from heedful.configs.label import ProjectSettings
from heedful.errors import DataError

REPEAT_AFTER = 10
"""Least number of other labels before a hidden repeat."""


class NotHeldError(DataError):
    """A submission conflicts with earlier events: the person does not hold the item, because it was labelled or its lease
    ended; a label can no longer be taken back; or it was already sent with other content.

    ``code`` lets the page translate the message.
    """

    def __init__(self, message: str, code: str = "not_held") -> None:
        super().__init__(message)
        self.code = code


def choose(transaction: Transaction, person: Person, *, chats: bool = True) -> tuple[Item, bool] | None:
    """Return the next item for a person and whether it is a hidden repeat; None if there is none now.

    The owner begins with the screening items; an annotator in screening gets only those. Other items come in the order in
    which they were added, each to no more people at a time than it still needs, mixed with hidden repeats and, as long as
    there is other work, gold questions. People who label for evaluation only get every item once, independent of others.
    With ``chats=False`` no chat is chosen.
    """
    if not may_label(person):
        return None
    state, settings = transaction.state, transaction.settings
    touched = touched_by(state, person)
    if person.standing == "screening" or person.role == "owner":
        item = _screening_item(state, person, settings, touched)
        if item is not None or person.standing == "screening":
            return None if item is None else (item, False)
    item = _work(transaction, person, touched, chats=chats)
    gold = None if item is None else _gold(state, person, settings, touched)
    if gold is not None:
        return gold, False
    repeat = _repeat(state, person, settings)
    if repeat is not None:
        return repeat, True
    return None if item is None else (item, False)


def _work(transaction: Transaction, person: Person, touched: set[str], *, chats: bool) -> Item | None:
    """The next item, not a repeat, for a person."""
    state = transaction.state
    if person.standing == "held-out":
        items = (item for item in state.items.values() if item.item_id in state.work and item.item_id not in touched)
        return next((item for item in items if chats or item.task != "chat"), None)
    held = _held(transaction, person)
    for position in state.left:
        item = state.at(position)
        if item.task == "chat" and not chats:
            continue
        if item.item_id not in touched and state.counted(item.item_id) + held[item.item_id] < item.needed:
            return item
    return None


def _gold(state: State, person: Person, settings: ProjectSettings, touched: set[str]) -> Item | None:
    """A gold question, or None: each person's gold questions are spread at random over the items left for them.

    The probability is G / (W + G), at most the project's share, with G gold questions new to the person and W the expected
    number of items left for them, if active labellers share the rest.
    """
    asked = [item for item in state.gold if item.item_id not in touched]
    if not asked:
        return None
    sharing = len({person.person_id, *(one for one, trail in state.trail.items() if trail)})
    left = len(state.work - touched) if person.standing == "held-out" else -(-len(state.left) // sharing)
    count = len(state.trail.get(person.person_id, []))
    if draw(settings.seed, "gold", person.person_id, count) >= min(settings.gold, len(asked) / (left + len(asked))):
        return None
    return min(asked, key=lambda item: draw(settings.seed, "which gold", person.person_id, item.item_id))


def may_label(person: Person) -> bool:
    """True for people who label: not for viewers, refused or removed people."""
    return person.role != "viewer" and person.standing not in ("refused", "removed")


def touched_by(state: State, person: Person) -> set[str]:
    """Return the ids of the items that a person has labelled or skipped. A chat counts after its last turn."""
    return {
        event.content["item"]
        for event in state.trail.get(person.person_id, [])
        if not event.content["repeat"] and not (event.kind == "label" and event.content["answer"].get("last") is False)
    }


def screening_set(state: State, person: Person, settings: ProjectSettings) -> list[Item]:
    """Return the screening items of a person in screening, first those labelled by the owner."""
    skipped = {event.content["item"] for event in state.trail.get(person.person_id, []) if event.kind == "skip"}
    items = [item for item in state.screening if item.item_id not in skipped]
    items.sort(key=lambda item: not owner_has(state, item))
    mine = [item for item in items if person.person_id in state.answers.get(item.item_id, {})]
    others = [item for item in items if person.person_id not in state.answers.get(item.item_id, {})]
    return (mine + others)[: settings.screening_items]


def owner_has(state: State, item: Item) -> bool:
    """True if an owner has labelled an item."""
    return any(state.people[person].role == "owner" for person in state.answers.get(item.item_id, ()))


def _screening_item(state: State, person: Person, settings: ProjectSettings, touched: set[str]) -> Item | None:
    if person.role == "owner":
        items = [item for item in state.screening if not owner_has(state, item)]
    else:
        items = screening_set(state, person, settings)
    return next((item for item in items if item.item_id not in touched), None)


def _repeat(state: State, person: Person, settings: ProjectSettings) -> Item | None:
    trail = state.trail.get(person.person_id, [])
    if draw(settings.seed, "repeat", person.person_id, len(trail)) >= settings.repeats:
        return None
    again = {event.content["item"] for event in trail if event.content["repeat"]}
    labels = [event for event in trail if event.kind == "label"]
    candidates = [
        event.content["item"]
        for event in labels[:-REPEAT_AFTER]
        if event.content["item"] not in again | state.withdrawn
        and state.items[event.content["item"]].task in JUDGED
        and state.items[event.content["item"]].gold is None
    ]
    if not candidates:
        return None
    place = int(draw(settings.seed, "which", person.person_id, len(trail)) * len(candidates))
    return state.items[candidates[place]]


def _held(transaction: Transaction, person: Person) -> Counter[str]:
    """How many others hold each item, repeats not counted."""
    return Counter(
        lease.item_id
        for person_id, lease in transaction.leases.by_person().items()
        if lease.until > transaction.now and _keeps_off(transaction.state, person, person_id, lease)
    )


def can_return(transaction: Transaction, person: Person, item: Item, repeat: bool) -> bool:
    """True if an item can go back to a person: it is not withdrawn, and other people leave room for a label."""
    state = transaction.state
    if item.item_id in state.withdrawn:
        return False
    if repeat or item.screening or item.gold is not None or person.standing == "held-out":
        return True
    return state.counted(item.item_id) + _held(transaction, person)[item.item_id] < item.needed


def _keeps_off(state: State, person: Person, holder: str, lease: Lease) -> bool:
    """Whether a holder's lease keeps a person from getting the item."""
    return holder != person.person_id and not lease.repeat and state.people[holder].standing != "held-out"


def superseded(transaction: Transaction, person: Person, item: Item, repeat: bool) -> list[str]:
    """Return people who lose an item given to this person: the oldest ended leases beyond the number needed."""
    if repeat or item.screening or item.gold is not None or person.standing == "held-out":
        return []
    state, leases = transaction.state, transaction.leases.by_person()
    ended = [
        holder
        for holder, lease in leases.items()
        if lease.item_id == item.item_id and lease.until <= transaction.now and _keeps_off(state, person, holder, lease)
    ]
    ended.sort(key=lambda holder: leases[holder].until)
    room = item.needed - state.counted(item.item_id) - _held(transaction, person)[item.item_id] - 1
    return ended[: max(0, len(ended) - max(0, room))]


def screen_order(state: State, settings: ProjectSettings, person_id: str, item: Item, repeat: bool) -> tuple[int, ...]:
    """Return which candidate is at each place on a person's screen; for a chat, which of the next turn's two answers."""
    if item.task == "chat":
        return order_of(settings.seed, item.item_id, person_id, len(state.turns(person_id, item.item_id)), 2)
    return order_of(settings.seed, item.item_id, person_id, repeat, len(item.candidates))


def chosen_to_overlap(state: State, settings: ProjectSettings, items: list[Item]) -> set[str]:
    """Return the new items that several people label.

    Their number makes the project's share exact: ``round(overlap * items)``. The draw is by hash.
    """
    judged = [item for item in items if may_overlap(item)]
    wanted = round(settings.overlap * (state.judged + len(judged)))
    wanted -= state.overlapping + sum(item.needed > 1 for item in judged)
    new = [item.item_id for item in judged if item.needed == 1]
    new.sort(key=lambda item_id: draw(settings.seed, "overlap", item_id))
    return set(new[: max(0, wanted)])


# Progress, and reasons for having no item


def progress(transaction: Transaction, person_id: str) -> dict[str, int]:
    """Return counts for a person's page.

    ``done``, ``left``: the project's items that are done and not done; in screening, the person's screening items; for
    evaluation only, the person's own items. ``own``: this person's labels that count; ``today``: those of this day in
    UTC.
    """
    state, settings = transaction.state, transaction.settings
    person = state.person(person_id)
    done, left = len(state.work) - len(state.left), len(state.left)
    if person.standing == "screening":
        items = screening_set(state, person, settings)
        done = sum(person_id in state.answers.get(item.item_id, {}) for item in items)
        left = len(items) - done
    else:
        touched = touched_by(state, person)
        if person.standing == "held-out":
            done = len(state.work & touched)
            left = len(state.work) - done
        # count gold questions as work, so that the page's numbers do not reveal them
        mine = sum(item.item_id in touched for item in state.gold)
        done, left = done + mine, left + max(0, _gold_asked(state, settings) - mine) if left else 0
    own, today = state.labels_by[person_id, ""], state.labels_by[person_id, transaction.at[:10]]
    return {"done": done, "left": left, "own": own, "today": today}


def _gold_asked(state: State, settings: ProjectSettings) -> int:
    """Most gold questions for one person."""
    return min(len(state.gold), round(len(state.work) * settings.gold / (1 - settings.gold)))


def waiting(transaction: Transaction) -> int:
    """Return the least number of items left for any labeller, less the number of labellers, who may hold one each.

    Items that a person has labelled or skipped are not left for them; people in screening are ignored. Can be below 0.
    """
    state = transaction.state
    people = [one for one in state.people.values() if may_label(one) and one.standing != "screening"]
    return min(len(_untouched(state, one)) for one in people) - len(people)


def _untouched(state: State, person: Person) -> list[Item]:
    """Items not yet labelled or skipped by a person; finished ones only if they label for evaluation."""
    touched = touched_by(state, person)
    if person.standing == "held-out":
        left = state.work - touched
        return [item for item in state.items.values() if item.item_id in left]
    return [item for item in state.not_done() if item.item_id not in touched]


def is_over(transaction: Transaction) -> bool:
    """True if every item except screening items was labelled or skipped, and nobody holds one."""
    work, leases = transaction.state.work, transaction.leases.by_person().values()
    touched = {event.content["item"] for event in transaction.state.counting.values()}
    at_work = any(lease.until > transaction.now and not lease.repeat for lease in leases)
    return bool(work) and not at_work and work <= touched


def chats_left(transaction: Transaction) -> int:
    """Return how many chats are not done."""
    return sum(item.task == "chat" for item in transaction.state.not_done())


def why_counted(transaction: Transaction, person_id: str, *, chats: bool = True) -> tuple[str, int]:
    """Return the reason why `Project.next_item` has nothing for a person, and the number of items it refers to, or 0.

    ``viewer``, ``removed``, ``refused``, ``screening`` (the owner's labels or screening items are missing), ``empty`` (no
    items), ``done`` (all items are done), ``through`` (this person, who labels for evaluation only, is done), ``others``
    (others hold the person's remaining items), ``second`` (the rest waits for labels of other, existing people),
    ``people`` (some items need more people than there are), or, with ``chats=False``, ``no-model`` (only chats are left for
    the person).
    """
    state = transaction.state
    person = state.person(person_id)
    if person.role == "viewer":
        return "viewer", 0
    if person.standing in ("removed", "refused", "screening"):
        return person.standing, 0
    if not state.work:
        return "empty", 0
    if mine := _untouched(state, person):
        return "no-model" if not chats and all(item.task == "chat" for item in mine) else "others", len(mine)
    left = state.not_done()
    if person.standing == "held-out" or not left:
        return "through" if person.standing == "held-out" else "done", 0
    lacking = _lacking_people(state, left)
    return ("people", lacking) if lacking else ("second", len(left))


def _lacking_people(state: State, left: Sequence[Item]) -> int:
    """How many items need more labels than the current people can give."""
    people = [one for one in state.people.values() if may_label(one) and one.standing == "active"]
    touched = [touched_by(state, one) for one in people]
    return sum(
        state.counted(item.item_id) + sum(item.item_id not in one for one in touched) < item.needed for item in left
    )
