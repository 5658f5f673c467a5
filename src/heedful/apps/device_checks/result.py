"""What a check of a device takes and gives, and the small models and data that checks share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.data.batches import Batch, collate
from heedful.files import to_json, write_text
from heedful.kernels.device import DtypeName
from heedful.models.load import load_policy
from heedful.models.policy import Policy
from heedful.models.tiny import Architecture, make_tiny_model

SHORT, LONG = ([20, 21, 22], [23]), ([20, 21, 22] * 5, [23])
"""Prompts of two rows; with `LONG` most of a padded batch is padding."""
RESPONSES = [[24, 25], [26, 27, 28]]
RAGGED = [[10, 11, 12], [40], [77, 78, 79, 80, 81], [20, 21]] * 5
"""Prompts to sample from."""


@dataclass(frozen=True)
class Workbench:
    """Where a check runs."""

    device: torch.device
    folder: Path
    """For models, data and runs; empty at the start of a check."""

    def model(self, architecture: Architecture = "qwen3", *, hidden_size: int = 32, spread: float = 0.02) -> str:
        """Write a tiny random model, whose weights have this standard deviation. Returns its folder."""
        folder = self.folder / "model"
        if not folder.exists():
            make_tiny_model(architecture, folder, hidden_size=hidden_size, initializer_range=spread)
        return str(folder)

    def policy(self, dtype: DtypeName = "float32", *, device: str | None = None, **model: Any) -> Policy:
        """Load that model as a policy, on the device or another one."""
        place = self.device if device is None else torch.device(device)
        return load_policy(self.model(**model), device=place, compute_dtype=getattr(torch, dtype))

    def data(self, name: str, records: Iterable[Mapping[str, Any]]) -> str:
        """Write records as JSON lines. Returns the file."""
        file = self.folder / name
        write_text(file, "".join(f"{to_json(record)}\n" for record in records))
        return str(file)

    def batch(self, prompts: Sequence[Sequence[int]] = SHORT, rows: slice = slice(2)) -> Batch:
        """Rows of two prompts with `RESPONSES`, on the device."""
        return collate(prompts[rows], RESPONSES[rows], pad_id=0).to(self.device)


@dataclass(frozen=True)
class Measurement:
    """A number that must not exceed its limit."""

    value: float
    limit: float
    what: str


class LeftOutError(Exception):
    """The device, or what is installed, lacks something that the check is about."""


class CheckError(Exception):
    """A check fails with something that is no number."""


def expect(condition: bool, otherwise: str) -> None:
    """Raises CheckError unless the condition holds."""
    if not condition:
        raise CheckError(otherwise)


def differing(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    """Number of rows of tokens that are not equal."""
    return sum(a != b for a, b in zip(ours, theirs, strict=True))


def furthest(pairs: Iterable[tuple[Tensor, Tensor]], *, relative: float = 0.0) -> float:
    """Largest difference of paired tensors, after an allowance that is relative to the second; infinite with NaN."""
    differences = [
        ((ours.detach().cpu().float() - theirs.cpu().float()).abs() - relative * theirs.cpu().float().abs())
        for ours, theirs in ((a, b.detach()) for a, b in pairs)
    ]
    return largest([0.0, *(float(one.nan_to_num(nan=torch.inf).max()) for one in differences)])


def largest(values: Iterable[float]) -> float:
    """The largest of some numbers; infinite if one is not a number."""
    return max(torch.inf if value != value else value for value in values)  # noqa: PLR0124
