"""Settings of the benchmarks of lm-evaluation-harness."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from heedful.configs.options import MachineOptions
from heedful.configs.ranges import NOT_NEGATIVE, POSITIVE
from heedful.configs.trust import TrustOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TasksConfig(TrustOptions, MachineOptions):
    """Benchmarks by lm-evaluation-harness (pip install "heedful[lm-eval]"), such as --tasks gsm8k arc_easy."""

    model: str
    """The language model: a folder in Hugging Face format (LoRA adapters too), a Hub name, or modelscope:ORG/NAME."""
    tasks: tuple[str, ...]
    """Tasks or groups by the harness's names (lm-eval ls tasks lists them), or of your own in task-folder."""
    task_folder: tuple[Path, ...] = ()
    """Folders of task files (.yaml) of your own, in the harness's form. Python functions that they name are run."""
    limit: Annotated[int | None, POSITIVE] = None
    """Measure only the first N documents of each task. The result is then no score of the task; None measures all."""
    few_shot: Annotated[int | None, NOT_NEGATIVE] = None
    """Solved examples before each question. None is what the task says."""
    chat: bool = False
    """Write every question through the model's chat template; for models that were trained on conversations."""
    batch_size: Annotated[int, POSITIVE] = 8
    """Requests at a time."""
    output: Path | None = None
    """JSON file for the result. None only prints it."""
    overwrite: bool = False
    """Replace an earlier result in the output file. Any other file is left alone."""

    def check(self) -> None:
        super().check()
        object.__setattr__(self, "task_folder", tuple(Path(path) for path in self.task_folder))
        if self.output is not None:
            object.__setattr__(self, "output", Path(self.output))
        if not self.tasks:
            raise ConfigError("--tasks is missing: name tasks of lm-evaluation-harness, such as --tasks gsm8k arc_easy")
        for folder in self.task_folder:
            if not folder.is_dir():
                raise ConfigError(f"--task-folder {folder} is no folder; name one that holds task files (.yaml)")
            if not any(folder.rglob("*.yaml")):
                raise ConfigError(f"--task-folder {folder} holds no .yaml file, so it has no task")
