"""Operations of labellers: get, label, skip, undo, redo, save a draft. Each is one operation of the store.

The public ones are methods of `heedful.apps.label.project.Project`.
"""

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.apps.label.answers import (
    check_answer,
    check_flags,
    check_item,
    check_nonce,
    check_seconds,
    check_words,
    follows,
    from_screen,
    to_screen,
)
from heedful.apps.label.assignment import (
    NotHeldError,
    can_return,
    choose,
    chosen_to_overlap,
    may_label,
    screen_order,
    superseded,
)
from heedful.apps.label.people import screen
from heedful.apps.label.records import Assignment, Event, Item, Person, to_line, token_hash
from heedful.apps.label.state import State, item_content
from heedful.apps.label.store import Lease, Transaction, iso
from heedful.configs.label import Criterion
from heedful.errors import DataError

MOST_TABS = 8
"""Most drafts of a person for one item, one per tab."""


@dataclass(frozen=True)
class Saved:
    """Identity of a draft. Without tabs there is one."""

    tab: str = ""
    """Random id of the tab, drawn when it was loaded."""
    save: int = 0
    """Number of the draft in that tab."""
    begun: tuple[str, int] | None = None
    """Tab and number of the draft that this one started from."""


LONGEST_FILE = 200
"""Most characters kept of an imported file's name."""


def checked_items(items: Sequence[Item]) -> list[Item]:
    """Return items, each id once. Raises DataError for one that is invalid or cannot be stored."""
    found: dict[str, Item] = {}
    for item in items:
        check_item(item)
        to_line(item_content(item))
        found.setdefault(item.item_id, item)
    return list(found.values())


def add_items(transaction: Transaction, items: Sequence[Item]) -> int:
    """Add the new items of `checked_items`, and return their number."""
    new = {item.item_id: item for item in items if item.item_id not in transaction.state.items}
    settings = transaction.settings
    overlapping = chosen_to_overlap(transaction.state, settings, list(new.values()))
    new |= {one: dataclasses.replace(new[one], needed=settings.overlap_people) for one in overlapping}
    for item in new.values():
        transaction.add("item", None, item_content(item))
    return len(new)


def next_item(transaction: Transaction, person_id: str, *, chats: bool = True) -> Assignment | None:
    """Return the item that a person holds, else give them the next one; None if there is none.

    ``chats=False``: there is no model to talk to, so the next item is not a chat.
    """
    person = transaction.state.person(person_id)
    if not may_label(person):
        return None
    lease = transaction.leases.of(person_id)
    if lease is None:
        choice = choose(transaction, person, chats=chats)
        if choice is None:
            return None
        lease = _give(transaction, person, *choice)
    _hold_on(transaction, person_id, dataclasses.replace(lease, token=lease.token or secrets.token_urlsafe(12)))
    return held(transaction, person_id)


def _give(transaction: Transaction, person: Person, item: Item, repeat: bool) -> Lease:
    """Give a person a lease on an item for some minutes; ended leases of others are removed."""
    for other in superseded(transaction, person, item, repeat):
        transaction.leases.drop("lease", other)
    lease = Lease(item.item_id, repeat, 0)
    transaction.leases.hold(person.person_id, lease)
    return lease


def _hold_on(transaction: Transaction, person_id: str, lease: Lease) -> None:
    """Extend a person's lease by some minutes."""
    until = transaction.now + 60 * transaction.settings.lease_minutes
    transaction.leases.hold(person_id, dataclasses.replace(lease, until=until))


def held(transaction: Transaction, person_id: str) -> Assignment | None:
    """Return the item that a person holds, or None. Read-only."""
    state, lease = transaction.state, transaction.leases.of(person_id)
    if lease is None:
        return None
    item = state.items[lease.item_id]
    drafts = transaction.leases.drafts(person_id, item.item_id)
    last = drafts[-1] if drafts else None
    return Assignment(
        item,
        screen_order(state, transaction.settings, person_id, item, lease.repeat),
        iso(lease.until),
        lease.repeat,
        None if last is None else last["draft"],
        len(state.instructions),
        lease.token,
        state.turns(person_id, item.item_id) if item.task == "chat" else (),
        None if last is None else f"{last['tab']}.{last['save']}",
        _words(drafts[:-1]),
    )


