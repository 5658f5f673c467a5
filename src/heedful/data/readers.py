"""Read data files as records: a dict of fields each, and where it was read, for messages.

Reads ``.jsonl`` and ``.json`` (also ``.gz``), ``.parquet``, ``.txt`` (one text), and data sets on the Hugging Face Hub
or ModelScope. Text is UTF-8. Some faults pass Python's JSON reader and would break a training run later; they are refused
here: duplicate keys, NaN and infinity, lone surrogates, values nested without end.
"""

import difflib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from heedful.data.lines import Growth, check_packed, is_packed, numbered_lines, read_whole
from heedful.display import shown as printable
from heedful.errors import ConfigError, DataError
from heedful.hub import MODELSCOPE, local_dataset, sum_rows

CANONICAL_NAMES = (
    "text",
    "messages",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "margin",
    "responses",
    "ranks",
    "label",
    "tools",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "question",
    "response",
    "context",
    "system_prompt",
)
"""The column names that the schemas and formats know; ``--columns`` maps a file's own names to them."""

ACCEPTED_SOURCES = (
    "Accepted: a .jsonl, .jsonl.gz, .json, .json.gz, .parquet or .txt file, a Hub data set as org/name or "
    "org/name:split, or one on ModelScope as modelscope:org/name or modelscope:org/name:split"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^/]+)?")
FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".gz", ".csv", ".tsv", ".txt", ".zip", ".xz", ".bz2", ".zst", ".arrow")
"""A name with one of these endings is a missing file, not a data set on the Hub."""
MOST_NAMES = 20
"""Names of columns in a message."""
DEEPEST = 100
"""Levels of lists and objects in a record. Python's own limit is near 1,000, and other code would meet it later."""
PARQUET_ROWS, PARQUET_RATIO = 1024, 1000
"""Rows unpacked at a time, and how many times the file's size they may have: Parquet stores a repeated text once."""

Row = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """One record of a data file. A column that ``--columns`` maps has its canonical name."""

    source: str
    """``file:line``, or ``file: row 12`` (counted from 1) if the format has no lines."""
    fields: dict[str, Any]


def read_records(path: str, *, columns: Mapping[str, str], max_samples: int | None = None) -> list[Record]:
    """Read the records of a file or data set, in order. Blank lines are skipped.

    Args:
        path: a file, or a data set on the Hub or ModelScope as ``org/name`` or ``org/name:split``.
        columns: maps canonical names to the file's own (see `parse_columns`). A mapped column appears only under its
            canonical name, and replaces a column that had that name.
        max_samples: read only the first N records; None reads all. The rest is not checked, and a data set on the Hub is
            streamed instead of downloaded, except for a slice such as ``org/name:train[:5%]``.

    Raises DataError, with the file and line, for anything that cannot be read, and for an empty data set.
    """
    rows = itertools.islice(_rows(path, streaming=max_samples is not None), max_samples)
    records = [Record(source, _renamed(_usable(fields, source), columns, source)) for source, fields in rows]
    if not records:
        raise DataError(f"{path}: the data set is empty. Expected at least one record; check how the file was written.")
    return records


def parse_columns(columns: str) -> dict[str, str]:
    """Parse ``--columns``: ``"prompt=question,chosen=answer"`` is ``{"prompt": "question", "chosen": "answer"}``.

    Raises ConfigError for a piece that is not NAME=COLUMN, an unknown NAME, a NAME given twice, or a missing comma.
    """
    mapping: dict[str, str] = {}
    for piece in columns.split(",") if columns.strip() else []:
        name, equals, column = (part.strip() for part in piece.partition("="))
        if not (name and equals and column):
            raise ConfigError(
                f"--columns: {piece!r} in {columns!r} is not NAME=COLUMN. Write for example "
                "--columns prompt=question,completion=answer"
            )
        if name not in CANONICAL_NAMES:
            raise ConfigError(
                f"--columns: unknown name {name!r}{_perhaps(name, CANONICAL_NAMES)}. Left of '=' goes one of "
                f"{', '.join(CANONICAL_NAMES)}; right of it the name of the file's own column"
            )
        words = column.partition("=")[0].split()
        if "=" in column and len(words) > 1 and words[-1] in CANONICAL_NAMES:
            raise ConfigError(
                f"--columns: a comma is missing before {words[-1]!r} in {piece!r}. Pieces are separated by commas"
            )
        if name in mapping:
            raise ConfigError(f"--columns: {name!r} is given twice, as {mapping[name]!r} and {column!r}. Keep one")
        mapping[name] = column
    return mapping


