"""Settings of supervised fine-tuning."""

from dataclasses import dataclass
from typing import Literal

from heedful.configs.checks import not_negative, positive
from heedful.configs.options import TrainingOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainingOptions):
    """Supervised fine-tuning: learn to imitate demonstrations (or plain text)."""

    model: str
    """Language model to start from: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    chat_template: str = ""
    """Chat template in place of the model's own: plain, or a Jinja file. Saved with the model."""
    batch_size: int = 16
    """Demonstrations an optimizer step."""
    epochs: float = 3
    """Passes over the data."""
    max_steps: int | None = None
    """Optimizer steps; overrides epochs."""
    max_length: int | None = None
    """Longest demonstration in tokens, prompt included; None is the model's context."""
    loss_on: Literal["response", "all"] = "response"
    """Which tokens are learned: the response, or the prompt as well. Plain text is learned whole either way."""

    lora_dropout: float = 0.0
    """Share of the adapters' inputs that is left out of a step. The other trainers have no dropout."""

    def __post_init__(self) -> None:
        self.check_training()
        not_negative(self, "lora_dropout")
        if self.lora_dropout >= 1:
            raise ConfigError(f"--lora-dropout must be below 1, got {self.lora_dropout}")
        self.check_belongs_to_lora("lora_dropout", 0.0)
        positive(self, "batch_size", "epochs", "max_steps", "max_length")
