"""Settings of the measures of ``heedful evaluate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heedful.configs.checks import fraction, positive
from heedful.configs.options import MachineOptions, RecordOptions, SamplingOptions
from heedful.configs.scoring import RewardOptions
from heedful.errors import ConfigError
from heedful.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(RecordOptions, MachineOptions):
    """What every measure has."""

    data: str
    """Data to measure on: a .jsonl, .jsonl.gz or .parquet file, or a data set on the Hub or ModelScope."""
    eval_fraction: float = 1.0
    """Share of prompts to use, held out by the trainers' hash: give theirs to measure on what they held out. 1 is all."""
    chat_template: str = ""
    """Chat template in place of the models' own: plain, or a Jinja file."""
    micro_batch_size: int = 32
    """Rows in memory at a time."""
    micro_batch_tokens: int | None = None
    """Most tokens in memory at a time, beside micro-batch-size: rows times the longest one, so padding counts. A row (pair,
    ranking) that has more comes alone. Sampling goes by rows alone. None is no limit."""
    output: Path | None = None
    """JSON file for the result; None only prints it."""

    @property
    def micro_batch(self) -> MicroBatch:
        return MicroBatch(self.micro_batch_size, self.micro_batch_tokens)

    def check_evaluation(self) -> None:
        if self.output is not None:
            object.__setattr__(self, "output", Path(self.output).expanduser())
        self.check_machine()
        positive(self, "micro_batch_size", "micro_batch_tokens", "eval_fraction", "max_samples")
        fraction(self, "eval_fraction", "max_dropped")


@dataclass(frozen=True, kw_only=True)
class AccuracyConfig(EvaluationOptions):
    """Share of preference pairs that a reward model puts in the right order."""

    reward_model: str
    """The reward model."""

    def __post_init__(self) -> None:
        self.check_evaluation()


@dataclass(frozen=True, kw_only=True)
class SampledOptions(SamplingOptions, EvaluationOptions):
    """What the measures that sample have."""

    model: str
    """The policy to measure."""
    max_prompts: int | None = None
    """Use the first so many prompts; None is all."""
    samples_per_prompt: int = 1
    """Responses sampled to each prompt, all counted. More narrow the interval where responses to a prompt differ."""
    num_samples: int = 4
    """Responses to show, each to another prompt."""

    def check_sampled(self) -> None:
        self.check_evaluation()
        self.check_sampling()
        positive(self, "max_prompts", "samples_per_prompt", "num_samples")
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ConfigError(
                f"--samples-per-prompt {self.samples_per_prompt} needs a --temperature above 0: greedy decoding gives the "
                "same response every time"
            )


@dataclass(frozen=True, kw_only=True)
class ScoresConfig(RewardOptions, SampledOptions):
    """Mean score of a policy's responses under a reward."""

    def __post_init__(self) -> None:
        self.check_sampled()
        self.check_rewards()


@dataclass(frozen=True, kw_only=True)
class BestOfNConfig(ScoresConfig):
    """Mean score of the best of n responses to a prompt, chosen by a reward and, where wanted, judged by another."""

    n: int = 4
    """Responses to choose from. More raise the score and the KL, and cost as much more; 1 is the plain model."""
    judge: tuple[str, ...] = ()
    """Another reward that scores the chosen ones, in the same forms; several are summed. Without one, --rewards judge."""
    samples_per_prompt: int = 1
    """Choices made for each prompt, among n responses each, all counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "n")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"--n {self.n} needs a --temperature above 0: greedy decoding gives the same response every time"
            )


@dataclass(frozen=True, kw_only=True)
class WinRateConfig(ScoresConfig):
    """How often a policy's response scores higher than another policy's, ties counted one half."""

    baseline: str
    """The policy to compare with."""


@dataclass(frozen=True, kw_only=True)
class KLConfig(SampledOptions):
    """KL divergence of a policy to a reference, in nats a response, on responses sampled from the policy."""

    reference: str
    """The reference model."""

    def __post_init__(self) -> None:
        self.check_sampled()
        if self.temperature == 0:
            raise ConfigError("--temperature must be greater than 0 here: greedy decoding has no KL")


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(EvaluationOptions):
    """Perplexity of a language model on text or demonstrations: exp of the mean negative log-probability a token."""

    model: str
    """The language model."""
    max_length: int | None = None
    """Tokens read at a time; None is the model's context."""
    loss_on: Literal["response", "all"] = "response"
    """Which tokens are measured in demonstrations: the response, or the prompt as well."""

    def __post_init__(self) -> None:
        self.check_evaluation()
        positive(self, "max_length")
