"""Sample responses to encoded prompts and decode them to text."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from heedful.configs.options import SamplingOptions
from heedful.data.batches import AdaptiveMicroBatch
from heedful.data.chat import Renderer, stop_ids
from heedful.data.loading import EncodedPrompt
from heedful.devices import capabilities
from heedful.engines.cuda_graph import obstacle
from heedful.engines.engine import SamplingSource
from heedful.engines.episodes import Episodes
from heedful.engines.generate import MICRO_BATCH, generate
from heedful.engines.probe import check_sampling, tell_textless
from heedful.engines.responses import Responses, joined
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
    longest: int = 0
    """Tokens of the longest text that will be sampled, if it is known: CUDA graphs have room for it from the start."""
    merge_adapters: bool = False
    """Whether the copy that samples has the adapters in its matrices: faster, with memory for those (`SamplingModel`)."""
    source: SamplingSource | None = None
    """What samples in the place of this process; None: this process."""
    episodes: Episodes | None = None
    """What the policy speaks with in turns; None: it answers once."""

    def generate(
        self,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        generator: torch.Generator,
        *,
        version: int | None = None,
    ) -> Responses:
        """Sample one response to each prompt, with the policy's current weights, of this version if they are counted."""
        if self.episodes is None:
            return self._with_texts(self._sample(policy, prompts, generator, version), prompts)
        return self.episodes.play(
            lambda before, most: self._sample(policy, before, generator, version, most), prompts, generator
        )

    def generate_in_parts(
        self, policy: Policy, prompts: Sequence[EncodedPrompt], generator: torch.Generator
    ) -> Responses:
        """As `generate`, with no more environments alive than a micro-batch has rows."""
        size = len(prompts) if self.episodes is None else self.micro_batch.rows
        parts = [
            self.generate(policy, prompts[start : start + size], generator) for start in range(0, len(prompts), size)
        ]
        return parts[0] if len(parts) == 1 else joined(parts, range(len(prompts)), pad_id=self.renderer.pad_id)

    def _sample(
        self,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        generator: torch.Generator,
        version: int | None,
        most: Sequence[int] | None = None,
    ) -> Responses:
        """What the policy says next, at most so many tokens; without texts unless the source has some."""
        check_rows(policy.lm, self.renderer.tokenizer, ((one.prompt.source or "a prompt", one.ids) for one in prompts))
        if self.source is None:
            responses = generate(
                policy,
                [prompt.ids for prompt in prompts],
                self.options,
                stop_ids=self.stop_ids,
                pad_id=self.renderer.pad_id,
                num_tokens=self.num_tokens,
                generator=generator,
                micro_batch=self.micro_batch,
                adaptive=self.adaptive,
                longest=self.longest,
                merge_adapters=self.merge_adapters,
                most=most,
            )
        else:
            responses = self.source.generate(policy, prompts, generator, version, most)
        if responses.versions is None and version is not None:
            responses = replace(responses, versions=torch.full_like(responses.lengths, version))
        return responses

    def close(self) -> None:
        """Close the connection to servers, or the user's engine, and end environments, if any."""
        if self.source is not None:
            self.source.close()
        if self.episodes is not None:
            self.episodes.close()

    def _with_texts(self, responses: Responses, prompts: Sequence[EncodedPrompt]) -> Responses:
        if responses.completions:
            return responses
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


S = TypeVar("S", bound=SamplingOptions)


def with_graphs(options: S, policy: Policy) -> S:
    """Options whose CUDA graphs are ``on`` instead of ``auto`` if the device has them and the model can be captured. For who
    knows that there is room: the graphs, with their cache and copy of the weights, stay as long as the policy."""
    can = capabilities(policy.device).graphs and not getattr(policy.lm, "is_quantized", False)
    if options.cuda_graphs != "auto" or not can or obstacle(policy.lm) is not None:
        return options
    return replace(options, cuda_graphs="on")


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
