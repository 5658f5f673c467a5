"""The folder of a run: configuration, environment, metrics, samples, models, summary."""

import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from heedful.checkpoints.adapters import adapter_chain
from heedful.configs.options import RunOptions
from heedful.configs.parse import to_yaml
from heedful.errors import ConfigError
from heedful.files import blocking_file, to_json, write_json
from heedful.hub import downloaded_model

LIBRARIES = ("heedful", "torch", "transformers", "tokenizers", "datasets", "peft", "safetensors", "numpy")


def check_folder(output: Path) -> None:
    """Refuse a path at which no folder can be. Raises ConfigError."""
    if output.is_file():
        raise ConfigError(f"--output {output} is a file; name a folder")
    blocking = blocking_file(output)
    if blocking is not None:
        raise ConfigError(f"--output {output} cannot be made: {blocking} is a file")


def check_output(config: RunOptions) -> None:
    """Refuse an output folder that is in use, before any work is done. Raises ConfigError."""
    output = config.output
    check_folder(output)
    if not output.is_dir() or not any(output.iterdir()):
        return
    is_run = (output / "environment.json").is_file()
    if is_run and not config.overwrite:
        raise ConfigError(
            f"--output {output} already holds a run; choose another folder, or add --overwrite to replace it"
        )
    if not is_run:
        raise ConfigError(
            f"--output {output} holds files that are no heedful run, so it is left alone; choose another folder"
        )
    for path in _inputs(config):
        if path.exists() and path.resolve().is_relative_to(output.resolve()):
            raise ConfigError(
                f"--output {output} holds {path}, which this run is made from and --overwrite would delete; choose another "
                "folder"
            )


def _inputs(config: RunOptions) -> list[Path]:
    """The local files and folders that a configuration names; some of them do not exist, as Hub names."""
    names = ("model", "reference", "value_model", "data", "eval_data", "offset_data", "ptx_data", "chat_template")
    paths = [getattr(config, name, None) for name in names]
    for reward in (*getattr(config, "rewards", ()), *getattr(config, "best_by", ())):
        kind, _, rest = reward.partition(":")
        paths.append({"python": rest.rpartition(":")[0], "model": rest}.get(kind))
    return [Path(part) for path in paths if path for part in _with_bases(path)]


def _with_bases(model: str) -> list[str]:
    """A model, and the models below it if it is adapters."""
    base, adapters = adapter_chain(str(model))
    return list(dict.fromkeys([str(model), *map(str, adapters), base]))


class RunFolder:
    """An open run folder. Made when everything that a user can get wrong has been checked.

    ``data`` and ``models`` are the files and folders that the run is made from: their hashes are written down. An older run
    is set aside, and deleted once the new one has done its first step; a failure before that leaves the older run, or
    nothing.

    Raises ConfigError if the folder cannot be made.
    """

    def __init__(self, config: RunOptions, command: str, *, data: Sequence[str], models: Sequence[str]) -> None:
        check_output(config)
        facts = environment(command, config.seed, data=data, models=models)
        self.path = config.output
        self._old = self.path.with_name(f".{self.path.name}.old")
        self._has_stepped = False
        try:
            shutil.rmtree(self._old, ignore_errors=True)
            if self.path.is_dir():
                self.path.rename(self._old)
            self.path.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"--output {self.path} cannot be made: {error.strerror}") from error
        try:
            self._open(config, facts)
        except BaseException:  # a full disk, say
            self._undo()
            raise

    def _open(self, config: RunOptions, facts: Mapping[str, Any]) -> None:
        """Write what is known before the first step, and open what is written to in every one."""
        write_json(self.path / "environment.json", facts)
        (self.path / "config.yaml").write_text(to_yaml(config, leave_out=("output", "overwrite")), encoding="utf-8")
        self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        self._samples = (self.path / "samples.jsonl").open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(self.path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, and the same numbers for TensorBoard."""
        if step > 0 and not self._has_stepped:
            self._has_stepped = True
            shutil.rmtree(self._old, ignore_errors=True)
        self._write_line(self._metrics, {"step": step, **metrics})
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Lines of samples.jsonl."""
        for sample in samples:
            self._write_line(self._samples, {"step": step, **sample})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json: the run is complete."""
        write_json(self.path / "summary.json", summary)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._samples.close()
        self._tensorboard.close()
        if error is not None and not self._has_stepped:
            self._undo()

    def _undo(self) -> None:
        """Leave the older run, or nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._old.is_dir():
            self._old.rename(self.path)

    @staticmethod
    def _write_line(file: Any, record: Mapping[str, Any]) -> None:
        file.write(to_json(record) + "\n")
        file.flush()


def environment(command: str, seed: int, *, data: Sequence[str], models: Sequence[str]) -> dict[str, Any]:
    """Versions, revision, hardware, seed, and content hashes of data files and parent models."""
    models = [downloaded_model(name) for name in models]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": f"heedful {command}",
        "seed": seed,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES},
        "revision": _git_revision(),
        "platform": platform.platform(),
        "cpu": {"machine": platform.machine(), "threads": torch.get_num_threads()},
        "gpus": gpus,
        "arguments": sys.argv[1:],
        "data": {path: _sha256([Path(path)]) for path in data if Path(path).is_file()},
        "models": {
            path: _sha256(_weight_files(Path(path)))
            for model in models
            for path in _with_bases(model)
            if Path(path).is_dir()
        },
    }


def _weight_files(folder: Path) -> list[Path]:
    names = ("*.safetensors", "config.json", "adapter_config.json", "tokenizer.json", "heedful.json")
    return sorted(path for name in names for path in folder.glob(name))


def _sha256(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _git_revision() -> str | None:
    """Revision of the checkout that heedful runs from, with ``-dirty`` if it was changed; None outside one."""
    folder = str(Path(__file__).resolve().parent)

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=5, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    if git("ls-files", "--error-unmatch", __file__) is None:  # an installed package inside somebody's repository
        return None
    revision = git("rev-parse", "HEAD")
    return f"{revision}-dirty" if revision and git("status", "--porcelain", "--", folder) else revision
