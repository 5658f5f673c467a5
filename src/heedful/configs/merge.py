"""Settings of merging an adapter into its base."""

from dataclasses import dataclass
from pathlib import Path

from heedful.configs.trust import TrustOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MergeConfig(TrustOptions):
    """Write a plain model from LoRA adapters and the model they belong to: a policy, reward model or value model."""

    adapter: str
    """Folder of the adapters, such as the final/ of a run with --lora-rank."""
    output: Path
    """Folder to write the model to."""
    overwrite: bool = False
    """Replace a model that is already in the output folder."""

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "output", Path(self.output))
        if str(self.output) in ("", "."):
            raise ConfigError("--output must name a folder for the model, such as runs/merged")
