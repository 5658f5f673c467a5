"""The checkpoints of a run: saved whole or not at all, verified when read, the oldest removed first.

checkpoints/step-000100/                  the model in Hugging Face format, as in final/
checkpoints/step-000100/resume/           the state that the run continues from: tensors in safetensors, all else in JSON
checkpoints/step-000100/MANIFEST.json     every file with its size and SHA-256 sum, written last

There is no pickle, so that loading runs no code. Tensors that are divided among ranks (--shard full) are written by all
ranks, each its parts, below resume/divided/.
"""

import contextlib
import errno
import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.configs.options import TrainingOptions
from heedful.distributed import ranks
from heedful.distributed.sharded_files import Parts, write_parts
from heedful.distributed.sharding import is_divided
from heedful.errors import CheckpointError, ConfigError, MachineError
from heedful.faults import hit
from heedful.files import complete_or_absent, in_words, recover, to_json, write_text
from heedful.training.provenance import digest, file_sum

NAME = re.compile(r"step-(\d{6,})")
RESUME = "resume"
MANIFEST = "MANIFEST.json"
SCHEMA = 1
"""Version of the manifest and of what it lists. A higher one is of a newer heedful."""
STATE = "state.json"
DIVIDED = "divided"
"""The folder of tensors that are divided among ranks."""
PARTS = ".heedful-parts"
"""The end of the name of a folder in which ranks write their parts of a checkpoint."""
MOST_BYTES = 2**31
"""Size of one file of tensors, so that no more than this of a model on a GPU is copied to main memory at a time."""


class Writes(Protocol):
    """What can write a model to a folder, by itself."""

    def save(self, folder: Path) -> None:
        """Write the model to a folder."""


class RunLearner(Writes, Protocol):
    """What learns in a run, and what the run saves."""

    optimizer: torch.optim.Optimizer

    def parts(self) -> tuple[Sequence[PreTrainedModel], PreTrainedTokenizerBase]:
        """The models that it saves, and their tokenizer."""

    def unsharded(self) -> Writes:
        """What writes its models: itself, if they are not divided among ranks; else a copy of them on rank 0. All call it."""

    def state_dict(self) -> dict[str, Any]:
        """All that changes during a run."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of it to what `state_dict` returned."""


def checkpoint_path(run: Path, step: int) -> Path:
    """Where a run's checkpoint of a step is."""
    return run / "checkpoints" / f"step-{step:06d}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that verified."""

    path: Path
    step: int
    state: dict[str, Any]


