"""The checkpoints of a run: written atomically, verified when read, the oldest removed first.

checkpoints/step-000100/                  the model in Hugging Face format, as in final/
checkpoints/step-000100/resume/           the state to resume from: tensors in safetensors, the rest in JSON
checkpoints/step-000100/MANIFEST.json     every file with its size and SHA-256 sum, written last

No pickle, so loading runs no code. Of tensors sharded over ranks (--shard full), each rank writes its shards to
resume/divided/.
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
from heedful.display import counted
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
"""Version of the manifest and of the state's format. A higher one is from a newer heedful."""
STATE = "state.json"
DIVIDED = "divided"
"""The folder of sharded tensors."""
PARTS = ".heedful-parts"
"""Suffix of the folder to which ranks write their shards of a checkpoint."""
MOST_BYTES = 2**31
"""Maximum size of a file of tensors; also bounds the main memory used to copy a model from a GPU."""


class Writes(Protocol):
    """Can write its model to a folder, without other ranks."""

    def save(self, folder: Path) -> None:
        """Write the model to a folder."""


class RunLearner(Writes, Protocol):
    """The models in training, as a run saves and restores them."""

    optimizer: torch.optim.Optimizer

    def parts(self) -> tuple[Sequence[PreTrainedModel], PreTrainedTokenizerBase]:
        """The models to save, and their tokenizer."""

    def unsharded(self) -> Writes:
        """An unsharded version for saving: itself if models are not sharded, else a gathered copy on rank 0.
        Collective."""

    def state_dict(self) -> dict[str, Any]:
        """The state that changes during a run."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""


def checkpoint_path(run: Path, step: int) -> Path:
    """Path of a run's checkpoint of a step."""
    return run / "checkpoints" / f"step-{step:06d}"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    step: int
    state: dict[str, Any]


class Checkpoints:
    """The folder of a run's checkpoints.

    Args:
        run: the run's folder.
        identity: the run's id, so that no checkpoint of another run is used.
        keep: number of checkpoints to keep; 0 keeps all.
    """

    def __init__(self, run: Path, identity: str, keep: int) -> None:
        self.folder, self.identity, self.keep = run / "checkpoints", identity, keep

    def path(self, step: int) -> Path:
        """Path of the checkpoint of a step."""
        return checkpoint_path(self.folder.parent, step)

    def save(self, step: int, model: Writes, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove older ones. Raises OSError; existing checkpoints are then kept.

        Includes the shards that ranks wrote with `write_parts_of`.
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
        """All folders named like a checkpoint, newest first, by step (clocks may be set back)."""
        found = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)] if self.folder.is_dir() else []
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]), reverse=True)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest valid checkpoint, and a note on each newer, invalid one.

        Invalid ones are renamed to bad-step-N, with the reason in REASON.txt. Half-written ones of killed processes are
        removed.
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
                notes.append(f"{path.name} is incomplete or damaged: {error}; it is now {aside.name}")
        return None, notes

    def read(self, path: Path) -> Checkpoint:
        """Read and verify a checkpoint. Raises CheckpointError if it is damaged or from another run."""
        return Checkpoint(path, self.check(path), read_state(path / RESUME))

    def check(self, path: Path) -> int:
        """The step of a checkpoint. Raises CheckpointError like `read`, but does not read the state."""
        if path.is_symlink():
            raise CheckpointError("it is a link")
        manifest = verify(path)
        if manifest.get("run") != self.identity:
            raise CheckpointError("it is from another run")
        step = manifest.get("step")
        if not isinstance(step, int) or path.name != self.path(step).name:
            raise CheckpointError(f"it is of step {step}")
        return step

    def go_back_to(self, step: int) -> list[Path]:
        """Rename later checkpoints to later-step-N. Returns their paths."""
        later = [path for path in self.candidates() if int(path.name.partition("-")[2]) > step]
        return [path.rename(_unused(path.with_name(f"later-{path.name}"))) for path in later]

    def set_model_aside(self, name: str) -> list[str]:
        """Rename best or final to later-NAME. Returns a note if it existed."""
        model = self.folder.parent / name
        if not model.is_dir():
            return []
        return [f"set aside, as it is of a later step: {model.rename(_unused(self.folder / f'later-{name}'))}"]


def _unused(path: Path) -> Path:
    """An unused path: this one, or one with a number appended."""
    new, number = path, 1
    while new.exists() or new.is_symlink():
        number += 1
        new = path.with_name(f"{path.name}-{number}")
    return new


