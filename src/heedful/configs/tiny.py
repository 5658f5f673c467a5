"""Settings of tiny random models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.ranges import POSITIVE, SEED
from heedful.configs.settings import Settings
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TinyConfig(Settings):
    """Make a tiny model with random weights and a byte tokenizer, to try things on."""

    output: Path
    """Folder to write."""
    architecture: Literal["gpt2", "qwen2", "qwen3", "llama", "deberta-v2"] = "qwen3"
    """Shape of the model; deberta-v2 is an encoder, for reward models."""
    hidden_size: Annotated[int, POSITIVE] = 64
    """Width; a multiple of 8."""
    num_layers: Annotated[int, POSITIVE] = 2
    """Depth."""
    max_length: Annotated[int, POSITIVE] = 512
    """Context in tokens (bytes)."""
    initializer_range: Annotated[float, POSITIVE] = 0.02
    """Standard deviation of the random weights. 0.02 is small for narrow models; 1 / sqrt(hidden-size) keeps their scale."""
    seed: Annotated[int, SEED] = 0
    """Seed of the weights."""
    overwrite: bool = False
    """Replace what is already in the folder."""

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "output", Path(self.output))
        if self.hidden_size % 8:
            raise ConfigError(f"--hidden-size must be a multiple of 8 (4 heads of even size), got {self.hidden_size}")
