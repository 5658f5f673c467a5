"""Engines: what samples responses for a policy. `Engine` is the protocol, `LocalEngine` samples in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.configs.options import SamplingOptions
from heedful.data.chat import Renderer
from heedful.data.fitting import prompt_room
from heedful.data.loading import EncodedPrompt
from heedful.data.messages import as_dict
from heedful.data.readers import Record
from heedful.data.schemas import prompt_of
from heedful.engines.rollouts import Rollouts
from heedful.engines.sampler import make_sampler
from heedful.errors import CheckpointError, DataError
from heedful.models.policy import Policy
from heedful.models.shape import context_length
from heedful.types import Completion, Message, MicroBatch, Prompt

AnyPrompt = str | Prompt | Sequence[Message | Mapping[str, Any]] | Mapping[str, Any]
"""Raw text, a conversation (messages, or dictionaries with ``role`` and ``content``), or a data set's row with ``prompt``."""


@dataclass(frozen=True)
class Responses:
    """Responses to prompts, as tensors and as text. Row i answers prompt i.

    B responses, T tokens of the longest one, P tokens with the longest prompt.
    """

    rollouts: Rollouts
    completions: list[Completion]
    temperature: float
    """That they were sampled at; log-probs are taken at it."""

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
        """Log-probs as sampling saw them, ``[B, T]``; `heedful.logprobs` computes them as training does."""
        return self.rollouts.sampler_logprobs

    @property
    def truncated(self) -> Bool[Tensor, " batch"]:
        """True where a response was cut by its length, ``[B]``."""
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


class Engine(Protocol):
    """What samples responses. A class with these three methods is an engine."""

    def generate(self, prompts: Sequence[AnyPrompt]) -> Responses:
        """Sample a response to each prompt."""

    def update_weights(self, policy: Policy) -> None:
        """Sample by these weights from now on."""

    def close(self) -> None:
        """Let go of what it holds."""


class LocalEngine:
    """Samples in this process, by the policy as it is at each call.

    Args:
        policy: what is sampled from, with its tokenizer.
        max_new_tokens: longest response, in tokens.
        temperature: divides the logits; 0 is greedy.
        top_k: sample only from the k most likely tokens; 0 samples from all.
        top_p: sample only from the most likely tokens that together have this probability.
        seed: of the random numbers.
        micro_batch_size: rows that are sampled at a time.

    Raises CheckpointError if the policy has no tokenizer or cannot be sampled from, ConfigError for a number out of range.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        micro_batch_size: int = 64,
    ) -> None:
        if policy.tokenizer is None:
            raise CheckpointError("the policy has no tokenizer; load it with Policy.from_pretrained")
        options = SamplingOptions(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
        self.policy, self.generator = policy, torch.Generator().manual_seed(seed)
        self.sampler = make_sampler(
            options, Renderer(policy.tokenizer), policy, micro_batch=MicroBatch(micro_batch_size)
        )
        self.room = prompt_room(max_new_tokens, context_length(policy.lm.config))

    def generate(self, prompts: Sequence[AnyPrompt]) -> Responses:
        """Sample a response to each prompt.

        Raises DataError for what is no prompt, one that leaves no room for a response, or no prompts at all.
        """
        if isinstance(prompts, str) or not len(prompts):
            raise DataError(f"generate takes a list of prompts, got {prompts!r:.60}")
        encoded = [self._encoded(prompt, i) for i, prompt in enumerate(prompts)]
        rollouts, completions = self.sampler.respond(self.policy, encoded, self.generator)
        return Responses(rollouts, completions, self.sampler.options.temperature)

    def update_weights(self, policy: Policy) -> None:
        """Sample by another policy of the same shape from now on."""
        self.policy = policy

    def close(self) -> None:
        """Nothing is held."""

    def _encoded(self, prompt: AnyPrompt, index: int) -> EncodedPrompt:
        asked = as_prompt(prompt, f"prompt {index}")
        ids = self.sampler.renderer.prompt_ids(asked.prompt)
        if len(ids) > self.room:
            raise DataError(
                f"{asked.source} has {len(ids)} tokens; the model reads {self.room} besides max_new_tokens="
                f"{self.sampler.options.max_new_tokens}; shorten it, or lower max_new_tokens"
            )
        return EncodedPrompt(asked, ids)


def as_prompt(prompt: AnyPrompt, source: str) -> Prompt:
    """Any prompt as a `Prompt`. A row's other fields are its columns, which reward functions receive. Raises DataError."""
    if isinstance(prompt, Prompt):
        return prompt
    fields: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
    if "prompt" not in fields:
        raise DataError(f"{source} has no `prompt`, but {', '.join(fields) or 'nothing'}; rename the column")
    value: Any = fields["prompt"]
    if not isinstance(value, str) and isinstance(value, Sequence):
        fields["prompt"] = [as_dict(message) if isinstance(message, Message) else message for message in value]
    text = prompt_of(Record(source, fields))
    return Prompt(text, source, {name: x for name, x in fields.items() if name != "prompt"})
