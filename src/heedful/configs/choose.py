"""Settings of ``heedful choose``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.checks import CheckOptions
from heedful.configs.online import ScoreOptions
from heedful.configs.options import (
    DefaultRate,
    MachineOptions,
    MemoryOptions,
    ModelOptions,
    RecordOptions,
    SamplingOptions,
)
from heedful.configs.settings import BELOW_ONE, NOT_NEGATIVE, POSITIVE, REQUIRED, Range, multiple, refuse
from heedful.errors import ConfigError

TOKENS = 200_000
"""Sampled tokens of each run, if neither ``tokens`` nor ``minutes`` says."""


@dataclass(frozen=True, kw_only=True)
class ChooseConfig(
    CheckOptions, ScoreOptions, SamplingOptions, RecordOptions, MemoryOptions, ModelOptions, MachineOptions
):
    """PPO or GRPO for these prompts and this reward? Train with both for a short budget of sampled tokens, and compare."""

    data: Annotated[str, REQUIRED] = ""
    """Prompts (docs/data.md): a file, or a data set on the Hub or ModelScope."""
    eval_data: str | None = None
    """Held-out prompts. None holds out a part of the data, split by prompt."""
    eval_fraction: Annotated[float, BELOW_ONE] = 0.2
    """Share of prompts to hold out if there is no eval-data, chosen by a hash of the prompt."""
    eval_prompts: Annotated[int, POSITIVE] = 128
    """Most held-out prompts. More narrow the intervals."""
    eval_samples: Annotated[int, POSITIVE] = 4
    """Responses to each held-out prompt. More narrow the intervals."""

    tokens: Annotated[int | None, POSITIVE] = None
    """Tokens that each run samples: it ends with the step that reaches them. None is 200,000, or what minutes say."""
    minutes: Annotated[float | None, POSITIVE] = None
    """In place of tokens, the minutes for all runs together, without loading and evaluating. The first run gets its share of
    them, and all others sample as many tokens as it did."""
    seeds: Annotated[int, Range(at_least=2, at_most=100)] = 4
    """Runs of each method, with seeds from --seed on. More narrow the intervals; raise it and repeat the command, and only
    the new ones run."""
    output: Annotated[Path, REQUIRED] = Path("runs/choose")
    """Folder for the runs, the page choose.html and the numbers choose.json. The same command goes on with an unfinished
    one."""
    json: bool = False
    """Print the numbers as JSON instead of the table."""

    samples_per_prompt: Annotated[int, Range(at_least=2)] = 8
    """Responses to each prompt of GRPO: a group. PPO draws one, or more if a step has more responses than there are
    prompts."""
    rollout_batch_size: Annotated[int, POSITIVE] = 64
    """Responses per step of both."""
    minibatch_size: Annotated[int, POSITIVE] = 64
    """Most responses per optimizer step of both."""
    ppo_epochs: Annotated[int, POSITIVE] = 4
    """Passes of both over a rollout batch."""
    learning_rate: Annotated[float, POSITIVE] = DefaultRate(3e-6)
    """Learning rate of both, constant. With lora-rank the default is ten times as large."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.05
    """KL penalty coefficient of both; PPO's is off the rewards, GRPO's in the loss."""
    critic: Literal["shared", "separate"] = "shared"
    """PPO's critic. shared: a value head that reads the policy's trunk. separate: a model of its own."""
    value_model: str | None = None
    """Where a separate critic starts from. None is the policy's model."""
    reference: str | None = None
    """Frozen model that the policy is compared with. None is the policy as it starts."""
    max_prompt_tokens: Annotated[int | None, POSITIVE] = None
    """Longest prompt, in tokens. None is a quarter of what the model can read, but at least 256 and at most 1024."""
    micro_batch_size: Annotated[int, POSITIVE] = 8
    """Most rows in memory at a time. It never changes the gradient."""

    def check(self) -> None:
        super().check()
        if self.tokens is not None and self.minutes is not None:
            raise ConfigError(
                f"--tokens {self.tokens} and --minutes {self.minutes:g} are both a budget; leave out one of the two"
            )
        if self.eval_data is None and not self.eval_fraction:
            raise ConfigError(
                "nothing is held out, so nothing can be compared: set --eval-fraction above 0, such as 0.2, or --eval-data"
            )
        if self.temperature == 0:
            raise ConfigError("--temperature must be above 0: greedy decoding gives a group of equal responses")
        multiple(self, "rollout_batch_size", "samples_per_prompt")
        if self.rollout_batch_size == self.samples_per_prompt:
            raise ConfigError(
                f"--rollout-batch-size {self.rollout_batch_size} is a single group of --samples-per-prompt, whose gradient "
                f"cannot be compared with that of another; make it at least {2 * self.samples_per_prompt}"
            )
        step = self.rollout_batch_size * self.max_new_tokens
        if self.minutes is None and self.budget < step:
            raise ConfigError(
                f"--tokens {self.budget} is less than one step may sample: {self.rollout_batch_size} responses "
                f"(--rollout-batch-size) of up to {self.max_new_tokens} tokens (--max-new-tokens); make it at least {step}, "
                f"better {20 * step}, or lower one of the two"
            )
        if self.critic == "shared":
            refuse(self, "value_model", because="belongs to a separate critic: add --critic separate")

    @property
    def budget(self) -> int:
        """``tokens``, or its default."""
        return self.tokens or TOKENS
