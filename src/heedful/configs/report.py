"""Settings of the learning curves."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from heedful.configs.settings import Settings
from heedful.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Settings):
    """Draw the learning curves of runs; those of the same algorithm overlay."""

    runs: tuple[str, ...]
    """Folders of runs, such as runs/sft runs/ppo."""
    output: Path = Path("curves.png")
    """Picture to write: .png, .svg or .pdf."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("runs",)
    """Settings whose values may stand first, without their flags."""

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "output", Path(self.output))
        if not self.runs:
            raise ConfigError("no run is named: heedful report RUN ..., such as heedful report runs/sft runs/ppo")
        if self.output.suffix.lower() not in FORMATS:
            raise ConfigError(f"--output {self.output} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
