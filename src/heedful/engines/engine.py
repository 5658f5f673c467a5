"""Engines sample a policy's responses. `Engine` is the protocol; `heedful.LocalEngine` samples in this process.

`SamplingSource` is what a `Sampler` asks in the place of this process: servers, or the user's engine.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from heedful.data.chat import Renderer
from heedful.data.formats import instruction
from heedful.data.learned import strings_for_chat
from heedful.data.loading import EncodedPrompt
from heedful.data.messages import as_dict
from heedful.data.readers import Record
from heedful.data.schemas import prompt_of
from heedful.display import counted
from heedful.distributed import ranks
from heedful.engines.episodes import Say
from heedful.engines.responses import Responses
from heedful.errors import ConfigError, DataError
from heedful.models.policy import Policy
from heedful.types import Message, Prompt

AnyPrompt = str | Prompt | Sequence[Message | Mapping[str, Any]] | Mapping[str, Any]
"""Raw text, a conversation (messages, or dictionaries with ``role`` and ``content``), or a data set's row with ``prompt`` or
``instruction`` (the text of a user's message)."""


class RemoteEngine(Protocol):
    """Samples token ids on servers, asynchronously."""

    def begin(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        generator: torch.Generator,
        most: Sequence[int] | None = None,
    ) -> Any:
        """Start sampling a response to each prompt with the policy's current weights, of at most so many tokens each; returns
        a ticket for `finish`."""

    def begin_episodes(self, policy: Policy, play: Callable[[Say], Responses], generator: torch.Generator) -> Any:
        """Start playing episodes, all of whose turns are sampled with the policy's current weights; returns a ticket for
        `finish`. Only rank 0 plays. Needed for ``--async-steps`` with ``--environment``."""

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


class SamplingSource(Protocol):
    """Samples responses for a `Sampler`."""

    def generate(
        self,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        generator: torch.Generator,
        version: int | None,
        most: Sequence[int] | None = None,
        /,
    ) -> Responses:
        """Sample a response to each prompt with the policy's current weights, of this version if versions are counted; of at
        most so many tokens each, if that is less than in the settings."""

    def take_retries(self) -> int | None:
        """Number of repeated requests since the last call; None if nothing is asked over a network."""

    def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True)
class SyncServers:
    """Servers, which sample while this process waits."""

    remote: RemoteEngine

    def generate(
        self,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        generator: torch.Generator,
        _version: int | None,
        most: Sequence[int] | None = None,
        /,
    ) -> Responses:
        """Token ids. Raises SamplerError."""
        ids = [one.ids for one in prompts]
        ticket = self.remote.begin(policy, ids, generator, *([] if most is None else [most]))
        return self.remote.finish(ticket, policy.device)

    def take_retries(self) -> int:
        """Of rows and servers."""
        return self.remote.take_retries()

    def close(self) -> None:
        """Cancel all pending requests."""
        self.remote.close()


@dataclass(frozen=True)
class OwnEngine:
    """The user's engine (``--sampler python:``), asked on rank 0."""

    engine: Engine
    max_new_tokens: int

    def generate(
        self,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        _generator: torch.Generator,
        _version: int | None,
        _most: Sequence[int] | None = None,
        /,
    ) -> Responses:
        """Token ids and texts. Raises ConfigError if they do not fit the prompts."""

        def ask() -> Responses:
            self.engine.update_weights(policy)
            return self.engine.generate([one.prompt for one in prompts])

        found = ranks.on_rank_zero(ask)
        name = type(self.engine).__name__
        if len(found) != len(prompts):
            raise ConfigError(
                f"--sampler: {name}.generate returned {counted(len(found), 'response')} for "
                f"{counted(len(prompts), 'prompt')}; return one per prompt"
            )
        if found.mask.shape[1] > self.max_new_tokens:
            raise ConfigError(
                f"--sampler: {name}.generate returned a response of {found.mask.shape[1]} tokens, above "
                f"--max-new-tokens {self.max_new_tokens}"
            )
        return found.to(policy.device)

    def take_retries(self) -> None:
        """Nothing is repeated."""

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


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


def as_prompts(prompts: Iterable[AnyPrompt]) -> list[Prompt]:
    """Convert prompts by `as_prompt`. Raises DataError for what holds none, or is no list of them."""
    if isinstance(prompts, str | Mapping) or hasattr(prompts, "columns"):  # these would give their letters or columns
        raise DataError(
            f"expected a list of prompts, got {prompts!r:.60} ({type(prompts).__name__}); of a table give the rows, such as "
            'table.to_dict("records"), or a column'
        )
    found = [as_prompt(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
    if not found:
        raise DataError("expected a list of prompts, got an empty one")
    return found


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
    if "prompt" not in fields and "role" in fields:
        raise DataError(
            f"{source} is a message; a prompt is a conversation, a list of messages: [[{{'role': ...}}], ...]"
        )
    if "prompt" not in fields:
        raise DataError(f"{source} has no `prompt`, but {', '.join(fields) or 'nothing'}; rename the column")
    value: Any = fields["prompt"]
    if not isinstance(value, str) and isinstance(value, Sequence):
        fields["prompt"] = [as_dict(message) if isinstance(message, Message) else message for message in value]
    text, begun = prompt_of(Record(source, fields))
    return Prompt(text, source, {name: x for name, x in fields.items() if name != "prompt"}, begun)
