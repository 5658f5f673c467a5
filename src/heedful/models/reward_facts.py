"""What a reward model's folder says of it in ``heedful.json``, beside weights that other tools read without it.

    {"offset": 0.25, "reads": "turn-end"}

``offset``: score = head(x) - offset. Heads of decoders have no bias, so the number needs a file of its own.
``reads``: where the text of a conversation ends (`heedful.types.Reading`).
"""

import math
import typing
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from heedful.errors import CheckpointError
from heedful.files import read_object, write_json
from heedful.models.source import explained
from heedful.types import Reading

FILE = "heedful.json"


@dataclass(frozen=True)
class RewardFacts:
    """What is not in the weights of a reward model."""

    offset: float = 0.0
    reads: Reading | None = None
    """None: the folder does not say. Encoders read pairs of texts, and need nothing said."""


def save_facts(folder: Path, facts: RewardFacts) -> None:
    """Write the facts into a model's folder. An offset of 0 and a reading that is None are left out."""
    content: dict[str, float | str] = {"offset": facts.offset} if facts.offset else {}
    content |= {"reads": facts.reads} if facts.reads else {}
    if content:
        write_json(folder / FILE, content)


def load_facts(name: str) -> RewardFacts:
    """The facts of a reward model in a folder or on the Hub. A folder of ours that is older than ``reads`` is read as it
    was trained: to the end of the turn.

    Raises CheckpointError if the file cannot be read or has a wrong value, or if the Hub cannot be asked for it: scores
    would be shifted, or those of another text, without a sign of it.
    """
    with explained(name, FILE):
        path = Path(name) / FILE if Path(name).is_dir() else _fetched(name)
        has_file = path is not None and path.is_file()
        content = read_object(path, "download the model again") if path is not None and has_file else {}
    offset = content.get("offset", 0.0)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise CheckpointError(f"{name}: offset in its {FILE} is {offset!r}; expected a finite number")
    reads = content.get("reads")
    if reads not in (None, *typing.get_args(Reading)):
        allowed = " or ".join(typing.get_args(Reading))
        raise CheckpointError(f"{name}: reads in its {FILE} is {reads!r}; expected {allowed}")
    if reads is None and (has_file or _of_an_older_run(Path(name))):
        reads = "turn-end"
    return RewardFacts(float(offset), reads)


def _fetched(name: str) -> Path | None:
    """The file of a model on the Hub; None if the Hub says that there is none. Raises CheckpointError if it is away."""
    try:
        return Path(hf_hub_download(name, FILE))
    except Exception as error:  # the Hub's own, those of its connection, and OSError
        says_none = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        if says_none or try_to_load_from_cache(name, FILE) is not None:  # the cache has a mark that it once said so
            return None
        raise CheckpointError(
            f"{name}: the Hub cannot be asked for its {FILE}, so the offset of its scores and what it reads are not known "
            f"({str(error).strip().splitlines()[0]}). Try again with a connection, or download all of the model "
            f"(hf download {name} --local-dir FOLDER) and name that folder"
        ) from error


def _of_an_older_run(folder: Path) -> bool:
    """Whether a folder is ``final/``, ``best/`` or a checkpoint of ``heedful reward``."""
    for run in (folder.parent, folder.parent.parent):
        if (run / "environment.json").exists():
            remedy = "it says how a reward model reads: bring it back"
            return bool(read_object(run / "environment.json", remedy).get("command") == "heedful reward")
    return False
