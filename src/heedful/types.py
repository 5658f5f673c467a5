"""Records that several rooms share; no torch. Text is either raw (a string) or a conversation (a tuple of messages)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str


Conversation = tuple[Message, ...]
Text = str | Conversation
"""A prompt: raw text, or the messages so far. A string is raw text everywhere; only messages go through a chat template."""

Reading = Literal["turn-end", "template"]
"""Where a conversation ends that a decoder reward model reads. turn-end: with the token that ends the answer's turn, as when
a policy writes it; a response that was cut has no end. template: with all that the chat template puts behind an answer."""


@dataclass(frozen=True)
class Prompt:
    """Something to respond to."""

    prompt: Text
    source: str
    """Where it was read, as ``file:line``, for messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The record's other fields; reward functions receive them."""


@dataclass(frozen=True)
class Completion:
    """A response to a prompt, to be scored."""

    prompt: Prompt
    response: str
    ids: Sequence[int] = ()
    """The response's token ids, without the token that ended it."""
    truncated: bool = False
    """True if the response was cut off by its length before the model ended it."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt and a response to imitate. Plain language-modelling text has an empty prompt."""

    prompt: Text
    response: str
    source: str
    truncated: bool = False
    """True if the response was cut off, so that no end of turn follows it and none is learned."""


@dataclass(frozen=True)
class Ranking:
    """A prompt and responses in an order of preference."""

    prompt: Text
    responses: tuple[str, ...]
    ranks: tuple[int, ...]
    """One per response. A lower rank is better; equal ranks tie."""
    source: str
    margin: float | None = None
    """How much better the chosen response is, in units of the score; only for pairs."""
    truncated: bool = False
    """True if all responses were cut off, so that they have no end."""


@dataclass(frozen=True)
class MicroBatch:
    """The limits of one micro-batch."""

    rows: int
    """The most rows."""
    tokens: int | None = None
    """The most tokens including padding: rows times the longest one. None means no limit."""

    @property
    def of_pairs(self) -> "MicroBatch":
        """The same limits for pairs, which have two rows each."""
        return MicroBatch(2 * self.rows, self.tokens)
