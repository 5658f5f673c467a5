"""People and access: invitations and sessions by tokens (only hashes are stored), and the screening of newcomers."""

import dataclasses
import hmac
import itertools
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from heedful.apps.label.answers import check_words, sides
from heedful.apps.label.assignment import owner_has, screening_set
from heedful.apps.label.records import Event, Person, Role, Standing, token_hash
from heedful.apps.label.state import State
from heedful.apps.label.store import LeaseRow, Leases, Transaction
from heedful.configs.label import ProjectSettings
from heedful.errors import DataError

INVITATION_HOURS = 72.0
"""Hours in which an invitation can be redeemed."""
SESSION_HOURS = 14 * 24.0
"""Hours of a session."""
FORGOTTEN_HOURS = 2 * 365 * 24.0
"""Hours for which ended tokens are kept: if the clock is wrong now, they are valid again once it is corrected."""
IMPORT: tuple[str, Role, Standing] = ("import", "annotator", "removed")
"""Name, role and standing of the person for imported labels. The name is reserved."""
LONGEST_NAME = 200
"""Most characters of a person's name."""
OWNER_LINK = "owner-link.json"
"""File with the SHA-256 of the owner link's token and its expiry. A new link replaces it, signing in removes it."""
OWNER_LINK_MINUTES = 15.0
"""Minutes in which the owner's link can be used."""


def add_person(transaction: Transaction, name: str, role: Role, standing: Standing | None = None) -> Person:
    """Add a person. An annotator without a ``standing`` begins in screening if the project screens, else as active."""
    screens = role == "annotator" and transaction.settings.screening_items > 0
    people = transaction.state.people
    number = next(n for n in itertools.count(len(people) + 1) if f"p{n}" not in people)
    person = _checked(Person(f"p{number}", name, role, standing or ("screening" if screens else "active")))
    transaction.add("person", None, dataclasses.asdict(person))
    return person


def set_person(
    transaction: Transaction,
    person_id: str,
    *,
    name: str | None = None,
    role: Role | None = None,
    standing: Standing | None = None,
) -> Person:
    """Change a person's name, role or standing; None: unchanged. A removed person is signed out.

    A change of role or standing releases the item they hold. Raises DataError for the only owner.
    """
    old = transaction.state.person(person_id)
    person = _checked(
        Person(
            person_id,
            old.name if name is None else name,
            old.role if role is None else role,
            old.standing if standing is None else standing,
        )
    )
    if person != old and (is_import(old) or is_import(person)):
        raise _reserved()
    if list(filter(is_owner, transaction.state.people.values())) == [old] and not is_owner(person):
        raise DataError(f"{old.name} is the only owner of the project; make somebody else an owner first")
    if person != old:
        transaction.add("person", None, dataclasses.asdict(person))
    if person.standing == "removed":
        _drop_tokens(transaction.leases, "session", person_id)
        _drop_tokens(transaction.leases, "invitation", person_id)
    if (person.role, person.standing) != (old.role, old.standing):
        transaction.leases.drop("lease", person_id)
    return person


def is_import(person: Person) -> bool:
    """True for the person who holds imported labels."""
    return (person.name, person.role, person.standing) == IMPORT


def _reserved() -> DataError:
    return DataError(f"the name {IMPORT[0]!r} is reserved for imported labels; give the person another name")


def is_owner(person: Person) -> bool:
    """True for an owner who can still sign in."""
    return person.role == "owner" and person.standing != "removed"


def _checked(person: Person) -> Person:
    for name, allowed in {"role": get_args(Role), "standing": get_args(Standing)}.items():
        if getattr(person, name) not in allowed:
            raise DataError(f"{name} must be one of {', '.join(allowed)}, got {getattr(person, name)!r:.80}")
    if not check_words("name", person.name, LONGEST_NAME).strip():
        raise DataError("the name of a person is empty; give one that others know")
    if person.name == IMPORT[0] and not is_import(person):
        raise _reserved()
    if person.role != "annotator" and person.standing not in ("active", "removed"):
        raise DataError(f"the standing {person.standing} is for annotators only; {person.name} is {person.role}")
    return person


def invite(
    transaction: Transaction, person_id: str, hours: float = INVITATION_HOURS, *, session: str | None = None
) -> str:
    """Return a token that signs a person in once, within some hours.

    Invalidates an earlier token and ends their sessions, except the one with the token ``session``, which lasts until the
    new token is used.
    """
    person = transaction.state.person(person_id)
    if person.standing == "removed":
        raise DataError(f"{person.name} was removed; set their standing to active to invite them again")
    _drop_tokens(transaction.leases, "invitation", person_id)
    _drop_tokens(transaction.leases, "session", person_id, keep=None if session is None else token_hash(session))
    return _new_token(transaction, "invitation", person_id, hours)


def redeem(transaction: Transaction, token: str, hours: float) -> str | None:
    """Exchange an invitation's token, which becomes invalid, for that of a new session; None if it is invalid.

    Other sessions of the same person end.
    """
    person = _holder(transaction, "invitation", token)
    if person is None:
        return None
    transaction.leases.drop("invitation", token_hash(token))
    return _sign_in(transaction, person, hours)


def sign_in_owner(transaction: Transaction, hours: float) -> str:
    """Return the token of a new session of the first owner who can sign in; adds an owner if there is none."""
    owner = next(filter(is_owner, transaction.state.people.values()), None)
    return _sign_in(transaction, owner or add_person(transaction, "owner", "owner"), hours)


