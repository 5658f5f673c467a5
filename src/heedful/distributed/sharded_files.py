"""Divided tensors on disk: each rank writes its parts as safetensors, and any number of ranks, or one process, reads them.

torch.distributed.checkpoint does the work. Its writer of safetensors is used, so there is no pickle in the files: the header
of each says which part of which tensor it holds.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from heedful.distributed.ranks import complete
from heedful.distributed.sharding import divided_like
from heedful.errors import CheckpointError


def write_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write divided tensors into a folder that all ranks see. All ranks call it, each with its parts.

    Raises OSError on every rank if one of them could not write, and RankError if one is lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with complete():
            dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except dcp.CheckpointException as error:  # of some ranks, told to all
        number, (first, _) = min(error.failures.items())
        raise OSError(
            getattr(first, "errno", None) or 5, f"rank {number} could not write: {first}", str(folder)
        ) from first


class Parts:
    """A folder of divided tensors. Any rank may read any of them, whatever the others do.

    Raises CheckpointError if files are damaged or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _Reader(str(folder))
        try:
            self.metadata = self._reader.read_metadata()
        except Exception as error:  # whatever a damaged file makes the readers raise
            raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
        for key, facts in self.metadata.state_dict_metadata.items():
            assert isinstance(facts, TensorStorageMetadata)
            there = sum(chunk.sizes.numel() for chunk in facts.chunks)
            if there != facts.size.numel():
                raise CheckpointError(f"{folder} holds only a part of tensor {key}; a file is missing or occurs twice")

    def stored(self, key: str) -> "Stored":
        """A tensor that is read when it is needed. Raises CheckpointError if it is not there."""
        facts = self.metadata.state_dict_metadata.get(key)
        if not isinstance(facts, TensorStorageMetadata):
            raise CheckpointError(f"{self.folder} has no tensor {key}")
        return Stored(self, key, facts.size, facts.properties.dtype)

    def read(self, key: str, into: Tensor) -> None:
        """Read a tensor, or the part of it that this rank holds, into one of its shape and dtype."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not read by all ranks together, which is meant
            dcp.load({key: into}, storage_reader=self._reader, no_dist=True)


class _Reader(HuggingFaceStorageReader):
    """Torch's reader, which looks at the headers of the files once and not for every tensor."""

    _metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


@dataclass(frozen=True)
class Stored:
    """A divided tensor on disk."""

    parts: Parts
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def read(self, like: Tensor | None = None, device: torch.device | None = None) -> Tensor:
        """Read its numbers: all of them onto the CPU, or the part of ``like`` that this rank holds.

        Args:
            like: a tensor of the same shape, whole or divided.
            device: where the part goes; None is where ``like`` is.
        """
        if like is None:
            into = torch.empty(self.shape, dtype=self.dtype)
        else:
            into = torch.empty_like(like, dtype=self.dtype, device=device)
        self.parts.read(self.key, into)
        return into


def as_held(value: Tensor | Stored, like: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor of a run's state in the form of ``like``, which has its shape: whole, or the part that this rank holds.

    A part goes to a device, by default to that of ``like``.
    """
    if isinstance(value, Stored):
        return value.read(like, device)
    return divided_like(value, like, device)
