"""Records that several rooms share; no torch. Text is either raw (a string) or a conversation (a tuple of messages)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

THINK, THINK_END = "<think>", "</think>"
"""Tags around a model's thinking, before its answer."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, written by the assistant."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str
    thinking: str | None = None
    """The assistant's thinking, if the data has it apart from the content (``reasoning_content``)."""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    """The author; of a tool message, the tool whose result it is."""
    tool_call_id: str | None = None
    learned: bool = field(default=True, compare=False)
    """False if the data excludes this message from the loss."""
    tools: str = ""
    """Only on the first message: the tools offered in the conversation, as a JSON list in a string."""


Conversation = tuple[Message, ...]
Text = str | Conversation
"""A prompt: raw text, or the messages so far. A string is raw text everywhere; only messages go through a chat template."""
Turn = str | Message
"""One answer: its text, or the assistant's message if it has tool calls or separate thinking."""
Response = Turn | Conversation
"""A response: one answer, or several with what others said between them, such as the results of tools. It begins and ends
with an answer."""


def split_thinking(response: str) -> tuple[str | None, str | None]:
    """Split a response into ``(thinking, answer)`` at the first ``</think>``, without the line breaks around it.

    A response that does not begin with ``<think>`` has no thinking (None) and is all answer. One without ``</think>``, as
    when it was cut off inside its thinking, has no answer (None).
    """
    start = response.lstrip()
    if not start.startswith(THINK):
        return None, response
    thinking, closed, answer = start.removeprefix(THINK).partition(THINK_END)
    return thinking.strip("\n"), answer.lstrip("\n") if closed else None


def parts_of(turn: Message) -> tuple[str | None, str | None]:
    """Return the thinking and the answer of an assistant's message, as `split_thinking` does."""
    return (turn.thinking, turn.content) if turn.thinking is not None else split_thinking(turn.content)


def as_message(turn: Turn) -> Message:
    """Return an answer as a message."""
    return Message("assistant", turn) if isinstance(turn, str) else turn


def last_answer(prompt: Text, response: Response) -> tuple[Text, Turn]:
    """Return the last answer of a response, and everything that was said before it."""
    if not isinstance(response, tuple):
        return prompt, response
    assert isinstance(prompt, tuple)
    return (*prompt, *response[:-1]), response[-1]


def plain_response(response: Response) -> str:
    """Return a response as text; of a message, its thinking, content and tool calls; of several, each with its role."""
    if isinstance(response, str):
        return response
    if isinstance(response, tuple):
        return "\n".join(f"{message.role}: {plain_response(message)}" for message in response)
    thought = "" if response.thinking is None else f"{THINK}\n{response.thinking}\n{THINK_END}\n\n"
    calls = [f"{call.name}({call.arguments})" for call in response.tool_calls]
    return thought + "\n".join([response.content, *calls] if response.content else calls)


LEARNED = "heedful_learned"
"""Name, in tokenizer_config.json, of the kinds of prompts that a model has learned; `heedful.data.learned` reads it."""

Reading = Literal["turn-end", "template"]
"""Where a conversation ends for a decoder reward model. turn-end: at the token that ends the answer's turn, as in a policy's
response; a truncated response has no end. template: after everything that the chat template adds to an answer."""


SpecialTokens = Literal["literal", "read"]
"""How special tokens in raw text are encoded: literally (as letters), or as the tokens."""


@dataclass(frozen=True)
class Prompt:
    """A prompt with its source and its record's other fields."""

    prompt: Text
    source: str
    """Where it was read, as ``file:line``, for messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The record's other fields; reward functions receive them."""
    prefill: str = ""
    """The beginning of the answer, if the data gives it: a conversation that ends with the assistant's words. The policy
    continues them; rewards see them at the beginning of the response."""


@dataclass(frozen=True)
class Episode:
    """What a policy and its environment said to each other behind a prompt, and what that was worth."""

    turns: Conversation
    """The policy's turns as the assistant's messages, and between them what the other one said."""
    rewards: tuple[float, ...]
    """Of each of the policy's turns; the last one's with that of the episode. Empty if the environment gives none."""
    ends: tuple[int, ...]
    """Number of the policy's own tokens up to the end of each of its turns."""
    ended: Literal["environment", "turns", "tokens"]
    """What ended it: the environment, or the limit of turns or of tokens."""
    calls: int = 0
    """Number of the policy's calls of tools."""
    failed_calls: int = 0
    failure: str = ""
    """Why the environment failed, as a sentence; then it has no reward."""


@dataclass(frozen=True)
class Completion:
    """A response to a prompt, to be scored."""

    prompt: Prompt
    response: str
    """The model's whole response, thinking included, without the white space that the chat template puts around every answer.
    If the rendered prompt ended with ``<think>`` or with a beginning of the answer, it begins with that."""
    ids: Sequence[int] = ()
    """The response's token ids, without the end token."""
    truncated: bool = False
    """True if the response was cut off by the length limit before its end token."""
    episode: Episode | None = None
    """What was said in turns; None without an environment."""

    @property
    def thinking(self) -> str | None:
        """The thinking before the answer (`split_thinking`), of an episode in its last turn; None if there is none."""
        return parts_of(self._last_turn)[0]

    @property
    def answer(self) -> str | None:
        """The response, of an episode its last turn, without its thinking; None if the thinking never ends."""
        return parts_of(self._last_turn)[1]

    @property
    def _last_turn(self) -> Message:
        turns = () if self.episode is None else self.episode.turns
        return turns[-1] if turns else Message("assistant", self.response)


@dataclass(frozen=True)
class Demonstration:
    """A prompt and a response to imitate. Plain language-modelling text has an empty prompt."""

    prompt: Text
    response: Response
    source: str
    truncated: bool = False
    """True if the response was cut off: no end of turn follows it, and none is learned."""
    prefill: str = field(default="", kw_only=True)
    """The beginning of the response that the data gives as part of the prompt: read, not learned."""


@dataclass(frozen=True)
class Labelled(Demonstration):
    """A prompt and a response that is good or bad."""

    label: bool = field(kw_only=True)
    """True if it is good."""
    of_a_pair: bool = field(default=False, kw_only=True)
    """True if it came from a preference pair."""


@dataclass(frozen=True)
class Ranking:
    """A prompt and responses ranked by preference."""

    prompt: Text
    responses: tuple[Response, ...]
    ranks: tuple[int, ...]
    """One per response. A lower rank is better; equal ranks tie."""
    source: str
    margin: float | None = None
    """Margin by which the chosen response is better, in units of the score; only for pairs."""
    truncated: bool = False
    """True if all responses were cut off, so that they have no end."""
    prefill: str = ""
    """The beginning of every response that the data gives as part of the prompt: read, not learned."""


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
