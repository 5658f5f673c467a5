"""Settings of the measures of ``heedful evaluate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.online import EnvironmentOptions
from heedful.configs.options import MachineOptions, RecordOptions, SamplingOptions, TrustOptions
from heedful.configs.scoring import RewardOptions
from heedful.configs.settings import FINITE, POSITIVE, Range
from heedful.errors import ConfigError
from heedful.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(RecordOptions, TrustOptions, MachineOptions):
    """Settings of every measure."""

    SECTION = "evaluation"

    data: str
    """Data to measure on: a file (docs/data.md), or a data set on the Hub or ModelScope."""
    eval_fraction: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Share of prompts to use, by the trainers' hash: give theirs to measure on what they held out. 1 uses all."""
    micro_batch_size: Annotated[int, POSITIVE] = 32
    """Rows in memory at a time."""
    micro_batch_tokens: Annotated[int | None, POSITIVE] = None
    """Most tokens in memory at a time, besides micro-batch-size: rows times the longest one, so padding counts. A row (pair,
    ranking) that has more is processed by itself. In sampling a row is as long as its prompt and max-new-tokens. None is no
    limit."""
    output: Path | None = None
    """JSON file for the result. None only prints it."""
    overwrite: bool = False
    """Replace an earlier result in the output file. Any other file is left alone."""

    @property
    def micro_batch(self) -> MicroBatch:
        return MicroBatch(self.micro_batch_size, self.micro_batch_tokens)


@dataclass(frozen=True, kw_only=True)
class AccuracyConfig(EvaluationOptions):
    """Share of preference pairs that a reward model puts in the right order, and its 95 % interval: prompts are independent,
    pairs of one prompt are not."""

    reward_model: str
    """The reward model."""


@dataclass(frozen=True, kw_only=True)
class SampledOptions(SamplingOptions, EnvironmentOptions, EvaluationOptions):
    """Settings of the measures that sample."""

    SECTION = "evaluation"

    model: str
    """The policy to measure."""
    max_prompts: Annotated[int | None, POSITIVE] = None
    """Use only the first N prompts. None uses all."""
    samples_per_prompt: Annotated[int, POSITIVE] = 1
    """Responses sampled to each prompt, all counted. More narrow the interval if responses to a prompt differ."""
    num_samples: Annotated[int, POSITIVE] = 4
    """Responses to show, each to another prompt."""

    def check(self) -> None:
        super().check()
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ConfigError(
                f"--samples-per-prompt {self.samples_per_prompt} needs a --temperature above 0: greedy decoding gives the "
                "same response every time"
            )


@dataclass(frozen=True, kw_only=True)
class ScoresConfig(RewardOptions, SampledOptions):
    """Mean score of a policy's responses under a reward."""


@dataclass(frozen=True, kw_only=True)
class BestOfNConfig(ScoresConfig):
    """Mean score of the best of n responses to a prompt, chosen by a reward and, if you like, judged by another."""

    n: Annotated[int, POSITIVE] = 4
    """Responses to choose from. More raise score, KL and cost; 1 is the plain model."""
    judge: tuple[str, ...] = ()
    """Another reward that scores the chosen responses, in the same forms; several are summed. None takes --rewards."""
    samples_per_prompt: Annotated[int, POSITIVE] = 1
    """Choices made for each prompt, among n responses each, all counted."""

    @property
    def group_size(self) -> int:
        return self.n

    def check(self) -> None:
        super().check()
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"--n {self.n} needs a --temperature above 0: greedy decoding gives the same response every time"
            )


@dataclass(frozen=True, kw_only=True)
class PassAtKConfig(ScoresConfig):
    """pass@k: how often at least one of k responses to a prompt is correct, by a reward such as rule:exact_number."""

    k: tuple[int, ...] = (1,)
    """Tries per prompt, such as 1 4 16; at most samples-per-prompt."""
    samples_per_prompt: Annotated[int, POSITIVE] = 16
    """Responses sampled to each prompt, from which every k is estimated without bias. More than k narrow the interval."""
    correct_from: Annotated[float, FINITE] = 1.0
    """A response is correct if its score is at least this."""

    def check(self) -> None:
        super().check()
        if not self.k or any(isinstance(k, bool) or not 1 <= k <= self.samples_per_prompt for k in self.k):
            raise ConfigError(
                f"--k must be numbers from 1 to --samples-per-prompt {self.samples_per_prompt}, got "
                f"{' '.join(map(str, self.k)) or 'none'}: k cannot exceed the number of responses; raise "
                "--samples-per-prompt or lower --k"
            )
        if len(set(self.k)) < len(self.k):
            raise ConfigError(f"--k names a number twice, got {' '.join(map(str, self.k))}; leave one out")


@dataclass(frozen=True, kw_only=True)
class WinRateConfig(ScoresConfig):
    """How often a policy's response scores higher than another policy's, ties counted one half."""

    baseline: str
    """The policy to compare with."""

    @property
    def group_size(self) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class KLConfig(SampledOptions):
    """KL divergence of a policy to a reference, in nats per response, on responses sampled from the policy."""

    reference: str
    """The reference model."""

    def check(self) -> None:
        super().check()
        if self.temperature == 0:
            raise ConfigError("--temperature must be greater than 0 here: greedy decoding has no KL")


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(EvaluationOptions):
    """Perplexity of a language model on text or demonstrations: exp of the mean negative log-probability per token."""

    model: str
    """The language model."""
    max_length: Annotated[int | None, POSITIVE] = None
    """Tokens read at a time; None is the model's context."""
    loss_on: Literal["response", "all"] = "response"
    """Tokens to measure in demonstrations: response, or all, the prompt too (each conversation once, without its first
    token)."""
