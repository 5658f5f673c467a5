"""A request to the labelling server that has passed every check: what handlers get, and how they read its fields and answer.

Whatever is wrong with a field is said with its name.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from heedful.data.readers import kind_of, listed
from heedful.label.labelling import Saved
from heedful.label.project import Project
from heedful.label.records import Person
from heedful.label.server.buffer import Buffer
from heedful.label.server.chat import Turns
from heedful.label.server.closing import Closing
from heedful.label.server.security import Access, Audit
from heedful.label.server.worker import PolicyWorker

TAB = re.compile(r"[A-Za-z0-9_-]{0,64}")
DRAFT = re.compile(r"([A-Za-z0-9_-]{0,64})\.([0-9]{1,9})")
NONCE = re.compile(r"[A-Za-z0-9_-]{8,64}")
LONGEST_NAME = 200
LONGEST_COMMENT = 10_000
LONGEST_SECONDS = 10**7


@dataclass(frozen=True)
class Site:
    """A project, as it is served."""

    project: Project
    access: Access
    audit: Audit
    turns: Turns
    """Answers of chats that wait for a choice."""
    worker: PolicyWorker | None
    """The process that writes answers; None if the project has only imported ones."""
    buffer: Buffer | None
    """What keeps items ready for it."""
    closing: Closing | None = None
    """What ends the server once everything is labelled; None if it serves until somebody ends it."""


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
        raise Refused(422, f"{name} must be a string, got {_got(fields, name)}")
    if not least <= len(value) <= most:
        raise Refused(422, f"{name} must have {least} to {most} characters, got {len(value)}")
    return value


def nonce(fields: Mapping[str, Any]) -> str:
    """Return the number that a page makes once per thing sent."""
    value = fields.get("nonce")
    if not isinstance(value, str) or not NONCE.fullmatch(value):
        raise Refused(
            422, f"nonce must be 8 to 64 letters, digits, _ or -, made anew per label, got {_got(fields, 'nonce')}"
        )
    return value


def item_id(fields: Mapping[str, Any]) -> str:
    """Return the id of an item."""
    return text(fields, "item", most=100)


def assignment(fields: Mapping[str, Any]) -> str:
    """Return the token that came with an item: what a page says about the item counts only with it."""
    return text(fields, "assignment", most=100)


def seconds(fields: Mapping[str, Any], name: str = "seconds") -> float:
    """Return how long something took."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_SECONDS:
        raise Refused(422, f"{name} must be a number from 0 to {LONGEST_SECONDS}, got {_got(fields, name)}")
    return float(value)


def saved(fields: Mapping[str, Any]) -> Saved:
    """Return which draft is saved: the how manyth of which tab, and from which draft it began."""
    tab, save, begun = fields.get("tab", ""), fields.get("save", 0), fields.get("from")
    if not isinstance(tab, str) or not TAB.fullmatch(tab):
        raise Refused(
            422, f"tab must be up to 64 letters, digits, _ or -, drawn anew per page, got {_got(fields, 'tab')}"
        )
    if isinstance(save, bool) or not isinstance(save, int) or not 0 <= save < 10**9:
        raise Refused(422, f"save must be a whole number from 0, got {_got(fields, 'save')}")
    found = DRAFT.fullmatch(begun) if isinstance(begun, str) else None
    if begun is not None and found is None:
        raise Refused(422, f"from must be the draft_of of an item, got {_got(fields, 'from')}")
    return Saved(tab, save, None if found is None else (found[1], int(found[2])))


def flags(fields: Mapping[str, Any], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Return a list of known flags, each at most once, in the order in which they are known."""
    value = fields.get("flags", [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value) or set(value) - set(allowed):
        raise Refused(422, f"flags must be a list of {', '.join(allowed)}, got {value!r:.100}")
    return tuple(one for one in allowed if one in value)


def switch(fields: Mapping[str, Any], name: str) -> bool:
    """Return true or false; false if it is not there."""
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise Refused(422, f"{name} must be true or false, got {_got(fields, name)}")
    return value


def one_of(fields: Mapping[str, Any], name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
    """Return one of some words."""
    value = fields.get(name, default)
    if value not in allowed:
        raise Refused(422, f"{name} must be one of {', '.join(allowed)}, got {_got(fields, name)}")
    return str(value)


def _got(fields: Mapping[str, Any], name: str) -> str:
    return f"{fields[name]!r:.60} ({kind_of(fields[name])})" if name in fields else "nothing"
