"""Write records in memory to a file, so that the readers, checks and hashes of files apply to them."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from heedful.data.messages import as_dict
from heedful.errors import DataError
from heedful.files import write_bytes
from heedful.types import Message

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

AnyRecord = Mapping[str, Any] | str | Sequence[Mapping[str, Any] | Message]
"""A row with columns, a text, or a conversation."""
Records = Union["Dataset", "IterableDataset", Sequence[AnyRecord]]
ACCEPTED = "a datasets.Dataset, or a list of dicts, texts or conversations (lists of messages)"


def write_records(records: Records, folder: Path, name: str, *, asks: bool) -> Path:
    """Write records to a file in ``folder``, named by a hash of its content, and return its path.

    A `datasets.Dataset` becomes Parquet, which keeps the types of its columns; lists become JSON Lines.

    Args:
        records: the records.
        folder: an existing folder.
        name: the name of the argument, for messages and the file's name.
        asks: True if a text or a conversation is a prompt; if False, it is training text (columns ``text``, ``messages``).

    Raises DataError for anything but records.
    """
    from datasets import Dataset, DatasetDict, IterableDataset

    if isinstance(records, DatasetDict):
        raise DataError(
            f"{name} has the splits {', '.join(records)}; choose one, such as {name}[{next(iter(records))!r}]"
        )
    if isinstance(records, Dataset):
        return _write(_parquet(records), folder, name, ".parquet")
    if isinstance(records, str | Mapping) or not isinstance(records, Sequence | IterableDataset):
        raise DataError(f"{name} must be {ACCEPTED}, got {_kind(records)}")
    return _write(_json_lines(records, name, asks=asks), folder, name, ".jsonl")


def _write(content: bytes, folder: Path, name: str, ending: str) -> Path:
    path = folder / f"{name.replace('_', '-')}-{hashlib.sha256(content).hexdigest()[:12]}{ending}"
    if not path.exists():
        write_bytes(path, content)
    return path


def _parquet(dataset: Any) -> bytes:
    import pyarrow
    from pyarrow import parquet

    content = pyarrow.BufferOutputStream()
    parquet.write_table(dataset.with_format("arrow")[:], content)
    return content.getvalue().to_pybytes()


def _json_lines(records: Iterable[AnyRecord], name: str, *, asks: bool) -> bytes:
    lines = []
    for number, record in enumerate(records):
        try:
            # JSON escapes lone surrogates; the reader checks them, as in a file.
            lines.append(json.dumps(_row(record, asks=asks), default=_message) + "\n")
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{name}[{number}]: {error}; a record is a dict of JSON values, a text, or a list of messages"
            ) from error
    return "".join(lines).encode()


def _row(record: AnyRecord, *, asks: bool) -> dict[str, Any]:
    match record:
        case Mapping():
            return dict(record)
        case str():
            return {"prompt" if asks else "text": record}
        case list() | tuple():
            return {"prompt" if asks else "messages": record}
    raise TypeError(f"got {_kind(record)}")


def _message(value: Any) -> Any:
    if isinstance(value, Message):
        return as_dict(value)
    raise TypeError(f"it holds {_kind(value)}")


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
