"""Torch-free records that cross rooms. Text is either raw (a string) or a conversation (a tuple of messages)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


Conversation = tuple[Message, ...]
Text = str | Conversation
"""A prompt: raw text, or the messages so far. Strings are raw text everywhere; only messages meet a chat template."""


@dataclass(frozen=True)
class Prompt:
    """Something to respond to. ``columns`` holds the record's other fields; they reach the reward functions."""

    prompt: Text
    source: str
    """Where it was read: ``file:line``, for messages about it."""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A response to a prompt, to be scored."""

    prompt: Prompt
    response: str
    ids: Sequence[int] = ()
    truncated: bool = False
    """The response was cut by length before the model ended it."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt and a response to imitate. Plain language-modelling text has an empty prompt."""

    prompt: Text
    response: str
    source: str
    truncated: bool = False
    """The response was cut, so no end of turn follows it and none is learned."""


@dataclass(frozen=True)
class Ranking:
    """A prompt and responses in an order of preference: a lower rank is better, equal ranks tie."""

    prompt: Text
    responses: tuple[str, ...]
    ranks: tuple[int, ...]
    source: str
    margin: float | None = None
    """How much better the chosen response is, in units of the score; pairs only."""
    truncated: bool = False
    """All responses were cut: they have no end."""


@dataclass(frozen=True)
class MicroBatch:
    """The most that one micro-batch holds."""

    rows: int
    tokens: int | None = None
    """Padding included: rows times the longest one. None is no limit."""

    @property
    def of_pairs(self) -> "MicroBatch":
        """The same, with two rows for each."""
        return MicroBatch(2 * self.rows, self.tokens)
