"""Settings of ``heedful runs``."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from heedful.configs.settings import Settings
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunsConfig(Settings):
    """List the runs in a folder and below it, with their state, step and last metric."""

    folder: Path = Path("runs")
    """Where to look: a run, or a folder that holds runs at any depth."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("folder",)
    """Settings whose values may stand first, without their flags."""

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "folder", Path(self.folder))
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is not a folder; name one that holds runs: heedful runs FOLDER")