def kind_of(value: Any) -> str:
    """Name the kind of a value in the words of JSON, for messages."""
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}
    if isinstance(value, list):
        inner = value[0] if value else None
        what = "lists" if isinstance(inner, list) else f"{kind_of(inner)}s"
        return f"list of {what}" if value else "empty list"
    return names.get(type(value), type(value).__name__)


def _rows(path: str, *, streaming: bool) -> Iterator[Row]:
    if path.startswith(MODELSCOPE):
        return _hub_rows(path, streaming=streaming)
    try:
        file = Path(path).expanduser()
        exists = file.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, no permission, no such user
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    if not exists:
        if HUB_NAME.fullmatch(path) and not path.lower().endswith(FILE_ENDINGS):
            return _hub_rows(path, streaming=streaming)
        raise _missing(path, file)
    if file.is_dir():
        found = ", ".join(sorted(p.name for p in file.iterdir())[:8]) or "nothing"
        raise DataError(f"{path}: a folder, not a data file. It holds {found}: name one file. {ACCEPTED_SOURCES}.")
    name = file.name.lower()
    if not file.is_file():
        raise DataError(
            f"{path}: not a regular file (a pipe or a device). Write it to a file first. {ACCEPTED_SOURCES}."
        )
    if name.endswith((".jsonl", ".jsonl.gz")):
        return _json_lines(path, file)
    if name.endswith((".json", ".json.gz")):
        return _json_list(path, file)
    if name.endswith(".parquet"):
        return _parquet_rows(path, file)
    if name.endswith(".txt"):
        return _plain_text(path, file)
    raise DataError(f"{path}: the ending {file.suffix!r} is not a known format. {ACCEPTED_SOURCES}.")


def _missing(path: str, file: Path) -> DataError:
    if file.is_symlink():
        return DataError(
            f"{path}: a symbolic link to {str(file.readlink())!r}, which leads nowhere. Give the file itself."
        )
    if not file.parent.is_dir():
        return DataError(f"{path}: no such file: there is no folder {str(file.parent)!r}. {ACCEPTED_SOURCES}.")
    near = difflib.get_close_matches(file.name, [p.name for p in file.parent.iterdir()], n=3)
    perhaps = f" Perhaps you meant {' or '.join(repr(name) for name in near)}." if near else ""
    return DataError(f"{path}: no such file.{perhaps} {ACCEPTED_SOURCES}.")


def _json_lines(path: str, file: Path) -> Iterator[Row]:
    for number, raw in numbered_lines(path, file):
        if not raw.strip():
            continue
        source = f"{path}:{number}"
        try:
            text = _decoded(raw, path, number).rstrip("\r\n")
            fields = _object(_parsed(text, path, source, number), source)
        except DataError:
            if is_packed(file):
                check_packed(path, file)
            raise
        yield source, fields


def _json_list(path: str, file: Path) -> Iterator[Row]:
    text = _decoded(read_whole(path, file), path)
    value = _parsed(text, path, path, 1) if text.strip() else []
    if not isinstance(value, list):
        raise DataError(f"{path}: found a JSON {kind_of(value)}; a .json file must hold one list of objects.")
    for number, item in enumerate(value, 1):
        yield f"{path}: row {number}", _object(item, f"{path}: row {number}")


def _plain_text(path: str, file: Path) -> Iterator[Row]:
    """Yield the whole file as one ``text``, byte for byte."""
    text = _decoded(read_whole(path, file), path)
    if text.strip():
        yield f"{path}:1", {"text": text}


def _decoded(raw: bytes, path: str, line: int = 1) -> str:
    """Return the text of bytes that begin at the beginning of a line."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        place = error.start - raw.rfind(b"\n", 0, error.start)
        raise DataError(
            f"{path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x} at byte {place} of the line. Save "
            "the file as UTF-8, for example: iconv -f GB18030 -t UTF-8"
        ) from error


def _parsed(text: str, path: str, source: str, first_line: int) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        excerpt = text[max(0, error.pos - 20) : error.pos + 20]
        raise DataError(
            f"{path}:{first_line + error.lineno - 1}: not JSON: {error.msg} at column {error.colno}, near {excerpt!r}. "
            "A .jsonl file holds one whole JSON object per line; a .json file holds one list of objects."
        ) from error
    except ValueError as error:
        raise DataError(f"{source}: {error}") from error


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for a repeated key, NaN, infinity, or values nested too deeply."""
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply to be a record. Records are flat objects.") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(
                f"the key {printable(key)!r} appears twice in one object. Keep one; heedful cannot tell which was meant."
            )
        fields[key] = value
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"found {name}, which is not JSON. Numbers must be finite; write null for a missing one.")


