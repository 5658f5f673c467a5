"""Settings that save memory: adapters in place of whole matrices, recomputed activations, smaller numbers."""

from dataclasses import dataclass
from typing import Any, Literal

from heedful.configs.checks import flag, not_negative, positive
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """Low-rank adapters (Hu et al. 2021): the model stays as it is, and what is learned is a product of two thin matrices."""

    lora_rank: int = 0
    """Rank of the adapters; 0 trains every weight instead. Raising it lets more be learned, for more memory."""
    lora_alpha: float | None = None
    """The adapters' product is multiplied by lora-alpha / lora-rank; None is twice the rank, so a factor of 2."""
    lora_targets: str = "all-linear"
    """What gets adapters: all-linear (every linear layer below the output head), or ends of names, such as q_proj,v_proj."""

    def check_lora(self) -> None:
        not_negative(self, "lora_rank")
        positive(self, "lora_alpha")
        if not all(part.strip() for part in self.lora_targets.split(",")):
            raise ConfigError(
                f"--lora-targets must be all-linear or names with commas between, got {self.lora_targets!r}"
            )
        self.check_belongs_to_lora("lora_alpha", None)
        self.check_belongs_to_lora("lora_targets", "all-linear")

    def check_belongs_to_lora(self, field: str, default: Any) -> None:
        """Refuse a setting of adapters where there are none. Raises ConfigError."""
        if not self.lora_rank and getattr(self, field) != default:
            raise ConfigError(f"{flag(field)} belongs to adapters: add --lora-rank, such as --lora-rank 16")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(LoRAOptions):
    """Other ways to need less memory."""

    gradient_checkpointing: bool = False
    """Keep each layer's input alone and compute the rest again in the backward pass: less memory, about a third slower."""
    optimizer: Literal["adamw", "adamw-8bit"] = "adamw"
    """adamw-8bit keeps Adam's two moments in 8 bits: needs a GPU and pip install "heedful[gpu]"."""
    quantize: Literal["none", "4bit"] = "none"
    """4bit keeps the frozen weights under the adapters in 4 bits (QLoRA): needs a GPU and pip install "heedful[gpu]"."""

    def check_memory(self) -> None:
        if self.quantize != "none" and not self.lora_rank:
            raise ConfigError(
                f"--quantize {self.quantize} freezes the model's weights: add --lora-rank, such as --lora-rank 16"
            )


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """Where the reference is kept."""

    reference_device: Literal["same", "cpu"] = "same"
    """same: beside the policy. cpu: in main memory, and computed there, which is slower and leaves the GPU to the policy."""


def check_reference_device(config: Any) -> None:
    """Refuse to move a reference that is no second model. Raises ConfigError."""
    if config.reference_device == "cpu" and config.lora_rank and config.reference is None:
        raise ConfigError(
            "--reference-device cpu moves nothing here: with --lora-rank the reference is the policy's own weights without "
            "the adapters; leave it out, or name another model with --reference"
        )