def _sign_in(transaction: Transaction, person: Person, hours: float) -> str:
    _drop_tokens(transaction.leases, "session", person.person_id)
    return _new_token(transaction, "session", person.person_id, hours)


def session(transaction: Transaction, token: str) -> Person | None:
    """Return the person of a session token; None if it is invalid or expired, or the person was removed."""
    return _holder(transaction, "session", token)


def end_session(transaction: Transaction, token: str) -> None:
    """Sign out."""
    transaction.leases.drop("session", token_hash(token))


def _holder(transaction: Transaction, kind: str, token: str) -> Person | None:
    """The person of a token; None if it does not exist or has expired, or the person was removed.

    Tokens are looked up by hash, so the time of the search does not depend on the token; the comparison takes constant time.
    """
    given = token_hash(token)
    row = transaction.leases.get(kind, given)
    if row is None or not hmac.compare_digest(given, row.value["hash"]) or (row.until or 0) <= transaction.now:
        return None
    person = transaction.state.people.get(row.value["person"])
    return None if person is None or person.standing == "removed" else person


def _new_token(transaction: Transaction, kind: str, person_id: str, hours: float) -> str:
    token = secrets.token_urlsafe(32)
    key = token_hash(token)
    for other, row in list(transaction.leases.rows(kind).items()):
        if (row.until or 0) + FORGOTTEN_HOURS * 3600 <= transaction.now:
            transaction.leases.drop(kind, other)
    value = {"hash": key, "person": person_id, "since": transaction.state.seq}
    transaction.leases.put(kind, key, LeaseRow(value, transaction.now + hours * 3600))
    return token


def _drop_tokens(leases: Leases, kind: str, person_id: str, keep: str | None = None) -> None:
    for key, row in list(leases.rows(kind).items()):
        if row.value["person"] == person_id and key != keep:
            leases.drop(kind, key)


def screen(transaction: Transaction) -> None:
    """Accept or refuse people in screening who have labelled all their screening items, once the owner has labelled them.

    After many skips, the remaining items decide if they are at least half of the number asked.
    """
    state, settings = transaction.state, transaction.settings
    for person in [one for one in state.people.values() if one.standing == "screening"]:
        agreement = screening_agreement(state, person, settings)
        if agreement is not None:
            standing: Standing = "active" if agreement >= settings.screening_agreement else "refused"
            transaction.add("person", None, dataclasses.asdict(dataclasses.replace(person, standing=standing)))
            if standing == "refused":
                transaction.leases.drop("lease", person.person_id)


def screening_agreement(state: State, person: Person, settings: ProjectSettings) -> float | None:
    """Return a newcomer's mean agreement with the owner on their screening items; None if labels are missing."""
    items = screening_set(state, person, settings)
    labels = [state.answers.get(item.item_id, {}) for item in items]
    ready = all(owner_has(state, item) and person.person_id in own for item, own in zip(items, labels, strict=True))
    asked = settings.screening_items
    if len(state.screening) >= asked > len(items):  # the others were skipped, and no more are left
        asked = max(1, -(-asked // 2))
    if len(items) < asked or not items or not ready:
        return None
    return sum(_agreement(state, own, person) for own in labels) / len(items)


def _agreement(state: State, labels: dict[str, Event], person: Person) -> float:
    owner = next(event for one, event in labels.items() if state.people[one].role == "owner")
    mine = labels[person.person_id]
    item = state.items[mine.content["item"]]
    return agreement(item.task, owner.content["answer"], mine.content["answer"])


def agreement(task: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the agreement of two answers to an item, from 0 to 1.

    Pair: 1 for the same preference or both ties, else 0. Ranking: the share of pairs of answers in the same order or tied
    in both. Rating: 1 if they differ by at most 1, else 0.
    """
    if task == "pair":
        return float(one["preferred"] == other["preferred"])
    if task == "rating":
        return float(abs(one["rating"] - other["rating"]) <= 1)
    mine, theirs = sides(one["ranks"]), sides(other["ranks"])
    return sum(mine[pair] == theirs[pair] for pair in mine) / len(mine)


# The owner's one-time link: needs only write access to the project's folder, also while it is served


def make_owner_link(folder: Path) -> str:
    """Return the token of a new link. Its file is created readable for this user only."""
    token = secrets.token_urlsafe(32)
    temporary = folder / f"{OWNER_LINK}.{secrets.token_hex(8)}"
    content = json.dumps({"hash": token_hash(token), "until": time.time() + 60 * OWNER_LINK_MINUTES})
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(content)
    temporary.replace(folder / OWNER_LINK)
    return token


def take_owner_link(folder: Path, token: str) -> bool:
    """Return whether a token is that of the link, which then becomes invalid. Setting the clock back does not extend it."""
    try:
        content = json.loads((folder / OWNER_LINK).read_text(encoding="utf-8"))
        is_right = hmac.compare_digest(str(content["hash"]), token_hash(token))
        left = float(content["until"]) - time.time()
    except (OSError, ValueError, TypeError, KeyError):
        return False  # missing or unusable
    if not is_right:
        return False
    try:
        (folder / OWNER_LINK).unlink()
    except OSError:
        return False  # somebody else was faster
    return 0 < left <= 60 * OWNER_LINK_MINUTES
