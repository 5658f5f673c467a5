"""Records of labelling: items, candidates, people, events; and ids derived from their content.

Plain data that converts to JSON and back. An item is fixed when it is added. Adding it, and everything later (a label, an
undo, a skip, a new person), is an `Event`; events are only appended, and the state of a project is their sum.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from heedful.configs.label import Task
from heedful.errors import DataError

TASKS: tuple[str, ...] = get_args(Task)
Role = Literal["owner", "annotator", "viewer"]
Standing = Literal["screening", "active", "refused", "held-out", "removed"]
"""Standing of an annotator: in screening, active, refused by screening, labelling for evaluation only, removed."""

RATING_FLAGS = (
    "fails-instruction",
    "inappropriate-for-assistant",
    "hallucination",
    "satisfies-constraint",
    "sexual-content",
    "violent-content",
    "encourages-violence",
    "denigrates-protected-class",
    "harmful-advice",
    "expresses-opinion",
    "moral-judgement",
)
"""Flags of a rating (Ouyang et al. 2022, table 3)."""
ITEM_FLAGS = ("personal-data", "unsafe", "broken")
"""Flags of an item itself."""
MOST_ANSWERS = 9
"""Most candidates of a ranking."""
STRENGTHS = (1, 2, 3, 4)
"""How much better the preferred answer of a pair is: 1 negligibly, 2 slightly, 3 better, 4 significantly (Llama 2:
Touvron et al. 2023, section 3.2.1)."""


@dataclass(frozen=True)
class Candidate:
    """An answer by a person or a model."""

    response: Any
    """Text, the assistant's message as an object, or a list of messages that begins and ends with one (docs/data.md)."""
    source: Mapping[str, Any] | None = None
    """Its origin: checkpoint, sampling settings, seed. Never leaves the server before the item is labelled."""


@dataclass(frozen=True)
class Item:
    """One thing to label: a prompt, and the answers to judge if the task has any.

    ``pair`` has two candidates, ``ranking`` two to nine, ``rating`` and ``correction`` one, ``demonstration`` none or one (a
    draft to edit), ``chat`` none: its answers are written while people talk.
    """

    item_id: str
    task: Task
    prompt: Any
    """Raw text, or a list of messages."""
    candidates: tuple[Candidate, ...] = ()
    needed: int = 1
    """How many people have to label it; more than 1 for the share of items that overlap."""
    round: int = 1
    chosen_by: Literal["import", "random", "active"] = "import"
    """How it was selected: imported, drawn at random, or by disagreement of reward models."""
    screening: bool = False
    """True if it belongs to the set on which new annotators are compared with the owner."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The record's other columns, kept for the export."""
    batch: str = ""
    """The import that added it, such as "3 pairs.jsonl"; empty if none did."""
    gold: Mapping[str, Any] | None = None
    """The known answer of a gold question; gold questions are mixed into the work and not trained on."""
    suggestion: Mapping[str, Any] | None = None
    """A suggested answer, in terms of candidates; the page shows it as a suggestion."""


@dataclass(frozen=True)
class Person:
    """A person with an invitation."""

    person_id: str
    name: str
    role: Role
    standing: Standing = "active"


@dataclass(frozen=True)
class Event:
    """A recorded change, itself never changed.

    ``kind`` and ``content``:

    - ``item``: the fields of an `Item`
    - ``person``: the fields of a `Person`; a later one for the same ``person_id`` replaces it
    - ``instructions``: ``version`` (1, 2, ...), ``text``
    - ``label``: ``item``, ``answer`` (below), ``order`` (candidate index at each place on the screen, left or top first),
      ``instructions`` (version), ``seconds`` (from shown to sent; None if the label was imported), ``active`` (working
      seconds among them; absent if unknown), ``comment``, ``flags`` (of
      `ITEM_FLAGS`), ``repeat`` (True for a hidden repeat); if a suggestion was shown, ``suggestion_followed`` (whether the
      answer equals it); after a redo also ``again``, the id of the label that was taken back
    - ``skip``: ``item``, ``reason``, ``flags``, ``repeat``; after a redo also ``again``
    - ``retract``: ``event`` (the id of a label or skip of the same person, which no longer counts)
    - ``correct``: ``event`` (the id of anybody's label), ``answer`` (the owner's new answer), ``old``
      (the answer before), ``reason``. The label counts with the new answer, and has the owner's id as ``corrected_by``
    - ``lost``: no content; it has the number of an event that was damaged and had no other copy
    - ``import``: ``batch``, of the items that follow
    - ``withdraw``: ``batch`` or, if that is empty, ``items`` (ids); ``withdrawn`` (True; False puts them back), ``reason``

    ``answer``, by task; candidates are named by their index in the item, never by their place on the screen:

    - pair: ``preferred`` (0, 1, or None for a tie), ``strength`` (1 to 4; None for a tie, and for an imported preference
      without one), ``both_bad`` (True only with a tie)
    - ranking: ``ranks``, one integer from 1 for each candidate; lower is better, equal ranks tie
    - rating: ``rating`` (1 to 7), ``flags`` (of `RATING_FLAGS`)
    - demonstration: ``text``
    - correction: ``text``, which differs from the candidate
    - chat: one label per turn: ``messages`` (the conversation up to and including the person's message), ``responses`` (two
      candidates as objects with ``response`` and ``source``), ``preferred``, ``strength``, ``both_bad`` as for a pair,
      ``last`` (True ends the chat); ``order`` is that of ``responses``
    """

    seq: int
    """1, 2, 3, ... without gaps."""
    event_id: str
    at: str
    """UTC, ISO 8601 with milliseconds."""
    person: str | None
    """The person who did it; None for the program."""
    kind: Literal["item", "person", "instructions", "label", "skip", "retract", "correct", "import", "withdraw", "lost"]
    content: Mapping[str, Any]
    nonce: str | None = None
    """Drawn by the page for each submission; the same nonce and person again return the first event."""