def check_space(config: TrainingOptions, learner: RunLearner) -> None:
    """Raises MachineError if the disk lacks space for a run; ConfigError if the folder is not writable.

    A checkpoint has the trained weights as a model, the learner's state and Adam's two moments, which the state
    contains from the first step on. While one is written there is one more than are kept, besides best/ and final/.
    Existing ones of a resumed run count as free.

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
            f"{math.ceil(needed / 1e8) / 10:.1f} GB for {counted(number, 'checkpoint')}, best/ and final/; free some, choose "
            "another disk, keep fewer (--save-total-limit), or train adapters (--lora-rank)"
        )


def _check_writable(output: Path, there: Path) -> None:
    """Raises ConfigError if no files can be written, as on a read-only disk, which reports no free bytes either."""
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(f"--output {output} cannot be made: {in_words(error)}; choose another folder") from error


def _bytes_of_models(run: Path) -> int:
    """Size of the checkpoints, best/ and final/ of a run, without renamed ones, which are never replaced."""
    folders = [run / "best", run / "final", *Checkpoints(run, "", keep=0).candidates()]
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of all files in a folder, with ``facts``. Written last."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_sum(folder / name)}
        for name in sorted(_files(folder))
    }
    content = {"schema": SCHEMA, **facts, "files": files}
    write_text(folder / MANIFEST, to_json({**content, "sha256": digest(content)}, indent=1))


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, after checking that it has exactly the listed files, unchanged.

    Links are not followed: a checkpoint contains its own files. Raises CheckpointError for the first difference.
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
            raise CheckpointError(f"the content of {name} has changed")
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"it has no {MANIFEST}, so it is incomplete")
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes().decode("utf-8"))
        schema, written = manifest["schema"], manifest.pop("sha256")
        files = {name: (facts["bytes"], facts["sha256"]) for name, facts in manifest["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its {MANIFEST} cannot be read") from error
    if schema != SCHEMA:
        raise CheckpointError(
            f"it has schema {schema!r}, but this heedful reads {SCHEMA}: use the version that wrote it"
        )
    if written != digest(manifest):
        raise CheckpointError(f"its {MANIFEST} was changed")
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"its {MANIFEST} names {name!r}, which is outside the folder")
    return manifest


def _files(folder: Path) -> set[str]:
    """All files below a folder. Raises CheckpointError for anything else than files and folders, such as links."""
    names = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise CheckpointError(f"{name} is a link or a special file, which checkpoints do not have")
        if path.is_file():
            names.add(name)
    return names


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state into a new folder, except sharded tensors.

    Args:
        folder: must not exist yet.
        state: a tree of dictionaries, lists, tuples, numbers, strings, None and tensors. Reading it returns an equal
            state, also for infinities, NaN, and dictionaries with numbers as keys.

    Raises TypeError for other types.
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
    """Read a state; tensors are on the CPU, sharded ones are `Stored`. Raises CheckpointError."""
    try:
        tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("tensors-*.safetensors")):
            tensors |= load_file(path)
        divided = Parts(folder / DIVIDED) if (folder / DIVIDED).is_dir() else None
        text = (folder / STATE).read_text(encoding="utf-8")
        state: dict[str, Any] = json.loads(text, object_hook=lambda value: _decode(value, tensors, divided))
    except (CheckpointError, MemoryError, OSError):  # the last two are not the file's fault
        raise
    except Exception as error:  # readers may raise anything for a damaged file
        raise CheckpointError(f"{folder} has no valid run state: {type(error).__name__}: {error}") from error
    return state


def holds_divided(state: Mapping[str, Any]) -> bool:
    """Whether a state has sharded tensors."""
    return any(map(is_divided, _tensors(state).values()))


def parts_of(run: Path, step: int) -> Path:
    """Folder to which ranks write their shards of a step's state, before the checkpoint is complete."""
    return run / "checkpoints" / f".step-{step:06d}{PARTS}"


def write_parts_of(run: Path, step: int, state: Mapping[str, Any]) -> None:
    """`write_divided` into `parts_of`. Collective."""
    folder = parts_of(run, step)
    ranks.on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))  # left by a killed run
    try:
        write_divided(folder, state)
    except OSError:
        ranks.on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))
        raise


def write_divided(folder: Path, state: Mapping[str, Any]) -> None:
    """Write this rank's shards of a state; `write_state` writes the rest. Collective. Raises OSError on all ranks."""
    write_parts(folder, {key: tensor for key, tensor in _tensors(state).items() if is_divided(tensor)})


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state, by their keys in files."""
    tensors: dict[str, Tensor] = {}
    _encode(state, tensors)
    return tensors


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Encode a value for JSON; types that JSON lacks become an object with a single key that starts with ``$``."""
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
    raise TypeError(f"a state cannot contain {type(value).__name__}")


def _decode(value: dict[str, Any], tensors: Mapping[str, Tensor], divided: Parts | None) -> Any:
    """Inverse of `_encode` for a JSON object whose values are already decoded."""
    match value:
        case {"$tensor": key}:
            return tensors[key]
        case {"$divided": [key, shape]}:
            if divided is None:
                raise CheckpointError(f"it has no folder {DIVIDED}/")
            stored = divided.stored(key)
            if list(stored.shape) != shape:
                found = list(stored.shape)
                raise CheckpointError(f"tensor {key} in {divided.folder} has shape {found}, not {shape}")
            return stored
        case {"$items": items}:
            return dict(items)
        case {"$tuple": items}:
            return tuple(items)
        case {"$float": text}:
            return float(text)
    return value
