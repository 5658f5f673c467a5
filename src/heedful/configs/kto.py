"""Settings of KTO."""

from dataclasses import dataclass
from typing import Annotated

from heedful.configs.lora import ReferenceOptions
from heedful.configs.options import TrainingOptions
from heedful.configs.ranges import POSITIVE
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KTOConfig(ReferenceOptions, TrainingOptions):
    """KTO: learn from single responses that people called good or bad, without pairs, reward model and sampling."""

    model: str
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    beta: Annotated[float, POSITIVE] = 0.1
    """Strength of the pull to the reference. Raising it keeps the policy closer."""
    desirable_weight: Annotated[float, POSITIVE] = 1.0
    """What multiplies the loss of good responses. If they are few, raise it: weight times number is to be 1 to 1.5 times that
    of the bad ones."""
    undesirable_weight: Annotated[float, POSITIVE] = 1.0
    """What multiplies the loss of bad responses. If they are few, raise it."""
    batch_size: Annotated[int, POSITIVE] = 32
    """Responses per optimizer step, at least 2. The KL to the reference is estimated on as many: small ones make it noisy."""
    epochs: Annotated[float, POSITIVE] = 1
    """Passes over the data."""
    max_steps: Annotated[int | None, POSITIVE] = None
    """Optimizer steps; overrides epochs."""
    max_length: Annotated[int | None, POSITIVE] = None
    """Longest prompt with response in tokens; None is the model's context."""
    learning_rate: Annotated[float, POSITIVE] = 1e-6
    """Peak learning rate."""

    def check(self) -> None:
        super().check()
        if self.batch_size < 2:
            raise ConfigError(
                f"--batch-size is {self.batch_size}, but KTO takes the mean of a step's log-ratios for the KL to the "
                "reference, and one is no mean; make it at least 2 (32 is usual). --micro-batch-size 1 saves the memory"
            )