@dataclass(frozen=True)
class LabelledItem:
    """A counting label, with its item and person."""

    item: Item
    person: Person
    event: Event


@dataclass(frozen=True)
class Snapshot:
    """A project at one moment."""

    items: Sequence[Item] = ()
    """In the order in which they were added, including withdrawn ones."""
    labels: Sequence[LabelledItem] = ()
    """Labels not taken back, in order, including those of withdrawn items."""
    events: Sequence[Event] = ()
    people: Sequence[Person] = ()
    withdrawn: Set[str] = frozenset()
    """Ids of the withdrawn items."""

    def counting(self) -> list[LabelledItem]:
        """Return the labels of items that are not withdrawn."""
        return [one for one in self.labels if one.item.item_id not in self.withdrawn]


@dataclass(frozen=True)
class Assignment:
    """An item that a person holds."""

    item: Item
    order: tuple[int, ...]
    """The index of the candidate at each place on the screen; for a chat, of the next turn's two answers."""
    lease_until: str
    """End of the lease, UTC, ISO 8601. Until then nobody else gets the item; later labels count if it is still free."""
    repeat: bool
    """True for a hidden repeat. Never sent to the page."""
    draft: Any
    """The draft saved last: ``{"answer", "comment", "flags"}``, the answer with places on the screen; or None."""
    instructions_version: int
    """0 if there are no instructions."""
    token: str
    """Random, drawn when the item was given; submissions about the item need it."""
    turns: tuple[Event, ...] = ()
    """For a chat: this person's labels of its turns so far."""
    draft_of: str | None = None
    """Tab of the draft and its number there: ``TAB.SAVE``."""
    others: tuple[Mapping[str, str], ...] = ()
    """``text`` and ``comment`` of drafts saved by other tabs."""


# Ids and choices determined by content only


def to_line(value: Any, *, sort_keys: bool = False) -> str:
    """Return JSON on one line, without spaces. Raises DataError for values that JSON or UTF-8 cannot hold."""
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys, default=_plain
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError("a text has a lone surrogate (half of a character), which UTF-8 cannot hold") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"a value cannot be written as JSON: {error}") from error
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def item_id(task: str, prompt: Any, candidates: Sequence[Candidate] = ()) -> str:
    """Return the id of an item: the first 20 hexadecimal digits of the SHA-256 of its task, prompt and responses.

    The sources and the order of the responses are ignored, so that the same question is not asked twice.
    """
    responses = sorted((candidate.response for candidate in candidates), key=_key)
    content = to_line([task, prompt, responses], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:20]


def places_in(there: Sequence[Candidate], given: Sequence[Candidate]) -> list[int]:
    """Return the index in ``there`` of each candidate in ``given``, a permutation of it."""
    free: dict[str, list[int]] = {}
    for i, candidate in enumerate(there):
        free.setdefault(_key(candidate.response), []).append(i)
    return [free[_key(candidate.response)].pop(0) for candidate in given]


def _key(response: Any) -> str:
    return to_line(response, sort_keys=True)


def order_of(seed: int, item: str, person: str, repeat: bool | int, places: int) -> tuple[int, ...]:
    """Return the candidate at each place on the screen, always the same for the same item and person.

    ``repeat`` distinguishes a hidden repeat from the first time, and the turns of a chat.
    """
    order = list(range(places))
    random.Random(f"{seed}:{item}:{person}:{repeat}").shuffle(order)
    return tuple(order)


def draw(*parts: Any) -> float:
    """Return a number in [0, 1) determined by the parts."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def token_hash(token: str) -> str:
    """Return the stored hash of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