def label(
    transaction: Transaction,
    person_id: str,
    item_id: str,
    answer: Mapping[str, Any],
    *,
    nonce: str,
    seconds: float,
    comment: str = "",
    flags: Sequence[str] = (),
    expected_version: int | None = None,
    token: str | None = None,
    active: float | None = None,
) -> Event:
    """Record a person's answer to the item that they hold.

    Args:
        nonce: unique per submission; a repeated nonce changes nothing and returns the first event.
        seconds: how long it took, from shown to sent.
        active: the working part of that time (docs/labelling-statistics.md); None if unknown.
        expected_version: version of the instructions shown to the person; None: the newest.
        token: of the `Assignment` on a page. The answer then uses places on the screen, and is accepted only while the
            person holds that assignment. Without it the answer uses candidates, as in chats.

    Raises NotHeldError if the person does not hold the item, DataError if the answer is invalid for the task.
    """
    state, settings = transaction.state, transaction.settings
    kept = {
        "seconds": check_seconds(seconds),
        **({} if active is None else {"active": check_seconds(active, "active", most=seconds)}),
        "comment": check_words("comment", comment),
        "flags": check_flags(flags),
    }

    def in_candidates(order: Sequence[int]) -> dict[str, Any]:
        on_screen = token is not None and state.items[item_id].task != "chat"
        given = from_screen(answer, order) if on_screen else answer
        return check_answer(state.items[item_id], given, criteria=settings.criteria_asked)

    def again(event: Event) -> Mapping[str, Any]:  # with the candidate order of the label that has the nonce
        if event.content["item"] != item_id:
            return {"item": item_id}
        said = {"answer": in_candidates(event.content["order"]), "comment": comment, "flags": kept["flags"]}
        return {**json.loads(to_line(said)), "again": None}

    before = _sent_before(state, person_id, nonce, ("label",), again)
    if before is not None:
        return before
    lease = _held_lease(transaction, person_id, item_id, token)
    item = state.items[item_id]
    order = screen_order(state, settings, person_id, item, lease.repeat)
    checked = in_candidates(order)
    if item.task == "chat":
        _check_follows(state.turns(person_id, item_id), checked["messages"])
    content = {
        "item": item_id,
        "answer": checked,
        "order": list(order),
        "instructions": _version(state, expected_version),
        **kept,
        "repeat": lease.repeat,
    }
    if token is not None and item.suggestion is not None:  # it was shown on a page
        content["suggestion_followed"] = follows(checked, item.suggestion)
    event = transaction.add("label", person_id, content, nonce)
    _settle(transaction, event)
    return event


def _settle(transaction: Transaction, event: Event) -> None:
    """After a label or skip, remove the draft and the lease, unless a chat continues."""
    person_id, item = str(event.person), transaction.state.items[event.content["item"]]
    transaction.leases.keep_drafts(person_id, item.item_id, [])
    if event.kind == "label" and event.content["answer"].get("last") is False:
        _hold_on(transaction, person_id, transaction.leases.of(person_id) or Lease(item.item_id, repeat=False, until=0))
    else:
        transaction.leases.drop("lease", person_id)
    if item.screening:
        screen(transaction)


