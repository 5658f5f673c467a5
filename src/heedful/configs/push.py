"""Settings of ``heedful push``."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from heedful.configs.settings import Settings
from heedful.errors import ConfigError

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class PushConfig(Settings):
    """Upload the model of a run to the Hugging Face Hub, with a card: heedful push RUN ORG/NAME --license apache-2.0."""

    run: Path
    """Folder of the run."""
    to: str
    """Repository on the Hub, as ORG/NAME; it is made if it is not there."""
    license: str = ""
    """Licence of the weights, as the Hub writes it: apache-2.0, mit, cc-by-4.0, llama3.1, other. Must be given: it follows
    from the licences of the base model and the data, which heedful does not know."""
    best: bool = False
    """Upload best/ instead of final/."""
    private: bool = True
    """Make a private repository. --no-private makes a public one, or pushes to one that is public."""
    dry_run: bool = False
    """Write what would go out to a folder, and upload nothing."""
    folder: Path | None = None
    """The folder of --dry-run. None is the run's with -push behind its name."""
    base_model: str | None = None
    """The model on the Hub that training began with, or on which adapters lie. None is what the run, and the runs that it
    continues, say; of adapters, what these say."""
    language: tuple[str, ...] = ()
    """Languages of the model, such as en zh."""
    results: tuple[Path, ...] = ()
    """Results of heedful evaluate (--output) for the card."""
    message: str = "Upload a model trained with heedful"
    """Message of the commit on the Hub."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("run", "to")
    """Settings whose values may stand first, without their flags."""

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "run", Path(self.run))
        object.__setattr__(self, "results", tuple(Path(path) for path in self.results))
        if self.folder is not None:
            object.__setattr__(self, "folder", Path(self.folder))
        if not REPOSITORY.fullmatch(self.to):
            raise ConfigError(
                f"{self.to!r} is no name of a repository; write ORG/NAME: heedful push {self.run} ORG/NAME"
            )
        if not self.license:
            raise ConfigError(
                "--license is missing: the licence of the weights, as the Hub writes it, such as apache-2.0, mit, cc-by-4.0, "
                "llama3.1 or other; it follows from those of the base model and the data"
            )
        if not LICENSE.fullmatch(self.license):
            raise ConfigError(
                f"--license {self.license!r} is not as the Hub writes it, such as apache-2.0, mit or other"
            )
        if self.base_model is not None and not REPOSITORY.fullmatch(self.base_model):
            raise ConfigError(f"--base-model {self.base_model!r} is no model on the Hub; write ORG/NAME")
        for code in self.language:
            if not LANGUAGE.fullmatch(code):
                raise ConfigError(f"--language {code!r} is no code of a language, such as en, zh or pt-BR")
        if self.folder is not None and not self.dry_run:
            raise ConfigError(f"--folder {self.folder} belongs to --dry-run; add it, or leave --folder out")

    @property
    def model_folder(self) -> Path:
        """Where the model is."""
        return self.run / ("best" if self.best else "final")

    @property
    def dry_run_folder(self) -> Path:
        """Where a dry run writes."""
        return self.folder or self.run.with_name(f"{self.run.resolve().name}-push")
