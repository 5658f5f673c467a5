"""What people do with items: get one, label it, skip it, take that back, keep a draft. Each is one operation of the store.

`heedful.label.project.Project` has those with a public name as methods.
"""

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from heedful.configs.label import Criterion
from heedful.errors import DataError
from heedful.label.answers import (
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
from heedful.label.assignment import (
    NotHeldError,
    can_return,
    choose,
    chosen_to_overlap,
    may_label,
    screen_order,
    superseded,
)
from heedful.label.people import screen
from heedful.label.records import Assignment, Event, Item, Person, to_line, token_hash
from heedful.label.state import State, item_content
from heedful.label.store import Lease, Transaction, iso

MOST_TABS = 8
"""Drafts that a person may have of one item, each of another tab."""


@dataclass(frozen=True)
class Saved:
    """Which draft somebody saves. Without tabs there is one."""

    tab: str = ""
    """The name of the tab, drawn when it was loaded."""
    save: int = 0
    """The how manyth draft of that tab."""
    begun: tuple[str, int] | None = None
    """The tab and the save of the draft that this one goes on from."""


LONGEST_FILE = 200
"""Characters of a file's name that are kept of an import."""


def checked_items(items: Sequence[Item]) -> list[Item]:
    """Return items, each id once. Raises DataError for one that cannot be shown or written down."""
    found: dict[str, Item] = {}
    for item in items:
        check_item(item)
        to_line(item_content(item))
        found.setdefault(item.item_id, item)
    return list(found.values())


def add_items(transaction: Transaction, items: Sequence[Item]) -> int:
    """Add those of `checked_items` whose ids are not there, and return how many."""
    new = {item.item_id: item for item in items if item.item_id not in transaction.state.items}
    settings = transaction.settings
    overlapping = chosen_to_overlap(transaction.state, settings, list(new.values()))
    new |= {one: dataclasses.replace(new[one], needed=settings.overlap_people) for one in overlapping}
    for item in new.values():
        transaction.add("item", None, item_content(item))
    return len(new)


def next_item(transaction: Transaction, person_id: str, *, chats: bool = True) -> Assignment | None:
    """Return the item that a person holds, else the next one for them, which they hold from now on; None if none is.

    ``chats=False``: there is nobody to talk to, so the next one is no chat.
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
    """Give a person an item, which `next_item` holds for some minutes; others whose leases have ended hold it no more."""
    for other in superseded(transaction, person, item, repeat):
        transaction.leases.drop("lease", other)
    lease = Lease(item.item_id, repeat, 0)
    transaction.leases.hold(person.person_id, lease)
    return lease


def _hold_on(transaction: Transaction, person_id: str, lease: Lease) -> None:
    """Keep an item for a person for some more minutes."""
    until = transaction.now + 60 * transaction.settings.lease_minutes
    transaction.leases.hold(person_id, dataclasses.replace(lease, until=until))


def held(transaction: Transaction, person_id: str) -> Assignment | None:
    """Return the item that a person holds; None if they hold none. Nothing changes."""
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
        nonce: the same for the same thing sent again, which then changes nothing and returns the same event.
        seconds: how long it took, from shown to sent.
        active: for how much of that time somebody worked (docs/labelling-statistics.md); None if nobody knows.
        expected_version: the version of the instructions that the person saw; None is the newest.
        token: that of the `Assignment` that a page shows. The answer then names places on its screen, and counts only
            while the person still holds that assignment. Without it the answer names candidates, as those of chats do.

    Raises NotHeldError if the person does not hold the item, DataError if the answer is not one that the task takes.
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

    def again(event: Event) -> Mapping[str, Any]:  # in the terms of the label that has the nonce
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
    if token is not None and item.suggestion is not None:  # a page has shown it
        content["suggestion_followed"] = follows(checked, item.suggestion)
    event = transaction.add("label", person_id, content, nonce)
    _settle(transaction, event)
    return event


def _settle(transaction: Transaction, event: Event) -> None:
    """After a label or a skip: the draft and the item are no longer the person's, but for a chat that goes on."""
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
    """Return labels that were given elsewhere as contents of events, one per item. Raises DataError for a wrong one.

    ``beside`` has the ``comment``, ``flags`` and ``suggestion_followed`` of labels, by item.
    """
    contents: dict[str, dict[str, Any]] = {}
    for item_id, answer in answers:
        item, more = _find_item(items, item_id), beside.get(item_id, {})
        if item.task == "chat":
            raise DataError(f"item {item_id} is a chat; labels of chats cannot be added from elsewhere")
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
    """Record those of `label_contents` whose items have no label of that person's, and return how many."""
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
    """Record that a person does not label the item that they hold; they are not given it again. Raises as `label`."""
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
    rounds: Set[int] = frozenset(),
) -> tuple[Event, Assignment | None] | None:
    """Take back a person's last label or skip, and give its item back, as `Project.undo` says.

    Args:
        session: the token of a session; what was done before it began stays.
        trained, rounds: what rounds have trained on (`heedful.label.rounds_page.trained_on`), which stays too.
    """
    state, leases = transaction.state, transaction.leases
    before = _sent_before(state, person_id, nonce, ("retract",), lambda _: {})
    if before is not None:
        return before, next_item(transaction, person_id)
    person = _labelling_person(state, person_id)
    trail = state.trail.get(person_id, [])
    last = next((event for event in reversed(trail) if event.nonce is not None), None)  # what was imported has none
    if last is None:
        return None
    item, repeat = state.items[last.content["item"]], last.content["repeat"]
    is_trained = last.kind == "label" and (last.seq <= trained or item.round in rounds)
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
    """Put back what a person took back last, as it was, unless they have labelled or skipped something since.

    Returns the new event and what the person holds now; None if there is nothing to put back. The same nonce again
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
        raise NotHeldError("this label cannot be put back: the owner has withdrawn its item", "withdrawn")
    now = leases.of(person_id)
    is_held = now is not None and (now.item_id, now.repeat) == (item.item_id, repeat)
    if old.kind == "label" and not is_held and not can_return(transaction, person, item, repeat):
        raise NotHeldError("this label cannot be put back: others have its item by now", "redo_gone")
    event = transaction.add(old.kind, person_id, {**old.content, "again": old.event_id}, nonce)
    if old.kind == "label" or is_held:
        leases.drop("lease", person_id)
        _settle(transaction, event)
    else:
        leases.keep_drafts(person_id, item.item_id, [])
        if item.screening:
            screen(transaction)
    following = state.undone.get(person_id)
    if following and leases.of(person_id) is None:  # hold what redo would put back next
        item, repeat = state.items[following[-1].content["item"]], following[-1].content["repeat"]
        if can_return(transaction, person, item, repeat):
            _give(transaction, person, item, repeat)
    return event, next_item(transaction, person_id)


def begin_batch(transaction: Transaction, file: str) -> str:
    """Record that the import of a file begins, and return what its items have as ``batch``."""
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
    """Withdraw the items of an import, or single ones: nobody gets them, and their labels are kept but do not count.

    Args:
        person_id: who does it; None for a command.
        batch: the import, or its number.
        items: ids of items; not looked at with a batch.
        back: put them back instead.

    Returns how many items that changed. Raises DataError for an import or item that is not there.
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
    """Put another answer in place of a label's, as an owner. The label counts with it; both stay among the events.

    Args:
        event_id: the label's event id.
        answer: the fields that change, in terms of candidates.

    Raises DataError for a person who is no owner, a label that does not count, and an answer that its task does not take.
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
        raise DataError(f"there is no label {event_id!r:.80} that counts; it may have been taken back")
    item = state.items[old.content["item"]]
    fixed = [name for name in ("messages", "responses", "last") if name in answer]
    if item.task == "chat" and fixed:
        raise DataError(f"{fixed[0]} of a turn of a chat cannot be corrected; preferred, strength and both_bad can")
    kept = {name: value for name, value in old.content["answer"].items() if name not in answer}
    said = {"criteria": kept.pop("criteria")} if "criteria" in kept else {}  # as it was, whatever is asked by now
    asked = transaction.settings.criteria_asked if "criteria" in answer else ()
    known = old.content["seconds"] is not None
    new = check_answer(item, {**kept, **answer}, strength_known=known, criteria=asked) | said
    if new == old.content["answer"]:
        raise DataError("the answer is the one that the label has; nothing was corrected")
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
    """Keep what a person has so far of the item that they hold, and keep the item for them. Raises NotHeldError.

    A draft of None only keeps the item. Each tab (``saved``) has a draft of its own, which replaces its earlier one, and the
    one that it began with, unless that has been changed since. Returns the ``text`` and ``comment`` of those of others.
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
    """What was written in drafts: texts and comments, where there are any."""
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
    """A label as a draft: the answer as it was on the screen, without what says who wrote the answers of a chat."""
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
    """The event of a nonce. Raises NotHeldError if it was another thing, or is not what is ``said`` now."""
    event = state.sent.get((person_id, check_nonce(nonce)))
    if event is None:
        return None
    is_kind = event.kind in kinds
    other = [name for name, value in said(event).items() if event.content.get(name) != value] if is_kind else []
    if not is_kind or other:
        what = f"{event.kind} with another {' and '.join(other)}" if is_kind else event.kind
        raise NotHeldError(
            f"the nonce {nonce!r:.80} was used before, at {event.at}, for a {what}: that is recorded, and what was sent now "
            "is not; send each new thing with a nonce of its own",
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
            f"{person.name} does not hold the item {item_id} as it was shown: it was answered already, or it was left for "
            "so long that somebody else has it; continue with the next item"
        )
    return lease


def _check_follows(turns: Sequence[Event], messages: Sequence[Any]) -> None:
    """Raise NotHeldError if a turn of a chat does not go on from the turn before."""
    before = turns[-1].content["answer"]["messages"] if turns else []
    if turns and (list(messages[: len(before)]) != before or len(messages) < len(before) + 2):
        raise NotHeldError(
            "this turn of the chat was answered already; reload the page to continue with the next one",
            "turn_answered",
        )


def _version(state: State, expected: int | None) -> int:
    newest = len(state.instructions)
    if expected is None:
        return newest
    if isinstance(expected, bool) or not isinstance(expected, int) or not 0 <= expected <= newest:
        raise DataError(f"expected_version must be a version of the instructions, 0 to {newest}, got {expected!r:.80}")
    return expected
