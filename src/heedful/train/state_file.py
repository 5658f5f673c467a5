"""The state of a run as files: tensors in safetensors, all else in JSON. There is no pickle, so that loading runs no code.

The state is a tree of dictionaries, lists, tuples, numbers, strings, None and tensors; it is read back equal, also numbers
that JSON has no word for and dictionaries whose keys are numbers. Tensors that are divided among ranks are written by all of
them, each its parts, and read as `heedful.parallel.sharded_files.Stored`, by any number of ranks.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from heedful.errors import CheckpointError
from heedful.files import write_text
from heedful.parallel.sharded_files import Parts, Stored, write_parts
from heedful.parallel.sharding import is_divided

TREE = "state.json"
DIVIDED = "divided"
"""The folder of tensors that are divided among ranks."""
MOST_BYTES = 2**31
"""Of one file of tensors, if a tensor is not larger; so memory holds only so much of a model on a GPU a second time."""


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state into a folder. Raises TypeError if something in it is of another kind."""
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, tensors)
    folder.mkdir()
    whole = {key: tensor for key, tensor in tensors.items() if not is_divided(tensor)}
    for number, part in enumerate(_parts(whole)):
        here = {key: tensor.detach().to("cpu").contiguous() for key, tensor in part.items()}
        save_file(here, folder / f"tensors-{number:05d}.safetensors")
    write_text(folder / TREE, json.dumps(tree, ensure_ascii=False, allow_nan=False))


def holds_divided(state: Mapping[str, Any]) -> bool:
    """Whether anything in a state is divided among ranks."""
    return bool(_divided(state))


def write_divided(folder: Path, state: Mapping[str, Any]) -> None:
    """Write this rank's parts of what is divided; `write_state` writes the rest. All ranks call it, with the same state.

    The folder becomes ``DIVIDED`` in that of the state. Raises OSError.
    """
    write_parts(folder, _divided(state))


def _divided(state: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    _encode(state, tensors)
    return {key: tensor for key, tensor in tensors.items() if is_divided(tensor)}


def read_state(folder: Path) -> dict[str, Any]:
    """Read a state; its tensors are on the CPU. Raises CheckpointError."""
    try:
        tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("tensors-*.safetensors")):
            tensors |= load_file(path)
        tree = json.loads((folder / TREE).read_text(encoding="utf-8"))
        divided = Parts(folder / DIVIDED) if (folder / DIVIDED).is_dir() else None
        state = _decode(tree, tensors, divided)
    except (CheckpointError, MemoryError, OSError):  # the last two are the machine's, not the file's
        raise
    except Exception as error:  # whatever a damaged file makes the readers raise
        raise CheckpointError(f"{folder} holds no state of a run: {type(error).__name__}: {error}") from error
    assert isinstance(state, dict)
    return state


def size_of(state: Any) -> int:
    """Bytes of a state's tensors."""
    tensors: dict[str, Tensor] = {}
    _encode(state, tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _parts(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in their order, in parts of at most `MOST_BYTES`, or of one tensor."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size()
        if parts[-1] and size > MOST_BYTES:
            parts.append({})
            size = tensor.numel() * tensor.element_size()
        parts[-1][key] = tensor
    return parts


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON can hold it; what JSON has not is an object with one key that starts with ``$``."""
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


def _decode(value: Any, tensors: Mapping[str, Tensor], divided: Parts | None) -> Any:
    def decoded(item: Any) -> Any:
        return _decode(item, tensors, divided)

    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind: str
    content: Any
    kind, content = next(iter(value.items()), ("", None))
    found: Any
    match kind:
        case "$tensor":
            found = tensors[content]
        case "$divided":
            found = _stored(content, divided)
        case "$items":
            found = {decoded(key): decoded(item) for key, item in content}
        case "$tuple":
            found = tuple(decoded(item) for item in content)
        case "$float":
            found = float(content)
        case _:
            found = {key: decoded(item) for key, item in value.items()}
    return found


def _stored(content: Sequence[Any], divided: Parts | None) -> Stored:
    """A tensor on disk, if all of it is there. Raises CheckpointError."""
    key, shape = content
    if divided is None:
        raise CheckpointError(f"it has no folder {DIVIDED}/")
    found = divided.stored(key)
    if list(found.shape) != shape:
        raise CheckpointError(f"tensor {key} in {divided.folder} has the shape {list(found.shape)}, not {shape}")
    return found
