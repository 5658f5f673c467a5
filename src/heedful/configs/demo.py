"""Settings of the demo."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.checks import require_label_extra
from heedful.configs.options import MachineOptions
from heedful.configs.ranges import Range
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
    label: bool = False
    """Label pairs of the model's answers yourself, in the browser. The reward model then learns only from your labels, not
    from the demo's preferences."""
    label_pairs: Annotated[int, Range(at_least=10, at_most=5000)] = 30
    """Pairs to label with --label. More make a better reward model."""
    label_port: Annotated[int, Range(at_least=1, at_most=65535)] = 8765
    """Port of the page with --label."""
    label_simulated: bool = False
    """With --label, without a browser: a simulated labeller who agrees with the gold judge on 73 % of the pairs."""

    def check(self) -> None:
        super().check()
        if self.label_simulated and not self.label:
            raise ConfigError("--label-simulated says who labels with --label, which is not given; add it")
        if self.label and not self.label_simulated:
            require_label_extra("--label")
        object.__setattr__(self, "output", Path(self.output))
        if str(self.output) in ("", "."):
            raise ConfigError("--output must name a folder for the demo, such as runs/demo")
