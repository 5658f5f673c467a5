"""Engines sample a policy's responses. `Engine` is the protocol; `heedful.LocalEngine` samples in this process."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from heedful.data.messages import as_dict
from heedful.data.readers import Record
from heedful.data.schemas import prompt_of
from heedful.engines.responses import Responses
from heedful.errors import DataError
from heedful.models.policy import Policy
from heedful.types import Message, Prompt

AnyPrompt = str | Prompt | Sequence[Message | Mapping[str, Any]] | Mapping[str, Any]
"""Raw text, a conversation (messages, or dictionaries with ``role`` and ``content``), or a data set's row with ``prompt``."""


class RemoteEngine(Protocol):
    """Samples token ids on servers, asynchronously."""

    def begin(self, policy: Policy, prompts: Sequence[Sequence[int]], generator: torch.Generator) -> Any:
        """Start sampling a response to each prompt with the policy's current weights; returns a ticket for `finish`."""

    def finish(self, ticket: Any, device: torch.device) -> Responses:
        """Wait for the responses that `begin` requested. Raises SamplerError."""

    def take_retries(self) -> int:
        """Number of retries since the last call."""

    def close(self) -> None:
        """Cancel all pending requests."""


class Engine(Protocol):
    """Samples responses. Any class with these three methods is an engine."""

    def generate(self, prompts: Sequence[AnyPrompt]) -> Responses:
        """Sample a response to each prompt."""

    def update_weights(self, policy: Policy) -> None:
        """Sample with these weights from now on."""

    def close(self) -> None:
        """Release resources."""


def as_prompt(prompt: AnyPrompt, source: str) -> Prompt:
    """Convert any prompt to a `Prompt`. A row's other fields become columns for reward functions. Raises DataError."""
    if isinstance(prompt, Prompt):
        return prompt
    fields: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
    if "prompt" not in fields:
        raise DataError(f"{source} has no `prompt`, but {', '.join(fields) or 'nothing'}; rename the column")
    value: Any = fields["prompt"]
    if not isinstance(value, str) and isinstance(value, Sequence):
        fields["prompt"] = [as_dict(message) if isinstance(message, Message) else message for message in value]
    text, begun = prompt_of(Record(source, fields))
    return Prompt(text, source, {name: x for name, x in fields.items() if name != "prompt"}, begun)
