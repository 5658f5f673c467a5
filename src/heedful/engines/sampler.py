"""Sample responses to encoded prompts and decode them to text."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from heedful.configs.options import SamplingOptions
from heedful.data.batches import AdaptiveMicroBatch
from heedful.data.chat import Renderer, stop_ids
from heedful.data.loading import EncodedPrompt
from heedful.display import counted
from heedful.distributed import ranks
from heedful.engines.engine import Engine, RemoteEngine
from heedful.engines.generate import MICRO_BATCH, sample
from heedful.engines.probe import check_sampling, tell_textless
from heedful.engines.responses import Responses
from heedful.errors import ConfigError
from heedful.models.policy import Policy
from heedful.models.shape import check_own_tokens, check_rows, rows_with_text
from heedful.types import MicroBatch


@dataclass(frozen=True)
class Sampler:
    """All inputs of sampling except policy and prompts."""

    options: SamplingOptions
    renderer: Renderer
    stop_ids: tuple[int, ...]
    """The tokens that end a response."""
    micro_batch: MicroBatch
    """Maximum rows and tokens sampled at a time."""
    num_tokens: int
    """Ids from this one on have no text, and are not sampled."""
    adaptive: AdaptiveMicroBatch = field(default_factory=AdaptiveMicroBatch)
    """Remembers the micro-batch that fits into memory."""
    remote: RemoteEngine | None = None
    """Servers that sample instead of this process."""
    engine: Engine | None = None
    """The user's engine that samples instead (``--sampler python:``)."""

    def generate(self, policy: Policy, prompts: Sequence[EncodedPrompt], generator: torch.Generator) -> Responses:
        """Sample one response to each prompt."""
        check_rows(policy.lm, self.renderer.tokenizer, ((one.prompt.source or "a prompt", one.ids) for one in prompts))
        if self.engine is not None:
            return self._ask(self.engine, policy, prompts)
        if self.remote is not None:
            return self.finish(self.begin(policy, prompts, generator), policy, prompts)
        responses = sample(
            policy,
            [prompt.ids for prompt in prompts],
            self.options,
            stop_ids=self.stop_ids,
            pad_id=self.renderer.pad_id,
            num_tokens=self.num_tokens,
            generator=generator,
            micro_batch=self.micro_batch,
            adaptive=self.adaptive,
        )
        return self._with_texts(responses, prompts)

    def begin(self, policy: Policy, prompts: Sequence[EncodedPrompt], generator: torch.Generator) -> Any:
        """Start sampling on servers with the policy's current weights; `finish` waits for the result."""
        assert self.remote is not None
        return self.remote.begin(policy, [prompt.ids for prompt in prompts], generator)

    def finish(self, ticket: Any, policy: Policy, prompts: Sequence[EncodedPrompt]) -> Responses:
        """The result of `begin`, like that of `generate`. Raises SamplerError."""
        assert self.remote is not None
        return self._with_texts(self.remote.finish(ticket, policy.device), prompts)

    def close(self) -> None:
        """Close the connection to servers, or the user's engine, if any."""
        for one in (self.engine, self.remote):
            if one is not None:
                one.close()

    def _ask(self, engine: Engine, policy: Policy, prompts: Sequence[EncodedPrompt]) -> Responses:
        """Responses of the user's engine, on rank 0. Raises ConfigError if they do not fit the prompts."""

        def generate() -> Responses:
            engine.update_weights(policy)
            return engine.generate([one.prompt for one in prompts])

        found = ranks.on_rank_zero(generate)
        name, longest = type(engine).__name__, self.options.max_new_tokens
        if len(found) != len(prompts):
            raise ConfigError(
                f"--sampler: {name}.generate returned {counted(len(found), 'response')} for "
                f"{counted(len(prompts), 'prompt')}; return one per prompt"
            )
        if found.mask.shape[1] > longest:
            raise ConfigError(
                f"--sampler: {name}.generate returned a response of {found.mask.shape[1]} tokens, above "
                f"--max-new-tokens {longest}"
            )
        return found.to(policy.device)

    def _with_texts(self, responses: Responses, prompts: Sequence[EncodedPrompt]) -> Responses:
        written = responses.own_ids()
        textless = sum(max(ids, default=0) >= self.num_tokens for ids in written)
        if textless:  # servers sample from all rows
            warnings.warn(
                f"{textless} of {len(written)} responses have tokens without text (ids from {self.num_tokens} on), which "
                "rewards do not see: resize the model's embeddings to its tokenizer",
                stacklevel=3,
            )
        rows = zip(prompts, written, responses.truncated.tolist(), strict=True)
        completions = [self.renderer.completion(one.prompt, ids, truncated=cut) for one, ids, cut in rows]
        return replace(responses, completions=completions)


def make_sampler(
    options: SamplingOptions,
    renderer: Renderer,
    policy: Policy,
    *,
    micro_batch: MicroBatch = MICRO_BATCH,
    is_used: bool = True,
) -> Sampler:
    """Make a sampler with the stop tokens of the policy's generation config, tokenizer and chat template.

    Args:
        options: temperature, filters and lengths.
        renderer: the policy's.
        policy: the policy to sample from; its weights may change later.
        micro_batch: maximum rows and tokens sampled at a time.
        is_used: whether anything will be sampled; the policy is then checked (`check_sampling`).

    Raises CheckpointError if the policy cannot be sampled from, or has no embedding row for a stop or padding token.
    """
    stops = stop_ids(renderer, policy.lm.generation_config.eos_token_id)
    check_own_tokens(policy.lm, renderer.tokenizer, stop_ids=stops, pad_id=renderer.pad_id)
    if is_used:
        check_sampling(policy, pad_id=renderer.pad_id)
        tell_textless(policy, renderer.tokenizer, pad_id=renderer.pad_id)
    return Sampler(options, renderer, stops, micro_batch, rows_with_text(policy.lm, renderer.tokenizer))
