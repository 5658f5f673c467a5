"""Sharded tensors on disk: each rank writes its shards as safetensors; any number of ranks, or one process, can read
them.

Uses torch.distributed.checkpoint with its safetensors writer, so files contain no pickle: each header lists the file's
shards.
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
    """Write sharded tensors to a folder shared by all ranks. Collective.

    Raises OSError on every rank if one could not write, and RankError if one is lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with complete():
            dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except dcp.CheckpointException as error:  # of some ranks, raised on all
        number, (first, _) = min(error.failures.items())
        raise OSError(
            getattr(first, "errno", None) or 5, f"rank {number} could not write: {first}", str(folder)
        ) from first


class Parts:
    """A folder of sharded tensors. Any rank can read any of them, independently of the others.

    Raises CheckpointError if files are damaged or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _Reader(str(folder))
        try:
            self.metadata = self._reader.read_metadata()
        except Exception as error:  # readers may raise anything for a damaged file
            raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
        for key, facts in self.metadata.state_dict_metadata.items():
            assert isinstance(facts, TensorStorageMetadata)
            there = sum(chunk.sizes.numel() for chunk in facts.chunks)
            if there != facts.size.numel():
                raise CheckpointError(f"{folder} has only a part of tensor {key}; a file is missing or duplicated")

    def stored(self, key: str) -> "Stored":
        """A lazily read tensor. Raises CheckpointError if it is missing."""
        facts = self.metadata.state_dict_metadata.get(key)
        if not isinstance(facts, TensorStorageMetadata):
            raise CheckpointError(f"{self.folder} has no tensor {key}")
        return Stored(self, key, facts.size, facts.properties.dtype)

    def read(self, key: str, into: Tensor) -> None:
        """Read a tensor, or this rank's shard of it, into one of its shape and dtype."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about reading without other ranks, which is intended
            dcp.load({key: into}, storage_reader=self._reader, no_dist=True)


class _Reader(HuggingFaceStorageReader):
    """Torch's reader, with file headers read once instead of for every tensor."""

    _metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


@dataclass(frozen=True)
class Stored:
    """A sharded tensor on disk."""

    parts: Parts
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def read(self, like: Tensor | None = None, device: torch.device | None = None) -> Tensor:
        """Read the full tensor to the CPU, or the shard that corresponds to this rank's shard of ``like``.

        Args:
            like: a tensor of the same shape, full or sharded.
            device: the shard's device; None is that of ``like``.
        """
        if like is None:
            into = torch.empty(self.shape, dtype=self.dtype)
        else:
            into = torch.empty_like(like, dtype=self.dtype, device=device)
        self.parts.read(self.key, into)
        return into


def as_held(value: Tensor | Stored, like: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor of a run's state in the layout of ``like``, which has its shape: full, or this rank's shard.

    A shard goes to ``device``, by default that of ``like``.
    """
    if isinstance(value, Stored):
        return value.read(like, device)
    return divided_like(value, like, device)
