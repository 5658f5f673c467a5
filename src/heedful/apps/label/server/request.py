"""A request to the labelling server after all checks, and how handlers read its fields and answer.

Every error about a field has its name.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.responses import JSONResponse

from heedful.apps.label.labelling import Saved
from heedful.apps.label.project import Project
from heedful.apps.label.records import Person
from heedful.apps.label.server.policy import Buffer, PolicyWorker, Turns
from heedful.apps.label.server.security import Access, Audit
from heedful.data.readers import kind_of, listed

TAB = re.compile(r"[A-Za-z0-9_-]{0,64}")
DRAFT = re.compile(r"([A-Za-z0-9_-]{0,64})\.([0-9]{1,9})")
NONCE = re.compile(r"[A-Za-z0-9_-]{8,64}")


@dataclass(frozen=True)
class Site:
    """A served project."""

    project: Project
    access: Access
    worker: PolicyWorker | None = None
    """The process that writes answers; None without a policy."""
    buffer: Buffer | None = None
    """The buffer of ready items."""
    closing: Any = None
    """`heedful.apps.label.server.run.Closing`, which stops the server once all is labelled; None without ``--until-done``."""
    turns: Turns = field(default_factory=Turns)
    """Chat answers that wait for a choice."""

    @cached_property
    def audit(self) -> Audit:
        """Log of sign-ins and of owners' actions."""
        return Audit(self.project.folder / "audit.jsonl")


class Json(JSONResponse):
    """A JSON answer with unescaped Unicode. A value that JSON cannot hold is a bug."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class Refused(Exception):  # noqa: N818  a reply, not an error of ours
    """Refuse a request with a status and a message.

    ``code`` and ``values`` let the page translate the message (``said_...`` in pages/words).
    """

    def __init__(self, status: int, message: str, code: str = "", **values: int | str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.values = values


@dataclass(frozen=True)
class ApiRequest:
    """A request after all checks: the person and the fields."""

    person: Person | None
    """The person; None only for routes without a session."""
    session: str | None
    """The token of the session."""
    body: Mapping[str, Any]
    """The fields of a POST."""
    query: Mapping[str, str]
    """The fields of a GET."""
    address: str
    """The client's address."""
    host: str
    """The Host header: host and port."""

    @property
    def caller(self) -> Person:
        """The person, for routes with a session."""
        assert self.person is not None
        return self.person


def only(fields: Mapping[str, Any], *names: str) -> None:
    """Refuse unknown fields, so that a misspelt one is not lost."""
    unknown = sorted(fields.keys() - set(names))
    if unknown:
        raise Refused(422, f"unknown field {listed(unknown)}; the fields are {', '.join(names)}")


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
    """Return the nonce, which a page draws for each submission."""
    value = fields.get("nonce")
    if not isinstance(value, str) or not NONCE.fullmatch(value):
        raise _wrong(fields, "nonce", "8 to 64 letters, digits, _ or -, new for each label")
    return value


def answer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer; the store checks its content."""
    value = fields.get("answer")
    if not isinstance(value, dict):
        raise _wrong(fields, "answer", "an object")
    return value


def saved(fields: Mapping[str, Any]) -> Saved:
    """Return the identity of a draft: its tab, its number there, and the draft that it started from."""
    tab, save, begun = fields.get("tab", ""), fields.get("save", 0), fields.get("from")
    if not isinstance(tab, str) or not TAB.fullmatch(tab):
        raise _wrong(fields, "tab", "up to 64 letters, digits, _ or -, new for each page")
    if type(save) is not int or not 0 <= save < 10**9:
        raise _wrong(fields, "save", "a whole number from 0")
    found = DRAFT.fullmatch(begun) if isinstance(begun, str) else None
    if begun is not None and found is None:
        raise _wrong(fields, "from", "the draft_of of an item")
    return Saved(tab, save, None if found is None else (found[1], int(found[2])))


def switch(fields: Mapping[str, Any], name: str) -> bool:
    """Return true or false; false if absent."""
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(fields, name, "true or false")
    return value


def one_of(fields: Mapping[str, Any], name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
    """Return one of the allowed words."""
    value = fields.get(name, default)
    if value not in allowed:
        raise _wrong(fields, name, f"one of {', '.join(allowed)}")
    return str(value)


def _wrong(fields: Mapping[str, Any], name: str, allowed: str) -> Refused:
    got = f"{fields[name]!r:.60} ({kind_of(fields[name])})" if name in fields else "nothing"
    return Refused(422, f"{name} must be {allowed}, got {got}")
