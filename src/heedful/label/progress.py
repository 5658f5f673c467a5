"""How far a project and a person are, and why somebody has nothing to label."""

from collections.abc import Sequence

from heedful.configs.label import ProjectSettings
from heedful.label.assignment import may_label, screening_set, touched_by
from heedful.label.leases import Leases
from heedful.label.people import find_person
from heedful.label.records import Item, Person
from heedful.label.state import State


def progress(state: State, settings: ProjectSettings, person_id: str, day: str) -> dict[str, int]:
    """Return ``done``, ``left``, ``own`` and ``today`` (of ``day``, such as 2026-03-01) for a person's page."""
    person = find_person(state, person_id)
    work = len(state.work)
    done, left = work - len(state.left), len(state.left)
    if person.standing == "screening":
        items = screening_set(state, person, settings)
        done = sum(person_id in state.answers.get(item.item_id, {}) for item in items)
        left = len(items) - done
    elif person.standing == "held-out":
        done = len(state.work & touched_by(state, person))
        left = work - done
    if person.standing != "screening":  # gold questions count as work, so that the page's numbers do not give them away
        touched = touched_by(state, person)
        mine = sum(item.item_id in touched for item in state.gold)
        done, left = done + mine, left + max(0, _gold_asked(state, settings) - mine) if left else 0
    own, today = state.labels_by[person_id, ""], state.labels_by[person_id, day]
    return {"done": done, "left": left, "own": own, "today": today}


def _gold_asked(state: State, settings: ProjectSettings) -> int:
    """How many gold questions somebody gets who labels everything, at most."""
    return min(len(state.gold), round(len(state.work) * settings.gold / (1 - settings.gold)))


def waiting(state: State) -> int:
    """Return how many items wait at least for each who labels: others may hold one each, which they cannot be given now.

    Those in screening are left out, since they get screening items only.
    """
    people = [one for one in state.people.values() if may_label(one) and one.standing != "screening"]
    return min(_untouched(state, one) for one in people) - len(people)


def _untouched(state: State, person: Person) -> int:
    """How many items a person could still be given: what they labelled or skipped may still wait for others."""
    touched = touched_by(state, person)
    if person.standing == "held-out":
        return len(state.work - touched)
    return sum(state.at(position).item_id not in touched for position in state.left)


def is_over(state: State, leases: Leases, now: float) -> bool:
    """True if somebody has labelled or skipped every item that is not for screening, and nobody is at work on one."""
    touched = {event.content["item"] for event in state.counting.values()}
    at_work = any(lease.until > now and not lease.repeat for lease in leases.by_person().values())
    return bool(state.work) and not at_work and state.work <= touched


def chats_left(state: State) -> int:
    """Return how many chats are not done."""
    return sum(state.at(position).task == "chat" for position in state.left)


def why_nothing(state: State, person_id: str, *, chats: bool = True) -> tuple[str, int]:
    """Return why a person has nothing to label, as `Project.why` lists it, and of how many items that is said."""
    person = find_person(state, person_id)
    if person.role == "viewer":
        return "viewer", 0
    if person.standing in ("removed", "refused", "screening"):
        return person.standing, 0
    if not state.work:
        return "empty", 0
    touched = touched_by(state, person)
    is_held_out = person.standing == "held-out"
    left = [item for item in state.items.values() if item.item_id in state.work] if is_held_out else state.not_done()
    mine = [item for item in left if item.item_id not in touched]
    if mine:
        return "no-model" if not chats and all(item.task == "chat" for item in mine) else "others", len(mine)
    if is_held_out or not left:
        return "through" if is_held_out else "done", 0
    lacking = _lacking_people(state, left)
    return ("people", lacking) if lacking else ("second", len(left))


def _lacking_people(state: State, left: Sequence[Item]) -> int:
    """How many items need more labels than the people who label now can still give."""
    people = [one for one in state.people.values() if may_label(one) and one.standing == "active"]
    touched = [touched_by(state, one) for one in people]
    return sum(
        state.counted(item.item_id) + sum(item.item_id not in one for one in touched) < item.needed for item in left
    )
