"""Settings of trackers, which get a run's metrics in addition to its own files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.settings import NOT_NEGATIVE, Settings, refuse
from heedful.errors import ConfigError

Tracker = Literal["wandb", "trackio", "mlflow", "swanlab"]


@dataclass(frozen=True, kw_only=True)
class TrackingOptions(Settings):
    """Which trackers follow a run. One that hangs or fails does not stop it: metrics.jsonl and tensorboard/ stay complete. A
    run waits for them at its end, for a minute at most."""

    SECTION = "logging"

    track: tuple[Tracker, ...] = ()
    """Trackers that follow the run: wandb, trackio, mlflow, swanlab. They get settings, metrics and the summary. Each is an
    extra (pip install "heedful[wandb]") and takes its address, login and offline mode from its own environment variables."""
    track_project: str = "heedful"
    """Project that the run appears in (the experiment of MLflow), under the name of its output folder."""

    def check(self) -> None:
        super().check()
        if len(set(self.track)) < len(self.track):
            raise ConfigError(f"--track {' '.join(self.track)} names a tracker twice; leave one out")
        if not self.track:
            refuse(
                self,
                "track_project",
                because="belongs to --track, which names no tracker; add one, such as --track wandb, or leave it out",
            )
        if self.track_project == "":
            raise ConfigError("--track-project is empty; name one, or leave it out")


@dataclass(frozen=True, kw_only=True)
class TrackConfig(Settings):
    """Send what a tracker lacks of a run's metrics, all of them if it has none: heedful track RUN TRACKER."""

    run: Path
    """Folder of the run."""
    to: Tracker
    """wandb, trackio, mlflow or swanlab."""
    project: str | None = None
    """Project of the run in the tracker. None is the one used before, or else that of its settings."""
    name: str | None = None
    """Name of the run in the tracker. None is the one used there before, or else that of its folder."""
    wait: Annotated[float, NOT_NEGATIVE] = 600.0
    """Seconds to wait before giving up."""

    POSITIONAL = ("run", "to")

    def check(self) -> None:
        super().check()
        for name in ("project", "name"):
            if getattr(self, name) == "":
                raise ConfigError(f"--{name} is empty; name one, or leave it out")