def label_contents(
    items: Mapping[str, Item],
    answers: Sequence[tuple[str, Mapping[str, Any]]],
    criteria: Sequence[Criterion],
    beside: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return imported labels as contents of events, one per item. Raises DataError for an invalid one.

    ``beside`` has ``comment``, ``flags`` and ``suggestion_followed`` of labels, by item.
    """
    contents: dict[str, dict[str, Any]] = {}
    for item_id, answer in answers:
        item, more = _find_item(items, item_id), beside.get(item_id, {})
        if item.task == "chat":
            raise DataError(f"item {item_id} is a chat; labels of chats cannot be imported")
        content = {
            "item": item_id,
            "answer": check_answer(item, answer, strength_known=False, criteria=criteria),
            "order": list(range(len(item.candidates))),
            "instructions": 0,
            "seconds": None,
            "comment": check_words("comment", more.get("comment", "")),
            "flags": check_flags(more.get("flags", [])),
            "repeat": False,
        }
        if isinstance(followed := more.get("suggestion_followed"), bool):
            content["suggestion_followed"] = followed
        to_line(content)
        contents.setdefault(item_id, content)
    return list(contents.values())


def add_labels(transaction: Transaction, person_id: str, contents: Sequence[Mapping[str, Any]]) -> int:
    """Record `label_contents` for items without a label of this person, and return their number."""
    transaction.state.person(person_id)
    answers = transaction.state.answers
    new = [content for content in contents if person_id not in answers.get(content["item"], {})]
    for content in new:
        transaction.add("label", person_id, content)
    return len(new)


def skip(  # noqa: PLR0917  as callers have it
    transaction: Transaction,
    person_id: str,
    item_id: str,
    reason: str,
    flags: Sequence[str],
    nonce: str,
    *,
    token: str | None = None,
) -> Event:
    """Record that a person skips the item they hold; they do not get it again. Raises as `label`."""
    said = {"item": item_id, "reason": check_words("reason", reason), "flags": check_flags(flags)}
    before = _sent_before(transaction.state, person_id, nonce, ("skip",), lambda _: {**said, "again": None})
    if before is not None:
        return before
    lease = _held_lease(transaction, person_id, item_id, token)
    event = transaction.add("skip", person_id, {**said, "repeat": lease.repeat}, nonce)
    _settle(transaction, event)
    return event


def undo(
    transaction: Transaction,
    person_id: str,
    nonce: str,
    *,
    session: str | None = None,
    trained: int = 0,
) -> tuple[Event, Assignment | None] | None:
    """Take back a person's last label or skip, and give its item back, as `Project.undo` says.

    Args:
        session: the token of a session; earlier labels are not undone.
        trained: the last event used in training (`heedful.apps.label.rounds_page.trained_on`); earlier labels are not undone.
    """
    state, leases = transaction.state, transaction.leases
    before = _sent_before(state, person_id, nonce, ("retract",), lambda _: {})
    if before is not None:
        return before, next_item(transaction, person_id)
    person = _labelling_person(state, person_id)
    trail = state.trail.get(person_id, [])
    last = next((event for event in reversed(trail) if event.nonce is not None), None)  # imported labels have none
    if last is None:
        return None
    item, repeat = state.items[last.content["item"]], last.content["repeat"]
    is_trained = last.kind == "label" and last.seq <= trained
    signed_in = None if session is None else leases.get("session", token_hash(session))
    for is_closed, why, code in (
        (last.event_id in state.corrections, "the owner has corrected it", "undo_corrected"),
        (is_trained, "a round has trained on it", "undo_trained"),
        (
            signed_in is not None and last.seq <= signed_in.value.get("since", 0),
            "it was given before you signed in with this browser",
            "undo_session",
        ),
    ):
        if is_closed:
            cannot = f"your last {last.kind} cannot be taken back: {why}"
            raise NotHeldError(f"{cannot}; tell the owner if that is wrong", code)
    event = transaction.add("retract", person_id, {"event": last.event_id}, nonce)
    is_theirs = last.kind == "label" and item.item_id not in state.withdrawn
    if is_theirs or can_return(transaction, person, item, repeat):
        _give(transaction, person, item, repeat)
    if last.kind == "label":
        leases.keep_drafts(person_id, item.item_id, [{"tab": "", "save": 0, "draft": _as_draft(last)}])
    return event, next_item(transaction, person_id)


def redo(transaction: Transaction, person_id: str, nonce: str) -> tuple[Event, Assignment | None] | None:
    """Restore a person's last undone label or skip, unless they have labelled or skipped something since.

    Returns the new event and the item that the person holds now; None if there is nothing to restore. A repeated nonce
    returns the same event. Raises NotHeldError if others have the item by now.
    """
    state, leases = transaction.state, transaction.leases
    before = _sent_before(
        state, person_id, nonce, ("label", "skip"), lambda event: {"again": event.content.get("again", "")}
    )
    if before is not None:
        return before, next_item(transaction, person_id)
    person = _labelling_person(state, person_id)
    undone = state.undone.get(person_id)
    if not undone:
        return None
    old = undone[-1]
    item, repeat = state.items[old.content["item"]], old.content["repeat"]
    if item.item_id in state.withdrawn:
        raise NotHeldError("this label cannot be restored: the owner has withdrawn its item", "withdrawn")
    now = leases.of(person_id)
    is_held = now is not None and (now.item_id, now.repeat) == (item.item_id, repeat)
    if old.kind == "label" and not is_held and not can_return(transaction, person, item, repeat):
        raise NotHeldError("this label cannot be restored: others have its item by now", "redo_gone")
    event = transaction.add(old.kind, person_id, {**old.content, "again": old.event_id}, nonce)
    if old.kind == "label" or is_held:
        leases.drop("lease", person_id)
        _settle(transaction, event)
    else:
        leases.keep_drafts(person_id, item.item_id, [])
        if item.screening:
            screen(transaction)
    following = state.undone.get(person_id)
    if following and leases.of(person_id) is None:  # hold the item that redo would restore next
        item, repeat = state.items[following[-1].content["item"]], following[-1].content["repeat"]
        if can_return(transaction, person, item, repeat):
            _give(transaction, person, item, repeat)
    return event, next_item(transaction, person_id)


def begin_batch(transaction: Transaction, file: str) -> str:
    """Record the start of an import, and return the ``batch`` of its items."""
    batch = f"{len(transaction.state.batches) + 1} {file[:LONGEST_FILE]}"
    transaction.add("import", None, {"batch": batch})
    return batch


def withdraw(
    transaction: Transaction,
    person_id: str | None,
    *,
    batch: str = "",
    items: Sequence[str] = (),
    back: bool = False,
    reason: str = "",
) -> int:
    """Withdraw the items of an import, or single ones: they are not assigned, and their labels are kept but do not count.

    Args:
        person_id: the person who does it; None for a command.
        batch: the import, or its number.
        items: ids of items; ignored with a batch.
        back: put them back instead.

    Returns the number of changed items. Raises DataError for an unknown import or item.
    """
    state, reason = transaction.state, check_words("reason", reason)
    known = [one for one in state.batches if batch and batch in (one, one.partition(" ")[0])]
    if batch and not known:
        have = ", ".join(state.batches) or "none"
        raise DataError(f"there is no import {batch!r:.80} in this project; it has {have}")
    chosen = (
        [one.item_id for one in state.of_batch(known[0])]
        if known
        else [_find_item(state.items, one).item_id for one in items]
    )
    changed = [one for one in chosen if (one in state.withdrawn) == back]
    if not changed:
        return 0
    content = {"batch": known[0] if known else "", "items": [] if known else changed, "withdrawn": not back}
    transaction.add("withdraw", person_id, content | {"reason": reason})
    for person, lease in transaction.leases.by_person().items():
        if lease.item_id in state.withdrawn:
            transaction.leases.drop("lease", person)
    return len(changed)


def correct(
    transaction: Transaction,
    person_id: str,
    event_id: str,
    answer: Mapping[str, Any],
    *,
    nonce: str,
    reason: str = "",
) -> Event:
    """Replace a label's answer, as an owner. The label counts with the new answer; the events keep both.

    Args:
        event_id: the label's event id.
        answer: the fields that change, in terms of candidates.

    Raises DataError for a person who is not an owner, a label that does not count, and an answer invalid for the task.
    """
    state, reason = transaction.state, check_words("reason", reason)
    before = _sent_before(state, person_id, nonce, ("correct",), lambda _: {"event": event_id, "reason": reason})
    if before is not None:
        return before
    person = state.person(person_id)
    if person.role != "owner":
        raise DataError(f"{person.name} is {person.role}; only owners correct labels of others")
    old = state.counting.get(event_id)
    if old is None or old.kind != "label":
        raise DataError(f"no counting label has the id {event_id!r:.80}; it may have been taken back")
    item = state.items[old.content["item"]]
    fixed = [name for name in ("messages", "responses", "last") if name in answer]
    if item.task == "chat" and fixed:
        raise DataError(f"{fixed[0]} of a turn of a chat cannot be corrected; preferred, strength and both_bad can")
    kept = {name: value for name, value in old.content["answer"].items() if name not in answer}
    said = {"criteria": kept.pop("criteria")} if "criteria" in kept else {}  # unchanged, even if others are asked now
    asked = transaction.settings.criteria_asked if "criteria" in answer else ()
    known = old.content["seconds"] is not None
    new = check_answer(item, {**kept, **answer}, strength_known=known, criteria=asked) | said
    if new == old.content["answer"]:
        raise DataError("the answer equals the label's current one; nothing was corrected")
    content = {"event": event_id, "answer": new, "old": old.content["answer"], "reason": reason}
    event = transaction.add("correct", person_id, content, nonce)
    if item.screening:
        screen(transaction)
    return event


def save_draft(
    transaction: Transaction,
    person_id: str,
    item_id: str,
    draft: Any,
    *,
    token: str | None = None,
    saved: Saved = Saved(),
) -> tuple[Mapping[str, str], ...]:
    """Save a person's draft of the item they hold, and extend the lease. Raises NotHeldError.

    A draft of None only extends the lease. Each tab (``saved``) has its own draft, which replaces its earlier one, and the
    one that it started from unless changed since. Returns ``text`` and ``comment`` of the drafts of other tabs.
    """
    lease = _held_lease(transaction, person_id, item_id, token)
    drafts = transaction.leases.drafts(person_id, item_id)
    others = [one for one in drafts if one["tab"] != saved.tab]
    is_late = any(one["tab"] == saved.tab and one["save"] > saved.save for one in drafts)
    if draft is not None and not is_late:
        others = [one for one in others if (one["tab"], one["save"]) != saved.begun and one["draft"] != draft]
        if len(others) >= MOST_TABS:
            raise NotHeldError(
                f"{MOST_TABS} tabs have a draft of this item already; continue in one of them", "many_tabs"
            )
        own = {"tab": saved.tab, "save": saved.save, "draft": draft}
        transaction.leases.keep_drafts(person_id, item_id, [*others, own])
    _hold_on(transaction, person_id, lease)
    return _words(others)


def _words(drafts: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, str], ...]:
    """Non-empty texts and comments of drafts."""
    found = []
    for one in drafts:
        draft = one["draft"] if isinstance(one["draft"], Mapping) else {}
        answer = draft.get("answer")
        said = {"text": answer.get("text") if isinstance(answer, Mapping) else "", "comment": draft.get("comment")}
        words = {name: text if isinstance(text, str) else "" for name, text in said.items()}
        if any(words.values()):
            found.append(words)
    return tuple(found)


def _as_draft(event: Event) -> dict[str, Any]:
    """A label as a draft: the answer with places on the screen, without the sources of a chat's answers."""
    answer = to_screen(event.content["answer"], event.content["order"])
    if "responses" in answer:
        answer["responses"] = [
            {"response": answer["responses"][candidate]["response"]} for candidate in event.content["order"]
        ]
    return {"answer": answer, "comment": event.content["comment"], "flags": event.content["flags"]}


def _find_item(items: Mapping[str, Item], item_id: str) -> Item:
    item = items.get(item_id)
    if item is None:
        raise DataError(f"there is no item {item_id!r:.80} in this project")
    return item


def _labelling_person(state: State, person_id: str) -> Person:
    person = state.person(person_id)
    if not may_label(person):
        what = "a viewer" if person.role == "viewer" else person.standing
        raise DataError(f"{person.name} is {what} and cannot label")
    return person


def _sent_before(
    state: State, person_id: str, nonce: str, kinds: tuple[str, ...], said: Callable[[Event], Mapping[str, Any]]
) -> Event | None:
    """The event of a nonce, or None. Raises NotHeldError if its kind or content differs from ``said``."""
    event = state.sent.get((person_id, check_nonce(nonce)))
    if event is None:
        return None
    is_kind = event.kind in kinds
    other = [name for name, value in said(event).items() if event.content.get(name) != value] if is_kind else []
    if not is_kind or other:
        what = f"{event.kind} with another {' and '.join(other)}" if is_kind else event.kind
        raise NotHeldError(
            f"the nonce {nonce!r:.80} was used before, at {event.at}, for a {what}: that one is recorded, the new one "
            "is not; use a new nonce for each submission",
            "nonce_used",
        )
    return event


def _held_lease(transaction: Transaction, person_id: str, item_id: str, token: str | None) -> Lease:
    person = _labelling_person(transaction.state, person_id)
    _find_item(transaction.state.items, item_id)
    if item_id in transaction.state.withdrawn:
        raise NotHeldError("the owner has withdrawn this item; continue with the next one", "withdrawn")
    lease = transaction.leases.of(person_id)
    if lease is None or lease.item_id != item_id or token not in (None, lease.token):
        raise NotHeldError(
            f"{person.name} does not hold the item {item_id} as shown: it was already answered, or its lease "
            "ended and somebody else has it; continue with the next item"
        )
    return lease


def _check_follows(turns: Sequence[Event], messages: Sequence[Any]) -> None:
    """Raise NotHeldError if a turn of a chat does not continue the previous turn."""
    before = turns[-1].content["answer"]["messages"] if turns else []
    if turns and (list(messages[: len(before)]) != before or len(messages) < len(before) + 2):
        raise NotHeldError(
            "this turn of the chat was already answered; reload the page to continue with the next one",
            "turn_answered",
        )


def _version(state: State, expected: int | None) -> int:
    newest = len(state.instructions)
    if expected is None:
        return newest
    if isinstance(expected, bool) or not isinstance(expected, int) or not 0 <= expected <= newest:
        raise DataError(f"expected_version must be a version of the instructions, 0 to {newest}, got {expected!r:.80}")
    return expected
