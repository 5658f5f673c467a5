"""Settings of ``heedful migrate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from heedful.configs.settings import POSITIVE, REQUIRED, Settings


@dataclass(frozen=True, kw_only=True)
class MigrateConfig(Settings):
    """Turn a script of TRL, or a YAML file of LLaMA-Factory, into one of heedful, and report what became of each setting.

    Nothing of the file runs."""

    file: Annotated[Path, REQUIRED] = Path()
    """A Python script or notebook that uses a trainer of TRL, from 0.4 to 1.16, or a YAML file of LLaMA-Factory."""
    output: Path | None = None
    """Folder for what is written, with the report migration.md. None is the file's name with -heedful, where you are."""
    overwrite: bool = False
    """Replace a folder that heedful migrate wrote."""
    version: str | None = None
    """Version of the library that the file was written for, such as 0.9.6: defaults changed from one to the next. None is the
    newest one that has the trainer and most of the file's settings."""
    arguments: str = ""
    """What is given on the script's command line, in quotes: --arguments="--learning_rate 1e-5 --use_peft". A YAML file that
    --config names there is read too."""
    processes: Annotated[int, POSITIVE] = 1
    """Processes (GPUs) that the file was written for. Batch sizes are per process there, and of all together in heedful."""

    POSITIONAL = ("file",)
    NO_SETTINGS_FILE = True
    """A YAML file that comes first is ``file``, not a file of settings for this command."""
