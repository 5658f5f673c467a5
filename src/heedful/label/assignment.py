"""Who gets which item next, how much is left, and why somebody gets none. Nothing here changes anything."""

from collections import Counter
from collections.abc import Sequence

from heedful.configs.label import ProjectSettings
from heedful.errors import DataError
from heedful.label.answers import JUDGED, may_overlap
from heedful.label.records import Item, Person, draw, order_of
from heedful.label.state import State
from heedful.label.store import Lease, Transaction

REPEAT_AFTER = 10
"""A hidden repeat comes after at least so many other labels."""


class NotHeldError(DataError):
    """What a person sends does not fit what happened before: they do not hold the item, because it was labelled or its lease
    has ended; or a label cannot be taken back any more, or was sent before in another way.

    ``code`` lets their page say it in its own language.
    """

    def __init__(self, message: str, code: str = "not_held") -> None:
        super().__init__(message)
        self.code = code


def choose(transaction: Transaction, person: Person, *, chats: bool = True) -> tuple[Item, bool] | None:
    """Return what a person is to label next and whether it is a hidden repeat; None if there is nothing for them now.

    The owner begins with the screening items, an annotator in screening gets only those. Afterwards items come in the order
    in which they were added, each to no more people at a time than it still needs, with hidden repeats in between, and, as
    long as there is other work, gold questions. Those who label for evaluation only get every item once, whatever others do
    with it. Without ``chats`` nobody gets one.
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
    """The next item that a person is to label for the first time."""
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
    """A gold question, if it is time for one: each person's are spread evenly over what is left for them, by chance.

    The chance is G / (W + G), at most the project's share, with G gold questions that the person has not had and W items
    that are likely to be left for them, if those who have labelled share what is left.
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
    """True for people who label: not viewers, nor those who were refused or removed."""
    return person.role != "viewer" and person.standing not in ("refused", "removed")


def touched_by(state: State, person: Person) -> set[str]:
    """Return the ids of the items that a person has labelled or skipped. A chat is labelled with its last turn."""
    return {
        event.content["item"]
        for event in state.trail.get(person.person_id, [])
        if not event.content["repeat"] and not (event.kind == "label" and event.content["answer"].get("last") is False)
    }


def screening_set(state: State, person: Person, settings: ProjectSettings) -> list[Item]:
    """Return the screening items of a person in screening: those that the owner has labelled come first."""
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
    """How many others hold each item, to label it for the first time."""
    return Counter(
        lease.item_id
        for person_id, lease in transaction.leases.by_person().items()
        if lease.until > transaction.now and _keeps_off(transaction.state, person, person_id, lease)
    )


def can_return(transaction: Transaction, person: Person, item: Item, repeat: bool) -> bool:
    """True if an item can go back to somebody who had it: it is not withdrawn, and the others leave room for one more."""
    state = transaction.state
    if item.item_id in state.withdrawn:
        return False
    if repeat or item.screening or item.gold is not None or person.standing == "held-out":
        return True
    return state.counted(item.item_id) + _held(transaction, person)[item.item_id] < item.needed


def _keeps_off(state: State, person: Person, holder: str, lease: Lease) -> bool:
    """Whether what somebody holds is kept from a person."""
    return holder != person.person_id and not lease.repeat and state.people[holder].standing != "held-out"


def superseded(transaction: Transaction, person: Person, item: Item, repeat: bool) -> list[str]:
    """Return who holds no more what a person is given now: of the leases that have ended, the oldest that have no room."""
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
    """Return which candidate is at each place on a person's screen; of a chat, which of the next turn's two answers."""
    if item.task == "chat":
        return order_of(settings.seed, item.item_id, person_id, len(state.turns(person_id, item.item_id)), 2)
    return order_of(settings.seed, item.item_id, person_id, repeat, len(item.candidates))


