"""A request to the labelling server that has passed every check: what handlers get, and how they read its fields and answer.

Whatever is wrong with a field is said with its name.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.responses import JSONResponse

from heedful.data.readers import kind_of, listed
from heedful.label.labelling import Saved
from heedful.label.project import Project
from heedful.label.records import Person
from heedful.label.server.policy import Buffer, PolicyWorker, Turns
from heedful.label.server.security import Access, Audit

TAB = re.compile(r"[A-Za-z0-9_-]{0,64}")
DRAFT = re.compile(r"([A-Za-z0-9_-]{0,64})\.([0-9]{1,9})")
NONCE = re.compile(r"[A-Za-z0-9_-]{8,64}")


@dataclass(frozen=True)
class Site:
    """A project, as it is served."""

    project: Project
    access: Access
    worker: PolicyWorker | None = None
    """The process that writes answers; None if the project has only imported ones."""
    buffer: Buffer | None = None
    """What keeps items ready for it."""
    closing: Any = None
    """`heedful.label.server.run.Closing`, which ends the server once everything is labelled; None if nothing does."""
    turns: Turns = field(default_factory=Turns)
    """Answers of chats that wait for a choice."""

    @cached_property
    def audit(self) -> Audit:
        """Where it is noted who signed in, and what owners did."""
        return Audit(self.project.folder / "audit.jsonl")


class Json(JSONResponse):
    """An answer as JSON, with text as it is. A value that JSON cannot hold is a mistake of ours."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class Refused(Exception):  # noqa: N818  an answer, not a mistake
    """A request that is answered with a status and a sentence.

    ``code`` and ``values`` let the page say the sentence in its own language (``said_...`` in pages/words).
    """

    def __init__(self, status: int, message: str, code: str = "", **values: int | str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.values = values


@dataclass(frozen=True)
class ApiRequest:
    """A request that has passed every check: who asks, and what with."""

    person: Person | None
    """Who asks; None only for what needs no session."""
    session: str | None
    """The token of the session."""
    body: Mapping[str, Any]
    """The fields of a POST."""
    query: Mapping[str, str]
    """The fields of a GET."""
    address: str
    """The client's address."""
    host: str
    """What it calls this server: host and port."""

    @property
    def caller(self) -> Person:
        """Who asks, where a session is needed."""
        assert self.person is not None
        return self.person


def only(fields: Mapping[str, Any], *names: str) -> None:
    """Refuse fields that are not known: a misspelt one would be lost."""
    unknown = sorted(fields.keys() - set(names))
    if unknown:
        raise Refused(422, f"unknown field {listed(unknown)}; there are {', '.join(names)}")


def text(fields: Mapping[str, Any], name: str, *, most: int, least: int = 1, default: str | None = None) -> str:
    """Return a string of ``least`` to ``most`` characters."""
    value = fields.get(name, default)
    if not isinstance(value, str):
        raise _wrong(fields, name, "a string")
    if not least <= len(value) <= most:
        raise Refused(422, f"{name} must have {least} to {most} characters, got {len(value)}")
    return value


def identifier(fields: Mapping[str, Any], name: str) -> str:
    """Return the id of an item, label or person, or the token that came with an item."""
    return text(fields, name, most=100)


def nonce(fields: Mapping[str, Any]) -> str:
    """Return the number that a page makes once per thing sent."""
    value = fields.get("nonce")
    if not isinstance(value, str) or not NONCE.fullmatch(value):
        raise _wrong(fields, "nonce", "8 to 64 letters, digits, _ or -, made anew per label")
    return value


def answer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer, of which the store checks the rest."""
    value = fields.get("answer")
    if not isinstance(value, dict):
        raise _wrong(fields, "answer", "an object")
    return value


def saved(fields: Mapping[str, Any]) -> Saved:
    """Return which draft is saved: the how manyth of which tab, and from which draft it began."""
    tab, save, begun = fields.get("tab", ""), fields.get("save", 0), fields.get("from")
    if not isinstance(tab, str) or not TAB.fullmatch(tab):
        raise _wrong(fields, "tab", "up to 64 letters, digits, _ or -, drawn anew per page")
    if type(save) is not int or not 0 <= save < 10**9:
        raise _wrong(fields, "save", "a whole number from 0")
    found = DRAFT.fullmatch(begun) if isinstance(begun, str) else None
    if begun is not None and found is None:
        raise _wrong(fields, "from", "the draft_of of an item")
    return Saved(tab, save, None if found is None else (found[1], int(found[2])))


def switch(fields: Mapping[str, Any], name: str) -> bool:
    """Return true or false; false if it is not there."""
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(fields, name, "true or false")
    return value


def one_of(fields: Mapping[str, Any], name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
    """Return one of some words."""
    value = fields.get(name, default)
    if value not in allowed:
        raise _wrong(fields, name, f"one of {', '.join(allowed)}")
    return str(value)


def _wrong(fields: Mapping[str, Any], name: str, allowed: str) -> Refused:
    got = f"{fields[name]!r:.60} ({kind_of(fields[name])})" if name in fields else "nothing"
    return Refused(422, f"{name} must be {allowed}, got {got}")
