"""The offset of a reward model's scores: a number in ``heedful.json``, beside weights that other tools read without it.

    score = head(x) - offset

Heads of decoders have no bias, so the number needs a file of its own.
"""

import json
import math
from pathlib import Path

from transformers.utils.hub import cached_file

from heedful.checkpoints.source import explained
from heedful.errors import CheckpointError
from heedful.files import write_json

FILE = "heedful.json"


def save_offset(folder: Path, offset: float) -> None:
    """Write the offset into a model's folder. An offset of 0 needs no file."""
    if offset:
        write_json(folder / FILE, {"offset": offset})


def load_offset(name: str) -> float:
    """The offset of a reward model in a folder or on the Hub; 0 if none was saved.

    Raises CheckpointError if the file cannot be read, or its offset is not a finite number.
    """
    with explained(name, FILE):
        path = cached_file(name, FILE, _raise_exceptions_for_missing_entries=False)
        content = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    offset = content.get("offset", 0.0) if isinstance(content, dict) else content
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise CheckpointError(f"{name}: offset in its {FILE} is {offset!r}; expected a finite number")
    return float(offset)
