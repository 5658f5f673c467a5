"""What people label and what they answer: items, candidates, people, events; and the names that follow from their content.

Plain data that turns to JSON and back. An item is fixed when it is added. That, and everything that happens later (a label,
an undo, a skip, a new person), is an `Event`; events are only ever appended, and the state of a project is their sum.
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
"""Where an annotator stands: still in the screening set, labelling, refused by it, labelling for evaluation only, removed."""

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
"""What may be ticked beside a rating (Ouyang et al. 2022, table 3)."""
ITEM_FLAGS = ("personal-data", "unsafe", "broken")
"""What may be wrong with an item itself."""
MOST_ANSWERS = 9
"""Most candidates of a ranking."""
STRENGTHS = (1, 2, 3, 4)
"""How much better the preferred answer of a pair is: 1 negligibly, 2 slightly, 3 better, 4 significantly (Llama 2:
Touvron et al. 2023, section 3.2.1)."""


@dataclass(frozen=True)
class Candidate:
    """An answer that somebody or something wrote."""

    response: Any
    """Text, or the assistant's message as an object (docs/data.md)."""
    source: Mapping[str, Any] | None = None
    """What wrote it: checkpoint, sampling settings, seed. Never leaves the server before an item is labelled."""


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
    """How it came to be asked: imported, drawn at random, or because reward models disagree about it."""
    screening: bool = False
    """True if it belongs to the set on which new annotators are compared with the owner."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The record's other columns, kept for the export."""
    batch: str = ""
    """The import that added it, such as "3 pairs.jsonl"; empty if no import did."""
    gold: Mapping[str, Any] | None = None
    """The known answer of a gold question, which is mixed into everybody's work and trains nothing."""
    suggestion: Mapping[str, Any] | None = None
    """An answer that somebody or something suggests, in terms of candidates; the page shows it as a suggestion."""


@dataclass(frozen=True)
class Person:
    """Somebody with an invitation."""

    person_id: str
    name: str
    role: Role
    standing: Standing = "active"


@dataclass(frozen=True)
class Event:
    """Something that happened, never changed afterwards.

    ``kind`` and ``content``:

    - ``item``: the fields of an `Item`
    - ``person``: the fields of a `Person`; a later one for the same ``person_id`` replaces it
    - ``instructions``: ``version`` (1, 2, ...), ``text``
    - ``label``: ``item``, ``answer`` (below), ``order`` (candidate index at each place on the screen, left or top first),
      ``instructions`` (version), ``seconds`` (from shown to sent; None if the label was imported), ``active`` (those of
      them in which somebody worked; not there if that is not known), ``comment``, ``flags`` (of
      `ITEM_FLAGS`), ``repeat`` (True for a hidden repeat); if a suggestion was shown, ``suggestion_followed`` (whether the
      answer says the same); after a redo also ``again``, the id of the label that was taken back
    - ``skip``: ``item``, ``reason``, ``flags``, ``repeat``; after a redo also ``again``
    - ``retract``: ``event`` (the id of a label or skip of the same person, which no longer counts)
    - ``correct``: ``event`` (the id of a label of anybody), ``answer`` (what an owner puts in place of its answer), ``old``
      (the answer before), ``reason``. The label counts with the new answer, and has the owner's id as ``corrected_by``
    - ``lost``: nothing; it has the number of an event whose line was damaged, and of which there was no other copy
    - ``import``: ``batch``, to which items that follow belong
    - ``withdraw``: ``batch`` or, if that is empty, ``items`` (ids); ``withdrawn`` (True; False puts them back), ``reason``

    ``answer``, by task; candidates are named by their index in the item, never by their place on the screen:

    - pair: ``preferred`` (0, 1, or None for a tie), ``strength`` (1 to 4; None for a tie, and for an imported preference
      without one), ``both_bad`` (True only with a tie)
    - ranking: ``ranks``, one integer from 1 for each candidate; lower is better, equal ranks tie
    - rating: ``rating`` (1 to 7), ``flags`` (of `RATING_FLAGS`)
    - demonstration: ``text``
    - correction: ``text``, which differs from the candidate
    - chat: one label per turn: ``messages`` (the conversation up to and with the person's message), ``responses`` (two
      candidates as objects with ``response`` and ``source``), ``preferred``, ``strength``, ``both_bad`` as for a pair,
      ``last`` (True ends the chat); ``order`` is that of ``responses``
    """

    seq: int
    """1, 2, 3, ... without gaps."""
    event_id: str
    at: str
    """UTC, ISO 8601 with milliseconds."""
    person: str | None
    """Who did it; None for the program."""
    kind: Literal["item", "person", "instructions", "label", "skip", "retract", "correct", "import", "withdraw", "lost"]
    content: Mapping[str, Any]
    nonce: str | None = None
    """Made by the page for each thing sent; a second event with the same nonce and person is the first one again."""