def chosen_to_overlap(state: State, settings: ProjectSettings, items: list[Item]) -> set[str]:
    """Return which of some new items several people label.

    So many that of all items of the project the share is exact: ``round(overlap * items)``. The draw is by hash.
    """
    judged = [item for item in items if may_overlap(item)]
    wanted = round(settings.overlap * (state.judged + len(judged)))
    wanted -= state.overlapping + sum(item.needed > 1 for item in judged)
    new = [item.item_id for item in judged if item.needed == 1]
    new.sort(key=lambda item_id: draw(settings.seed, "overlap", item_id))
    return set(new[: max(0, wanted)])


# How far a project and a person are, and why somebody has nothing to label


def progress(transaction: Transaction, person_id: str) -> dict[str, int]:
    """Return counts for a person's page.

    ``done``, ``left``: the project's items that are done and that are not; for somebody in screening, of their screening
    items, and for somebody who labels for evaluation only, of what they have labelled themselves. ``own``: this person's
    labels that count; ``today``: those of this day in UTC.
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
        # gold questions count as work, so that the page's numbers do not give them away
        mine = sum(item.item_id in touched for item in state.gold)
        done, left = done + mine, left + max(0, _gold_asked(state, settings) - mine) if left else 0
    own, today = state.labels_by[person_id, ""], state.labels_by[person_id, transaction.at[:10]]
    return {"done": done, "left": left, "own": own, "today": today}


def _gold_asked(state: State, settings: ProjectSettings) -> int:
    """How many gold questions somebody gets who labels everything, at most."""
    return min(len(state.gold), round(len(state.work) * settings.gold / (1 - settings.gold)))


def waiting(transaction: Transaction) -> int:
    """Return how many items wait at least for each person who labels, whoever else is labelling now.

    What somebody has labelled or skipped does not wait for them, though it may still need others; those in screening are left
    out. Below 0 if there are fewer items than people: others may hold one each, which they cannot be given now.
    """
    state = transaction.state
    people = [one for one in state.people.values() if may_label(one) and one.standing != "screening"]
    return min(len(_untouched(state, one)) for one in people) - len(people)


def _untouched(state: State, person: Person) -> list[Item]:
    """The items that a person could still be given: what they labelled or skipped may still wait for others."""
    touched = touched_by(state, person)
    if person.standing == "held-out":
        left = state.work - touched
        return [item for item in state.items.values() if item.item_id in left]
    return [item for item in state.not_done() if item.item_id not in touched]


def is_over(transaction: Transaction) -> bool:
    """True if somebody has labelled or skipped every item, screening items apart, and nobody holds one now."""
    work, leases = transaction.state.work, transaction.leases.by_person().values()
    touched = {event.content["item"] for event in transaction.state.counting.values()}
    at_work = any(lease.until > transaction.now and not lease.repeat for lease in leases)
    return bool(work) and not at_work and work <= touched


def chats_left(transaction: Transaction) -> int:
    """Return how many chats are not done."""
    return sum(item.task == "chat" for item in transaction.state.not_done())


def why_counted(transaction: Transaction, person_id: str, *, chats: bool = True) -> tuple[str, int]:
    """Return why `Project.next_item` has nothing for a person, and of how many items that is said; 0 if of none.

    ``viewer``, ``removed``, ``refused``, ``screening`` (the owner's labels or screening items are missing), ``empty`` (no
    items were added), ``done`` (all items are), ``through`` (this person is, who labels for evaluation only), ``others``
    (others hold what the person could still get), ``second`` (what is left waits for other people's labels, and there are
    such people), ``people`` (some items need more people than there are), or, without ``chats``, ``no-model`` (what is
    left for the person are chats).
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
    """How many items need more labels than the people who label now can still give."""
    people = [one for one in state.people.values() if may_label(one) and one.standing == "active"]
    touched = [touched_by(state, one) for one in people]
    return sum(
        state.counted(item.item_id) + sum(item.item_id not in one for one in touched) < item.needed for item in left
    )
