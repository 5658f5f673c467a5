"""What can sample in the place of this process: servers, or the user's engine. `Sampler.generate` asks them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from heedful.data.loading import EncodedPrompt
from heedful.distributed import ranks
from heedful.engines.engine import Engine, RemoteEngine
from heedful.engines.responses import Responses
from heedful.errors import ConfigError
from heedful.models.policy import Policy


class Source(Protocol):
    """Samples responses for a `Sampler`."""

    def generate(
        self, policy: Policy, prompts: Sequence[EncodedPrompt], generator: torch.Generator, version: int | None, /
    ) -> Responses:
        """Sample a response to each prompt with the policy's current weights, of this version if versions are counted."""

    def take_retries(self) -> int | None:
        """Number of repeated requests since the last call; None if nothing is asked over a network."""

    def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True)
class Servers:
    """Servers, which sample while this process waits."""

    remote: RemoteEngine

    def generate(
        self, policy: Policy, prompts: Sequence[EncodedPrompt], generator: torch.Generator, _version: int | None, /
    ) -> Responses:
        """Token ids. Raises SamplerError."""
        ticket = self.remote.begin(policy, [one.ids for one in prompts], generator)
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
        self, policy: Policy, prompts: Sequence[EncodedPrompt], _generator: torch.Generator, _version: int | None, /
    ) -> Responses:
        """Token ids and texts. Raises ConfigError if they do not fit the prompts."""

        def ask() -> Responses:
            self.engine.update_weights(policy)
            return self.engine.generate([one.prompt for one in prompts])

        found = ranks.on_rank_zero(ask)
        name = type(self.engine).__name__
        if len(found) != len(prompts):
            raise ConfigError(
                f"--sampler: {name}.generate returned {len(found)} responses for {len(prompts)} prompts; "
                "return one per prompt"
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
