"""Engines sample a policy's responses. `Engine` is the protocol; `heedful.LocalEngine` samples in this process."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.data.chat import Renderer
from heedful.data.formats import instruction
from heedful.data.learned import strings_for_chat
from heedful.data.messages import as_dict
from heedful.data.readers import Record
from heedful.data.schemas import prompt_of
from heedful.engines.rollouts import Rollouts
from heedful.errors import DataError
from heedful.models.policy import Policy
from heedful.types import Completion, Message, Prompt

AnyPrompt = str | Prompt | Sequence[Message | Mapping[str, Any]] | Mapping[str, Any]
"""Raw text, a conversation (messages, or dictionaries with ``role`` and ``content``), or a data set's row with ``prompt`` or
``instruction`` (the text of a user's message)."""


@dataclass(frozen=True)
class Responses:
    """Responses to prompts, as tensors and as text. Row i answers prompt i.

    B responses, T tokens of the longest one, P tokens with the longest prompt.
    """

    rollouts: Rollouts
    completions: list[Completion]
    temperature: float
    """Sampling temperature, also of the log-probs."""

    @property
    def ids(self) -> Int[Tensor, "batch length"]:
        """Token ids ``[B, P]``: prompts padded on the left, responses on the right."""
        return self.rollouts.batch.ids

    @property
    def attention_mask(self) -> Bool[Tensor, "batch length"]:
        """True at real tokens, ``[B, P]``."""
        return self.rollouts.batch.attention_mask

    @property
    def mask(self) -> Bool[Tensor, "batch time"]:
        """True at response tokens, ``[B, T]``; its columns are the last T of ``ids``."""
        return self.rollouts.batch.response_mask

    @property
    def logprobs(self) -> Float[Tensor, "batch time"]:
        """Log-probs recorded during sampling, ``[B, T]``; `heedful.logprobs` computes those of training."""
        return self.rollouts.sampler_logprobs

    @property
    def truncated(self) -> Bool[Tensor, " batch"]:
        """True for responses cut at the length limit, ``[B]``."""
        return self.rollouts.truncated

    @property
    def texts(self) -> list[str]:
        """The responses as text."""
        return [completion.response for completion in self.completions]

    def select(self, rows: Tensor) -> "Responses":
        """The responses at these indices, in this order."""
        chosen = [self.completions[row] for row in rows.tolist()]
        return Responses(self.rollouts.select(rows), chosen, self.temperature)

    def __len__(self) -> int:
        return len(self.completions)


class RemoteEngine(Protocol):
    """Samples token ids on servers, asynchronously."""

    def begin(self, policy: Policy, prompts: Sequence[Sequence[int]], generator: torch.Generator) -> Any:
        """Start sampling a response to each prompt with the policy's current weights; returns a ticket for `finish`."""

    def finish(self, ticket: Any, device: torch.device) -> Rollouts:
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


def warn_of_strings(renderer: Renderer, prompts: Sequence[Prompt], policy: Policy | None = None) -> None:
    """Warn the caller's caller if strings meet a policy, or a reward model, that learned conversations."""
    ends = None if policy is None else policy.lm.generation_config.eos_token_id
    found = strings_for_chat(renderer, prompts, ends)
    if found is not None:
        warnings.warn(
            f"raw-prompts: {found.what} ({found.evidence}). Give {{'instruction': text}}, which is rendered as a user's "
            "message, or raw_prompts=True, which keeps raw text",
            stacklevel=3,
        )


def as_prompt(prompt: AnyPrompt, source: str) -> Prompt:
    """Convert any prompt to a `Prompt`. A row's other fields become columns for reward functions. Raises DataError.

    ``instruction`` in the place of ``prompt`` is the text of a user's message, as in a file.
    """
    if isinstance(prompt, Prompt):
        return prompt
    fields: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
    if "prompt" not in fields and "instruction" in fields:
        fields["prompt"] = instruction(Record(source, fields))
        del fields["instruction"]
    if "prompt" not in fields:
        raise DataError(f"{source} has no `prompt`, but {', '.join(fields) or 'nothing'}; rename the column")
    value: Any = fields["prompt"]
    if not isinstance(value, str) and isinstance(value, Sequence):
        fields["prompt"] = [as_dict(message) if isinstance(message, Message) else message for message in value]
    text = prompt_of(Record(source, fields))
    return Prompt(text, source, {name: x for name, x in fields.items() if name != "prompt"})
