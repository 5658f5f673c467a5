"""Settings of direct preference optimisation."""

from dataclasses import dataclass
from typing import Literal

from heedful.configs.checks import fraction, positive
from heedful.configs.lora import ReferenceOptions, check_reference_device
from heedful.configs.options import TrainingOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DPOConfig(ReferenceOptions, TrainingOptions):
    """DPO: learn from pairs of responses directly, without a reward model and without sampling."""

    model: str
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    reference: str | None = None
    """Frozen model that the policy is compared with; None is the policy as it starts."""
    chat_template: str = ""
    """Chat template in place of the model's own: plain, or a Jinja file. Saved with the model."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: DPO. ipo: a squared distance to a margin, which does not push certain pairs for ever. hinge: SLiC."""
    beta: float = 0.1
    """Price of leaving the reference. Raising it keeps the policy closer."""
    label_smoothing: float = 0.0
    """Share of labels taken to be wrong (conservative DPO); with the sigmoid loss alone."""
    batch_size: int = 32
    """Pairs an optimizer step."""
    epochs: float = 1
    """Passes over the data."""
    max_steps: int | None = None
    """Optimizer steps; overrides epochs."""
    max_length: int | None = None
    """Longest prompt with response in tokens; None is the model's context."""
    equal_pairs: Literal["error", "drop"] = "error"
    """What to do with pairs whose chosen and rejected responses are equal (also after truncation)."""
    learning_rate: float = 1e-6
    """Peak learning rate."""

    def __post_init__(self) -> None:
        self.check_training()
        check_reference_device(self)
        positive(self, "batch_size", "epochs", "max_steps", "max_length", "beta")
        fraction(self, "label_smoothing")
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(
                f"--label-smoothing belongs to --loss sigmoid, got --loss {self.loss}; leave out one of the two"
            )
