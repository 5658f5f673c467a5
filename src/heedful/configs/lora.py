"""Settings that save memory: adapters in place of whole matrices, recomputed activations, smaller numbers."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from heedful.configs.checks import flag
from heedful.configs.ranges import NOT_NEGATIVE, POSITIVE
from heedful.configs.settings import Settings
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LoRAOptions(Settings):
    """Low-rank adapters (Hu et al. 2021): the model stays as it is, and the product of two thin matrices is learned."""

    SECTION = "optimisation"

    lora_rank: Annotated[int, NOT_NEGATIVE] = 0
    """Rank of LoRA adapters; 0 trains every weight instead. Raising it lets more be learned, for more memory."""
    lora_alpha: Annotated[float | None, POSITIVE] = None
    """The adapters' product is multiplied by lora-alpha / lora-rank. None is twice the rank, so a factor of 2."""
    lora_targets: str = "all-linear"
    """What gets adapters: all-linear (every linear layer below the output head, experts too), or ends of names, such as
    q_proj,v_proj."""

    def check(self) -> None:
        super().check()
        if not all(part.strip() for part in self.lora_targets.split(",")):
            raise ConfigError(
                f"--lora-targets must be all-linear or names with commas between, got {self.lora_targets!r}"
            )
        self.check_belongs_to_lora("lora_alpha", None)
        self.check_belongs_to_lora("lora_targets", "all-linear")

    def check_belongs_to_lora(self, field: str, default: Any) -> None:
        """Refuse a setting of adapters if there are none. Raises ConfigError."""
        if not self.lora_rank and getattr(self, field) != default:
            raise ConfigError(f"{flag(field)} belongs to adapters: add --lora-rank, such as --lora-rank 16")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(LoRAOptions):
    """Other ways to need less memory."""

    SECTION = "optimisation"

    gradient_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass: less memory, about a third slower."""
    optimizer: Literal["adamw", "adamw-8bit"] = "adamw"
    """adamw-8bit keeps Adam's two moments in 8 bits: needs a GPU and pip install "heedful[gpu]"."""
    optimizer_device: Literal["same", "cpu"] = "same"
    """cpu keeps the optimizer's moments in main memory and makes its steps there: slower, for 8 bytes less on the GPU per
    trained weight. For a run on a GPU."""
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 stores trained matrices, and their gradients, in half the memory. Steps are rounded at random, so that small
    ones count on average; results are a little noisier. Needs products in bfloat16 (--dtype)."""
    quantize: Literal["none", "4bit"] = "none"
    """4bit keeps the frozen weights under the adapters in 4 bits (QLoRA): needs a GPU and pip install "heedful[gpu]"."""

    def check(self) -> None:
        super().check()
        if self.quantize != "none" and not self.lora_rank:
            raise ConfigError(
                f"--quantize {self.quantize} freezes the model's weights: add --lora-rank, such as --lora-rank 16"
            )
        if self.optimizer != "adamw":
            for field, default in (("optimizer_device", "same"), ("weights_dtype", "float32")):
                if getattr(self, field) != default:
                    raise ConfigError(
                        f"{flag(field)} {getattr(self, field)} does not go with --optimizer {self.optimizer}, whose steps "
                        "are made on the GPU and rounded to the nearest number; leave out one of the two"
                    )
        if self.weights_dtype != "float32" and self.lora_rank:
            raise ConfigError(
                f"--weights-dtype {self.weights_dtype} is about trained matrices, and with --lora-rank these are small "
                "adapters, which stay in float32; leave out one of the two (on a GPU the frozen weights are in half "
                "precision anyway)"
            )


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(Settings):
    """The frozen model that a policy is compared with, and where it is kept."""

    SECTION = "model and data"

    reference: str | None = None
    """Frozen model that the policy is compared with. None is the policy as it starts."""
    reference_device: Literal["same", "cpu"] = "same"
    """same: beside the policy. cpu: in main memory, and computed there, which is slower and leaves the GPU to the policy."""

    def check(self) -> None:
        super().check()
        if self.reference_device == "cpu" and getattr(self, "lora_rank", None) and self.reference is None:
            raise ConfigError(
                "--reference-device cpu moves nothing here: with --lora-rank the reference is the policy's own weights "
                "without the adapters; leave it out, or name another model with --reference"
            )
