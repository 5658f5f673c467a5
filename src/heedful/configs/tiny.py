"""Settings of tiny random models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heedful.configs.checks import positive, seed
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Make a tiny model with random weights and a byte tokenizer, to try things on."""

    output: Path
    """Folder to write."""
    architecture: Literal["gpt2", "qwen2", "qwen3", "llama", "deberta-v2"] = "qwen3"
    """Shape of the model; deberta-v2 is an encoder, for reward models."""
    hidden_size: int = 64
    """Width; a multiple of 8."""
    num_layers: int = 2
    """Depth."""
    max_length: int = 512
    """Context in tokens (bytes)."""
    initializer_range: float = 0.02
    """Standard deviation of the random weights. 0.02 is small for narrow models; 1 / sqrt(hidden-size) keeps their scale."""
    seed: int = 0
    """Seed of the weights."""
    overwrite: bool = False
    """Replace what already lies in the folder."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", Path(self.output).expanduser())
        positive(self, "hidden_size", "num_layers", "max_length", "initializer_range")
        seed(self, "seed")
        if self.hidden_size % 8:
            raise ConfigError(f"--hidden-size must be a multiple of 8 (4 heads of even size), got {self.hidden_size}")