class Checkpoints:
    """The folder of a run's checkpoints.

    Args:
        run: the run's folder.
        identity: the run's own name, so that no checkpoint of another run is used.
        keep: how many to keep; 0 keeps all.
    """

    def __init__(self, run: Path, identity: str, keep: int) -> None:
        self.folder, self.identity, self.keep = run / "checkpoints", identity, keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return checkpoint_path(self.folder.parent, step)

    def save(self, step: int, model: Writes, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove older ones. Raises OSError; what was there before is then still there.

        What the ranks have written of a divided state (`write_parts_of`) becomes a part of it.
        """
        with complete_or_absent(self.path(step)) as folder:
            model.save(folder)
            write_state(folder / RESUME, state)
            hit("save.parts")
            if holds_divided(state):
                parts_of(self.folder.parent, step).rename(folder / RESUME / DIVIDED)
            hit("save.state")
            write_manifest(folder, {"run": self.identity, "step": step})
            hit("save.manifest")
        if self.keep:
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old), ignore_errors=True)
        hit("save.pruned")
        return self.path(step)

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, damaged or not, in ascending order."""
        steps = [int(path.name.partition("-")[2]) for path in self.candidates() if (path / MANIFEST).exists()]
        return steps[::-1]

    def candidates(self) -> list[Path]:
        """All that is named like a checkpoint, newest first: by the step, not by the time, which clocks set back."""
        found = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)] if self.folder.is_dir() else []
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]), reverse=True)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and a line about each newer one that does not.

        Those are set aside as bad-step-N, with the reason in REASON.txt. What a killed process was writing is removed.
        """
        for path in self.folder.glob(".step-*") if self.folder.is_dir() else ():
            if path.name.endswith(PARTS):
                shutil.rmtree(path, ignore_errors=True)
            else:
                recover(self.folder / path.name.removeprefix(".").rpartition(".")[0])
        notes: list[str] = []
        for path in self.candidates():
            try:
                return self.read(path), notes
            except CheckpointError as error:
                aside = path.rename(_unused(path.with_name(f"bad-{path.name}")))
                if aside.is_dir() and not aside.is_symlink():
                    with contextlib.suppress(OSError):
                        write_text(aside / "REASON.txt", f"{error}\n")
                notes.append(f"{path.name} was not written to its end or is damaged: {error}; it is now {aside.name}")
        return None, notes

    def read(self, path: Path) -> Checkpoint:
        """A checkpoint of this run. Raises CheckpointError if it does not verify or is of another run."""
        return Checkpoint(path, self.check(path), read_state(path / RESUME))

    def check(self, path: Path) -> int:
        """The step of a checkpoint. Raises CheckpointError as `read` does, but for its state, which is not read."""
        if path.is_symlink():
            raise CheckpointError("it is a link")
        manifest = verify(path)
        if manifest.get("run") != self.identity:
            raise CheckpointError("it is of another run")
        step = manifest.get("step")
        if not isinstance(step, int) or path.name != self.path(step).name:
            raise CheckpointError(f"it is of step {step}")
        return step

    def go_back_to(self, step: int) -> list[Path]:
        """Set later checkpoints aside as later-step-N. Returns where they are."""
        later = [path for path in self.candidates() if int(path.name.partition("-")[2]) > step]
        return [path.rename(_unused(path.with_name(f"later-{path.name}"))) for path in later]

    def set_model_aside(self, name: str) -> list[str]:
        """Set a model of the run, best or final, aside as later-NAME. Returns a line about it, if there is one."""
        model = self.folder.parent / name
        if not model.is_dir():
            return []
        return [f"set aside, as it is of a later step: {model.rename(_unused(self.folder / f'later-{name}'))}"]


def _unused(path: Path) -> Path:
    """A path at which there is nothing: this one, or one with a number."""
    new, number = path, 1
    while new.exists() or new.is_symlink():
        number += 1
        new = path.with_name(f"{path.name}-{number}")
    return new


def check_space(config: TrainingOptions, learner: RunLearner) -> None:
    """Refuse a disk that has no room for what a run writes. Raises MachineError; ConfigError if it takes no files at all.

    A checkpoint has the weights that learn as a model, the learner's state, and Adam's two moments, which are part of the
    state from the first step on. While a new one is written there is one more than are kept, besides best/ and final/. What a
    run that continues has of these counts as free.

    """
    weights = [p for group in learner.optimizer.param_groups for p in group["params"]]
    trained = sum(p.numel() * max(4, p.element_size()) for p in weights)
    number = (config.save_total_limit or 2) + 1
    state = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(learner.state_dict()).values())
    needed = number * (state + 3 * trained) + 2 * trained + 32 * 2**20
    output = config.folder.resolve()
    there = next(folder for folder in (output, *output.parents) if folder.exists())
    free = shutil.disk_usage(there).free + (0 if config.overwrite else _bytes_of_models(output))
    if free < needed:
        _check_writable(config.folder, there)
        raise MachineError(
            f"--output {config.folder}: the disk has {free / 1e9:.1f} GB free, and the run needs "
            f"{math.ceil(needed / 1e8) / 10:.1f} GB for {number} checkpoints, best/ and final/; free some, choose another "
            "disk, keep fewer (--save-total-limit), or train adapters (--lora-rank)"
        )


def _check_writable(output: Path, there: Path) -> None:
    """Refuse a place that takes no files, such as a read-only disk, which has no free bytes either. Raises ConfigError."""
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(f"--output {output} cannot be made: {in_words(error)}; choose another folder") from error


def _bytes_of_models(run: Path) -> int:
    """Size of the checkpoints, best/ and final/ of a run; not of what is set aside, which no new one replaces."""
    folders = [run / "best", run / "final", *Checkpoints(run, "", keep=0).candidates()]
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of all files in a folder, with ``facts``. It is the last file written."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_sum(folder / name)}
        for name in sorted(_files(folder))
    }
    content = {"schema": SCHEMA, **facts, "files": files}
    write_text(folder / MANIFEST, to_json({**content, "sha256": digest(content)}, indent=1))


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, if all its files, and no others, are as they were written.

    Links are not followed: a checkpoint holds its own files. Raises CheckpointError with the first thing that is wrong.
    """
    manifest = _read_manifest(folder)
    files = manifest["files"]
    found = _files(folder) - {MANIFEST}
    for name in files:
        if name not in found:
            raise CheckpointError(f"{name} is missing")
    extra = sorted(found - files.keys())
    if extra:
        raise CheckpointError(f"{extra[0]} is not in its manifest")
    for name, facts in files.items():
        size = (folder / name).stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(f"{name} has {size} bytes, not {facts['bytes']}")
        if file_sum(folder / name) != facts["sha256"]:
            raise CheckpointError(f"{name} has other content than was written")
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"it has no {MANIFEST}, so it was not written to its end")
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes().decode("utf-8"))
        schema, written = manifest["schema"], manifest.pop("sha256")
        files = {name: (facts["bytes"], facts["sha256"]) for name, facts in manifest["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its {MANIFEST} cannot be read") from error
    if schema != SCHEMA:
        raise CheckpointError(f"it has the schema {schema!r}; this heedful reads {SCHEMA}: use the one that wrote it")
    if written != digest(manifest):
        raise CheckpointError(f"its {MANIFEST} was changed")
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"its {MANIFEST} names {name!r}, outside of it")
    return manifest


