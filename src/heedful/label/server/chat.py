"""Turns of chats: two answers that wait for a choice. What wrote them stays here until it is saved with the label."""

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KEPT = 4
"""Turns that are kept per person: the open one, and those of other tabs and resent requests."""


@dataclass(frozen=True)
class Turn:
    """Two answers to a conversation."""

    person: str
    item: str
    nonce: str
    messages: Sequence[Mapping[str, Any]]
    """The conversation up to and with the person's message."""
    responses: Sequence[Mapping[str, Any]]
    """Two objects with ``response`` and ``source``."""
    order: tuple[int, ...]
    """The response at each place on the screen."""
    turn_id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    """What the page calls it; it says nothing."""

    @property
    def shown(self) -> list[Any]:
        """The texts, in the order of the screen."""
        return [self.responses[index]["response"] for index in self.order]


class Turns:
    """The turns that wait, by person. They are lost when the server ends: the page then asks again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_person: dict[str, dict[str, Turn]] = {}

    def same(self, person: str, nonce: str) -> Turn | None:
        """The turn that was made for this nonce, if the request has come before."""
        with self._lock:
            turns = self._by_person.get(person, {}).values()
            return next((one for one in turns if one.nonce == nonce), None)

    def add(self, turn: Turn) -> Turn:
        """Keep a turn, and forget the person's oldest ones."""
        with self._lock:
            turns = self._by_person.setdefault(turn.person, {})
            turns[turn.turn_id] = turn
            while len(turns) > KEPT:
                del turns[next(iter(turns))]
        return turn

    def get(self, person: str, turn_id: str) -> Turn | None:
        """A turn of this person; nobody sees another's."""
        with self._lock:
            return self._by_person.get(person, {}).get(turn_id)