def _object(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{source}: found a JSON {kind_of(value)}; every record must be an object: {{...}}.")
    return value


def _parquet_rows(path: str, file: Path) -> Iterator[Row]:
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            _require_distinct_columns(names, path)
            growth = Growth(path, file.stat().st_size, PARQUET_RATIO, "write it as .jsonl")
            for batch in table.iter_batches(PARQUET_ROWS):
                growth.add(batch.nbytes)
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except DataError:
        raise
    except (
        Exception
    ) as error:  # pyarrow's own, OSError, and those of values that Python cannot hold, such as a year 60000
        raise DataError(f"{path}: cannot be read as Parquet after row {number} ({error}). Write it again.") from error


def _require_distinct_columns(names: list[str], path: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"{path}: the column {printable(twice[0])!r} appears twice. Keep one; heedful cannot tell which was meant."
        )


def _hub_rows(path: str, *, streaming: bool) -> Iterator[Row]:
    import datasets

    hub, login = ("ModelScope", "modelscope") if path.startswith(MODELSCOPE) else ("Hub", "hf auth")
    name, _, split = path.removeprefix(MODELSCOPE).partition(":")
    split = split or "train"
    place = local_dataset(MODELSCOPE + name) if hub == "ModelScope" else name
    try:
        dataset = datasets.load_dataset(place, split=split, streaming=streaming and "[" not in split)
        for number, row in enumerate(sum_rows(path, dataset), 1):
            yield f"{path}: row {number}", row
    except Exception as error:  # datasets raises its own, huggingface_hub's, requests', pyarrow's and OSError
        raise DataError(
            f"{path}: the {hub} data set {name!r}, split {split!r}, could not be loaded: "
            f"{type(error).__name__}: {error}\nCheck the name, the split (org/name:split) and the network; a gated "
            f"data set needs `{login} login`. Or download it and give a .jsonl or .parquet file. If you meant a "
            "local file: there is none of that name."
        ) from error


def _renamed(fields: dict[str, Any], columns: Mapping[str, str], source: str) -> dict[str, Any]:
    for name, column in columns.items():
        if column not in fields:
            raise DataError(
                f"{source}: no column {column!r}, which --columns {name}={column} asks for"
                f"{_perhaps(column, list(fields))}. This record has {listed(fields) or 'no columns'}."
            )
    kept = {name: value for name, value in fields.items() if name not in columns.values()}
    return kept | {name: fields[column] for name, column in columns.items()}


def _usable(fields: dict[str, Any], source: str) -> dict[str, Any]:
    """Return ``fields`` unchanged. Raises DataError if `fault_in` finds something in them."""
    fault = fault_in(fields)
    if fault is not None:
        raise DataError(f"{source}: {fault}")
    return fields


def fault_in(value: Any) -> str | None:
    """Say where a JSON value holds NaN, infinity or a lone surrogate, or is nested too deeply; None if it does not."""
    todo: list[tuple[str, Any, int]] = [("", value, 0)]
    while todo:  # a stack, not recursion, because the file decides how deep it nests
        place, value, depth = todo.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return f"{printable(place)} is {value}. Numbers must be finite; leave a missing one out."
        if isinstance(value, str) and not _is_unicode(value):
            return (
                f"{printable(place)} holds a lone surrogate (half of a character) in {value[:60]!a}, which no "
                "tokenizer can encode. Text was cut inside an emoji, or written by a broken encoder: repair it there."
            )
        if not isinstance(value, dict | list | tuple):
            continue
        if depth == DEEPEST:
            return f"{printable(place, 60)} is nested too deeply, more than {DEEPEST} levels. Records are flat objects."
        if isinstance(value, dict):
            todo += [(f"a key in {place or 'the record'}", key, depth) for key in value if not _is_plain(key)]
            todo += [
                (f"{place}.{key}" if place else f"{key}", item, depth + 1)
                for key, item in value.items()
                if not _is_plain(item)
            ]
        else:
            todo += [(f"{place}[{index}]", item, depth + 1) for index, item in enumerate(value) if not _is_plain(item)]
    return None


def _is_plain(value: Any) -> bool:
    """Whether nothing can be wrong with a value; most are, and need no place for a message."""
    return value.isascii() if isinstance(value, str) else value is None or isinstance(value, int)


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _perhaps(name: str, known: tuple[str, ...] | list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (perhaps {printable(near[0])!r})" if near else ""


def listed(names: Iterable[str]) -> str:
    """Return the names of columns or keys for a message: the first twenty, with escapes for what a terminal would obey."""
    every = list(names)
    more = f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES else ""
    return ", ".join(printable(name, 60) for name in every[:MOST_NAMES]) + more
