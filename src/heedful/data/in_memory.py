"""Write records in memory to a file, so that the readers, checks and hashes of files apply to them."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union, cast

from heedful.data.messages import as_dict
from heedful.data.readers import PARQUET_ROWS, dataset_rows, from_arrow
from heedful.errors import DataError
from heedful.files import write_bytes
from heedful.types import Message

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


class ArrowTable(Protocol):
    """A pandas or Polars DataFrame, a `pyarrow.Table`, or another table that Arrow can read."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Arrow's interface for such tables."""


AnyRecord = Mapping[str, Any] | str | Sequence[Mapping[str, Any] | Message]
"""A row with columns, a text, or a conversation."""
Records = Union["Dataset", "IterableDataset", ArrowTable, Sequence[AnyRecord]]
ACCEPTED = "a datasets.Dataset, a DataFrame, or a list of dicts, texts or conversations (lists of messages)"


def write_records(records: Records, folder: Path, name: str, *, asks: bool) -> Path:
    """Write records to a file in ``folder``, named by a hash of its content, and return its path.

    Data sets and DataFrames become Arrow files, which keep the types of their columns; lists become JSON Lines.

    Args:
        records: the records.
        folder: an existing folder.
        name: the name of the argument, for messages and the file's name.
        asks: True if a text or a conversation is a prompt; if False, it is training text (columns ``text``, ``messages``).

    Raises DataError for anything but records.
    """
    import pyarrow
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    if isinstance(records, DatasetDict | IterableDatasetDict):
        raise DataError(
            f"{name} has the splits {', '.join(records)}; choose one, such as {name}[{next(iter(records))!r}]"
        )
    if getattr(records, "ndim", None) == 1:  # of pandas or NumPy: a column
        records = cast(Any, records).tolist()
    if isinstance(records, Dataset):
        return _write_table(records.with_format("arrow")[:], folder, name)
    if isinstance(records, IterableDataset):
        rows: Iterable[AnyRecord] = dataset_rows(records)
    elif hasattr(records, "__arrow_c_stream__"):
        try:
            return _write_table(pyarrow.table(records), folder, name)
        except (pyarrow.ArrowException, ValueError) as error:
            frame: Any = records
            if not (isinstance(error, pyarrow.ArrowException) and hasattr(frame, "notna")):
                raise DataError(f"{name}: {error}") from error
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    elif isinstance(records, str | Mapping) or not isinstance(records, Sequence):
        raise DataError(f"{name} must be {ACCEPTED}, got {_kind(records)}")
    else:
        rows = records
    return _write(_json_lines(rows, name, asks=asks), folder, name, ".jsonl")


def _write(content: bytes, folder: Path, name: str, ending: str) -> Path:
    path = folder / f"{name.replace('_', '-')}-{hashlib.sha256(content).hexdigest()[:12]}{ending}"
    if not path.exists():
        write_bytes(path, content)
    return path


def _write_table(table: Any, folder: Path, name: str) -> Path:
    import pyarrow

    content = pyarrow.BufferOutputStream()
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_file(content, table.schema, options=options) as file:
        file.write_table(table, PARQUET_ROWS)
    return _write(content.getvalue().to_pybytes(), folder, name, ".arrow")


def _json_lines(records: Iterable[AnyRecord], name: str, *, asks: bool) -> bytes:
    lines = []
    for number, record in enumerate(records):
        try:
            # JSON escapes lone surrogates; the reader checks them, as in a file.
            lines.append(json.dumps(_row(record, asks=asks), default=_as_json) + "\n")
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


def _as_json(value: Any) -> Any:
    if isinstance(value, Message):
        return as_dict(value)
    if hasattr(value, "tolist"):  # an array or a number of numpy; pandas reads the lists of a Parquet file as arrays
        return from_arrow(value.tolist())
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"it holds {_kind(value)}")


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