def _files(folder: Path) -> set[str]:
    """The files below a folder. Raises CheckpointError for anything that is neither a file nor a folder, such as a link."""
    names = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise CheckpointError(f"{name} is a link or no file, which no checkpoint holds")
        if path.is_file():
            names.add(name)
    return names


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state into a new folder, but for what is divided among ranks.

    Args:
        folder: does not exist yet.
        state: a tree of dictionaries, lists, tuples, numbers, strings, None and tensors. It is read back equal, also numbers
            that JSON has no word for and dictionaries whose keys are numbers.

    Raises TypeError if something in it is of another kind.
    """
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, tensors)
    folder.mkdir()
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if is_divided(tensor):
            continue
        size += _bytes(tensor)
        if files[-1] and size > MOST_BYTES:
            files.append({})
            size = _bytes(tensor)
        files[-1][key] = tensor
    for number, content in enumerate(files):
        on_cpu = {key: tensor.detach().to("cpu").contiguous() for key, tensor in content.items()}
        save_file(on_cpu, folder / f"tensors-{number:05d}.safetensors")
    write_text(folder / STATE, json.dumps(tree, ensure_ascii=False, allow_nan=False))


def read_state(folder: Path) -> dict[str, Any]:
    """Read a state; its tensors are on the CPU, divided ones are `Stored`. Raises CheckpointError."""
    try:
        tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("tensors-*.safetensors")):
            tensors |= load_file(path)
        divided = Parts(folder / DIVIDED) if (folder / DIVIDED).is_dir() else None
        text = (folder / STATE).read_text(encoding="utf-8")
        state: dict[str, Any] = json.loads(text, object_hook=lambda value: _decode(value, tensors, divided))
    except (CheckpointError, MemoryError, OSError):  # the last two are the machine's, not the file's
        raise
    except Exception as error:  # whatever a damaged file makes the readers raise
        raise CheckpointError(f"{folder} holds no state of a run: {type(error).__name__}: {error}") from error
    return state


def holds_divided(state: Mapping[str, Any]) -> bool:
    """Whether anything in a state is divided among ranks."""
    return any(map(is_divided, _tensors(state).values()))


def parts_of(run: Path, step: int) -> Path:
    """Where ranks write their parts of a step's state, before a checkpoint is made of them."""
    return run / "checkpoints" / f".step-{step:06d}{PARTS}"


def write_parts_of(run: Path, step: int, state: Mapping[str, Any]) -> None:
    """`write_divided` into the folder of which a checkpoint is made. All ranks call it."""
    folder = parts_of(run, step)
    ranks.on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))  # of a run that was killed
    try:
        write_divided(folder, state)
    except OSError:
        ranks.on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))
        raise


def write_divided(folder: Path, state: Mapping[str, Any]) -> None:
    """Write this rank's parts of what is divided in a state; `write_state` writes the rest. All ranks call it, or OSError."""
    write_parts(folder, {key: tensor for key, tensor in _tensors(state).items() if is_divided(tensor)})


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state, by their keys in its files."""
    tensors: dict[str, Tensor] = {}
    _encode(state, tensors)
    return tensors


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON can hold it; what JSON lacks is an object with one key that starts with ``$``."""
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value
        return {"$divided": [key, list(value.shape)]} if is_divided(value) else {"$tensor": key}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encode(item, tensors) for key, item in value.items()}
        return {"$items": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        items = [_encode(item, tensors) for item in value]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a state cannot hold {type(value).__name__}")


def _decode(value: dict[str, Any], tensors: Mapping[str, Tensor], divided: Parts | None) -> Any:
    """What `_encode` wrote as a JSON object; whatever is in it has been decoded."""
    match value:
        case {"$tensor": key}:
            return tensors[key]
        case {"$divided": [key, shape]}:
            if divided is None:
                raise CheckpointError(f"it has no folder {DIVIDED}/")
            stored = divided.stored(key)
            if list(stored.shape) != shape:
                found = list(stored.shape)
                raise CheckpointError(f"tensor {key} in {divided.folder} has the shape {found}, not {shape}")
            return stored
        case {"$items": items}:
            return dict(items)
        case {"$tuple": items}:
            return tuple(items)
        case {"$float": text}:
            return float(text)
    return value
