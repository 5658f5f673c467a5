"""Settings of direct preference optimisation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from heedful.configs.lora import ReferenceOptions
from heedful.configs.options import TrainingOptions
from heedful.configs.ranges import FRACTION, POSITIVE
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DPOConfig(ReferenceOptions, TrainingOptions):
    """DPO: learn from pairs of responses directly, without a reward model and without sampling."""

    model: str
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: DPO. ipo: a squared distance to a margin, which does not push certain pairs for ever. hinge: SLiC."""
    beta: Annotated[float, POSITIVE] = 0.1
    """Price of leaving the reference. Raising it keeps the policy closer."""
    label_smoothing: Annotated[float, FRACTION] = 0.0
    """Share of labels assumed to be wrong (conservative DPO); only with the sigmoid loss."""
    batch_size: Annotated[int, POSITIVE] = 32
    """Pairs per optimizer step."""
    epochs: Annotated[float, POSITIVE] = 1
    """Passes over the data."""
    max_steps: Annotated[int | None, POSITIVE] = None
    """Optimizer steps; overrides epochs."""
    max_length: Annotated[int | None, POSITIVE] = None
    """Longest prompt with response in tokens; None is the model's context."""
    equal_pairs: Literal["error", "drop"] = "error"
    """What to do with pairs whose chosen and rejected responses are equal (also after truncation)."""
    learning_rate: Annotated[float, POSITIVE] = 1e-6
    """Peak learning rate."""

    def check(self) -> None:
        super().check()
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(
                f"--label-smoothing belongs to --loss sigmoid, got --loss {self.loss}; leave out one of the two"
            )
