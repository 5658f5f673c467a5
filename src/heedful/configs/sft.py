"""Settings of supervised fine-tuning."""

from dataclasses import dataclass
from typing import Annotated, Literal

from heedful.configs.options import TrainingOptions
from heedful.configs.ranges import BELOW_ONE, POSITIVE


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainingOptions):
    """Supervised fine-tuning: learn to imitate demonstrations (or plain text)."""

    model: str
    """Language model to start from: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    batch_size: Annotated[int, POSITIVE] = 16
    """Demonstrations per optimizer step."""
    epochs: Annotated[float, POSITIVE] = 3
    """Passes over the data."""
    max_steps: Annotated[int | None, POSITIVE] = None
    """Optimizer steps; overrides epochs."""
    max_length: Annotated[int | None, POSITIVE] = None
    """Longest demonstration in tokens, prompt included; None is the model's context."""
    loss_on: Literal["response", "all"] = "response"
    """Which tokens are learned: the response, or the prompt as well. all learns each conversation once, but for its first
    token. Plain text is learned whole either way."""

    lora_dropout: Annotated[float, BELOW_ONE] = 0.0
    """Share of the adapters' inputs left out at random in each step. The other trainers have no dropout."""

    def check(self) -> None:
        super().check()
        self.check_belongs_to_lora("lora_dropout", 0.0)