@dataclass(frozen=True)
class LabelledItem:
    """A label that counts, with what it is about and who gave it."""

    item: Item
    person: Person
    event: Event


@dataclass(frozen=True)
class Snapshot:
    """A project at one moment."""

    items: Sequence[Item] = ()
    """In the order in which they were added, those that are withdrawn among them."""
    labels: Sequence[LabelledItem] = ()
    """Those that were not taken back, in their order, those of withdrawn items among them."""
    events: Sequence[Event] = ()
    people: Sequence[Person] = ()
    withdrawn: Set[str] = frozenset()
    """Ids of the items that an owner has withdrawn."""

    def counting(self) -> list[LabelledItem]:
        """Return the labels of items that are not withdrawn."""
        return [one for one in self.labels if one.item.item_id not in self.withdrawn]


@dataclass(frozen=True)
class Assignment:
    """An item that a person holds."""

    item: Item
    order: tuple[int, ...]
    """The index of the candidate at each place on the screen; of a chat, of the next turn's two answers."""
    lease_until: str
    """UTC, ISO 8601. Until then nobody else gets the item; it may be labelled later too, if nobody else has it by then."""
    repeat: bool
    """True for a hidden repeat. Never sent to the page."""
    draft: Any
    """What a page saved last: ``{"answer", "comment", "flags"}`` with the answer as on the screen; None if nothing."""
    instructions_version: int
    """0 if there are no instructions."""
    token: str
    """Drawn when the item was given; what a page sends about the item counts only with it. It says nothing."""
    turns: tuple[Event, ...] = ()
    """Of a chat: this person's labels of its turns so far."""
    draft_of: str | None = None
    """Which tab saved the draft, and the how manyth of it: ``TAB.SAVE``."""
    others: tuple[Mapping[str, str], ...] = ()
    """``text`` and ``comment`` of drafts that other tabs have saved."""


# Names and choices that follow from content only


def to_line(value: Any, *, sort_keys: bool = False) -> str:
    """Return JSON on one line, without spaces. Raises DataError for what JSON or UTF-8 cannot hold."""
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys, default=_plain
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError("a text holds half of a character (a lone surrogate), which UTF-8 cannot hold") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"not something that JSON can hold: {error}") from error
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def item_id(task: str, prompt: Any, candidates: Sequence[Candidate] = ()) -> str:
    """Return the id of an item: the first 20 hexadecimal digits of the SHA-256 of its task, prompt and responses.

    What wrote the responses, and in which order they are, does not count: the same question is not asked twice.
    """
    responses = sorted((candidate.response for candidate in candidates), key=_key)
    content = to_line([task, prompt, responses], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:20]


def places_in(there: Sequence[Candidate], given: Sequence[Candidate]) -> list[int]:
    """Return for each of some candidates which one of ``there``, the same ones in another order, it is."""
    free: dict[str, list[int]] = {}
    for i, candidate in enumerate(there):
        free.setdefault(_key(candidate.response), []).append(i)
    return [free[_key(candidate.response)].pop(0) for candidate in given]


def _key(response: Any) -> str:
    return to_line(response, sort_keys=True)


def order_of(seed: int, item: str, person: str, repeat: bool | int, places: int) -> tuple[int, ...]:
    """Return which candidate is at each place on the screen, always the same for the same item and person.

    ``repeat`` tells the hidden repeat of an item from the first time, and of a chat the turns from each other.
    """
    order = list(range(places))
    random.Random(f"{seed}:{item}:{person}:{repeat}").shuffle(order)
    return tuple(order)


def draw(*parts: Any) -> float:
    """Return a number from 0 to below 1 that follows from the parts."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def token_hash(token: str) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
