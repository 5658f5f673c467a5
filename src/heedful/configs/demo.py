"""Settings of the demo."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heedful.configs.options import MachineOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DemoConfig(MachineOptions):
    """Watch a tiny random model go through SFT, a reward model and PPO in a built-in world, and come out better."""

    output: Path = Path("runs/demo")
    """Folder of the demo: the world's data, the models, the three runs, tables and curves."""
    overwrite: bool = False
    """Replace a demo that is already in the output folder."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Compute precision; weights stay float32. A model this small gains nothing from bfloat16."""

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "output", Path(self.output))
        if str(self.output) in ("", "."):
            raise ConfigError("--output must name a folder for the demo, such as runs/demo")
