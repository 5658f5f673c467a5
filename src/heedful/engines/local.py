"""`LocalEngine`: samples in this process."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from heedful.configs.online import EnvironmentOptions
from heedful.configs.options import SamplingOptions
from heedful.configs.settings import check_object
from heedful.data.chat import Renderer
from heedful.data.fitting import prompt_room
from heedful.data.loading import EncodedPrompt
from heedful.engines.engine import AnyPrompt, as_prompts, warn_of_strings
from heedful.engines.episodes import Episodes
from heedful.engines.responses import Responses
from heedful.engines.sampler import make_sampler
from heedful.errors import CheckpointError, DataError
from heedful.models.policy import Policy
from heedful.models.shape import context_length
from heedful.types import MicroBatch, Prompt


class LocalEngine:
    """Samples in this process, with the policy's current weights at each call.

    Args:
        policy: the policy to sample from, with its tokenizer.
        max_new_tokens: maximum response length, in tokens.
        temperature: divides the logits; 0 is greedy.
        top_k: sample only from the k most likely tokens; 0 samples from all.
        top_p: sample only from the smallest set of most likely tokens with this total probability.
        seed: seed of the random numbers.
        micro_batch_size: rows sampled at a time, and environments that are alive.
        raw_prompts: prompts that are strings are meant as raw text, also by a policy that learned conversations; False warns.
        environment: what the policy speaks with in turns (docs/environments.md): a class, or ``python:FILE.py:CLASS``, or
            several. A prompt is then a row or a `Prompt` with the columns that ``reset`` takes, and ``max_new_tokens``
            counts all turns; what was said is in ``completions[i].episode``. `close` ends the environments' processes.
        max_turns: most turns of the policy.
        environment_timeout: seconds for one turn of all environments.

    Raises CheckpointError if the policy has no tokenizer or cannot be sampled from, ConfigError for a number out of range or
    an environment that cannot be used.
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
        raw_prompts: bool = False,
        environment: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = (),
        max_turns: int = 8,
        environment_timeout: float = 60.0,
    ) -> None:
        check_object(policy, Policy, "policy", "heedful.Policy.from_pretrained(model, tokenizer)")
        if policy.tokenizer is None:
            raise CheckpointError("the policy has no tokenizer; load it with Policy.from_pretrained")
        options = SamplingOptions(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
        self.raw_prompts = raw_prompts
        self.policy, self.generator = policy, torch.Generator().manual_seed(seed)
        self.sampler = make_sampler(
            options, Renderer(policy.tokenizer), policy, micro_batch=MicroBatch(micro_batch_size)
        )
        self.room = prompt_room(max_new_tokens, context_length(policy.lm.config))
        played = EnvironmentOptions(
            environment=cast(Any, environment), max_turns=max_turns, environment_timeout=environment_timeout
        )
        if played.environment:
            episodes = Episodes.load(
                played, self.sampler.renderer, max_new_tokens=max_new_tokens, max_prompt_tokens=self.room
            )
            self.sampler = replace(self.sampler, episodes=episodes)

    def generate(self, prompts: Iterable[AnyPrompt]) -> Responses:
        """Sample a response to each prompt, or an episode.

        Raises DataError for an invalid prompt, one without room for a response or without an environment, or an empty list.
        """
        encoded = [self._encoded(prompt) for prompt in as_prompts(prompts)]
        if not self.raw_prompts:
            warn_of_strings(self.sampler.renderer, [one.prompt for one in encoded], self.policy)
        return self.sampler.generate_in_parts(self.policy, encoded, self.generator)

    def update_weights(self, policy: Policy) -> None:
        """Sample from another policy of the same shape from now on."""
        self.policy = policy

    def close(self) -> None:
        """End the environments."""
        self.sampler.close()

    def _encoded(self, asked: Prompt) -> EncodedPrompt:
        ids = self.sampler.renderer.prompt_ids(asked.prompt, asked.prefill)
        if len(ids) > self.room:
            raise DataError(
                f"{asked.source} has {len(ids)} tokens, but the context has room for {self.room} besides max_new_tokens="
                f"{self.sampler.options.max_new_tokens}; shorten it, or lower max_new_tokens"
            )
        return EncodedPrompt(asked, ids)
