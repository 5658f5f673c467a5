"""Read data files as records, each a dict of fields with its file and line for messages.

Reads ``.jsonl``, ``.json``, ``.csv`` and ``.tsv`` (also ``.gz``), ``.parquet``, ``.arrow``, ``.txt`` (one text), folders and
patterns of such files, what `datasets` saved to disk, and data sets on the Hugging Face Hub or ModelScope. Text is UTF-8 or
UTF-16. Faults that Python's JSON reader accepts but that would break a training run later are refused here: duplicate keys,
NaN and infinity, lone surrogates, values nested too deeply.
"""

import codecs
import contextlib
import csv
import difflib
import glob
import gzip
import io
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from heedful.display import counted, say
from heedful.display import shown as printable
from heedful.errors import ConfigError, DataError
from heedful.hub import MODELSCOPE, local_dataset, sum_rows

CANONICAL_NAMES = (
    *(
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
    ),
    *("conversations", "instruction", "input", "output", "system", "history"),
    *("question", "response", "context", "system_prompt"),
)
"""The column names of the schemas and formats; ``--columns`` maps a file's own names to them."""
ANSWERS = ("answer", "expected")
"""Columns that rewards compare with, which ``--columns`` maps too. A CSV's empty cell is no answer."""

ACCEPTED_SOURCES = (
    "Accepted: a .jsonl, .json, .csv or .tsv file (also .gz), a .parquet, .arrow or .txt file, a folder of such files or a "
    "pattern of their names in quotes ('data/train-*.jsonl'), a folder of datasets.save_to_disk (FOLDER or FOLDER:split), a "
    "Hub data set as org/name or org/name:split, or one on ModelScope as modelscope:org/name or modelscope:org/name:split"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^/]+)?")
FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".gz", ".csv", ".tsv", ".txt", ".zip", ".xz", ".bz2", ".zst", ".arrow")
"""A name with one of these endings is a missing file, not a data set on the Hub."""
READ_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Endings of data files in a folder; ``.gz`` may follow the first four."""
SPLITS = re.compile(r"(?:^|[^a-z])(train|test|valid|validation|val|dev|eval)(?:[^a-z]|$)")
"""Uses of records that a file's name may state."""
ABOUT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json"}
"""Files in a folder that hold no records."""
JSON_CELLS = ("messages", "conversations", "responses", "ranks", "history", "tools", "functions", "margin", "truncated")
"""Columns other than text: in CSV their cells are JSON."""
TEXT_OR_MESSAGES = ("prompt", "completion", "chosen", "rejected")
"""Columns whose cells in CSV may be JSON: a list of messages."""
MOST_NAMES = 20
"""Names of columns in a message."""
DEEPEST = 100
"""Maximal nesting of lists and objects in a record. Python's own limit, near 1,000, would be hit later in other code."""
PARQUET_ROWS, PARQUET_RATIO = 1024, 1000
"""Rows per batch, and their maximal size as a multiple of the file's: Parquet stores a repeated text once."""

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
        path: a file, a folder or pattern of files, or a data set (``org/name``, ``org/name:split``).
        columns: maps canonical names to the file's own (see `parse_columns`). A mapped column appears only under its
            canonical name and replaces a column of that name.
        max_samples: read only the first N records; None reads all. The rest is not checked, and a data set on the Hub is
            streamed instead of downloaded, except for a slice such as ``org/name:train[:5%]``.

    Raises DataError, with the file and line, for anything that cannot be read, and for an empty data set.
    """
    rows = itertools.islice(_rows(path, columns, streaming=max_samples is not None), max_samples)
    records = []
    for source, fields in rows:
        if (fault := fault_in(fields)) is not None:
            raise DataError(f"{source}: {fault}")
        records.append(Record(source, _with_chosen_columns(fields, columns, source)))
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
        if name not in (known := (*CANONICAL_NAMES, *ANSWERS)):
            raise ConfigError(
                f"--columns: unknown name {name!r}{_perhaps(name, known)}. Left of '=' goes one of "
                f"{', '.join(known)}; right of it the name of the file's own column"
            )
        words = column.partition("=")[0].split()
        if "=" in column and len(words) > 1 and words[-1] in known:
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


def _rows(path: str, columns: Mapping[str, str], *, streaming: bool) -> Iterator[Row]:
    if path.startswith(MODELSCOPE):
        return _hub_rows(path, streaming=streaming)
    try:
        file = Path(path).expanduser()
        exists = file.exists()
        folder, _, split = str(file).rpartition(":")
        is_split = not exists and bool(folder and split) and Path(folder, "dataset_dict.json").is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, no permission, no such user
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    if is_split:
        return _saved_rows(path, Path(folder), split)
    if not exists:
        matching = sorted(glob.glob(str(file), recursive=True)) if glob.has_magic(str(file)) else []  # noqa: PTH207
        if matching:
            return _shards(path, [one for one in map(Path, matching) if not one.is_dir()], columns)
        if HUB_NAME.fullmatch(path) and not path.lower().endswith(FILE_ENDINGS):
            return _hub_rows(path, streaming=streaming)
        raise _missing(path, file)
    if file.is_dir():
        return _folder_rows(path, file, columns)
    return _file_rows(path, file, columns)


def _file_rows(path: str, file: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    if not file.is_file():
        raise DataError(
            f"{path}: not a regular file (a pipe or a device). Write it to a file first. {ACCEPTED_SOURCES}."
        )
    ending = _ending(file)
    if ending in (".jsonl", ".json"):
        return _json_rows(path, file, columns, is_one_value=ending == ".json")
    if ending in (".csv", ".tsv"):
        return _separated_rows(path, file, columns, tabs=ending == ".tsv")
    if ending in (".parquet", ".arrow"):
        return _table_rows(path, ending[1:].capitalize(), file.stat().st_size, _batches(path, file, ending))
    if ending == ".txt":
        text = _decoded(read_bytes(path, file), path)
        return iter([(f"{path}:1", {"text": text})] if text.strip() else [])
    raise DataError(f"{path}: the ending {file.suffix!r} is not a known format. {ACCEPTED_SOURCES}.")


def _ending(file: Path) -> str:
    """The ending of a file's name that decides its format, without ``.gz``."""
    name = file.name.lower()
    inner = Path(name.removesuffix(".gz")).suffix
    return inner if inner in READ_ENDINGS[:4] or not name.endswith(".gz") else ".gz"


def _folder_rows(path: str, folder: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    names = sorted(one.name for one in folder.iterdir())
    if "dataset_dict.json" in names:
        splits = [name for name in names if (folder / name / "state.json").is_file()]
        named = " or ".join(f"{path}:{split}" for split in splits) or f"{path}:train"
        raise DataError(f"{path}: several splits that datasets saved to disk. Name one: {named}.")
    if "state.json" in names and "dataset_info.json" in names:
        return _saved_rows(path, folder, None)
    files = [folder / name for name in names if not name.startswith(".") and name not in ABOUT_DATA]
    files = [file for file in files if file.is_file() and _ending(file) in READ_ENDINGS]
    found = ", ".join(names[:8]) or "nothing"
    first = f"'{path}/**/*.jsonl'" if not files else f"'{path}/{files[0].name[:5]}*{''.join(files[0].suffixes[-1:])}'"
    advice = f"Name one file, or a pattern in quotes such as {first}. {ACCEPTED_SOURCES}."
    if not files:
        raise DataError(f"{path}: a folder without data files. It holds {found}. {advice}")
    kinds = {_ending(file) for file in files}
    uses = {match[1] if (match := SPLITS.search(file.name.lower())) else "" for file in files}
    if len(kinds) > 1 or len(uses) > 1:
        several = "files of several kinds" if len(kinds) > 1 else "files for several uses"
        raise DataError(f"{path}: a folder with {several}. It holds {found}. {advice}")
    return _shards(path, files, columns)


def _shards(path: str, files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of several files, one after another."""
    return _summed(path, (row for file in files for row in _file_rows(str(file), file, columns)))


def _summed(path: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows of a data set that is no file, and hash them for `heedful.hub.dataset_sum`."""
    kept, read = itertools.tee(rows)
    for fields in sum_rows(path, (fields for _, fields in read)):
        yield next(kept)[0], fields


def _missing(path: str, file: Path) -> DataError:
    if glob.has_magic(path):
        return DataError(f"{path}: no such file, and none matches this pattern. {ACCEPTED_SOURCES}.")
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
            if is_packed(file):  # damage can look like a fault in a line: read on to the checksum
                with _opened(path, file) as stream:
                    while stream.read(MIB):
                        pass
            raise
        yield source, fields


def _json_rows(path: str, file: Path, columns: Mapping[str, str], *, is_one_value: bool) -> Iterator[Row]:
    """Yield the records of JSON Lines or of one JSON value; the first character decides, not the ending."""
    first, _, others = read_bytes(path, file, MIB).lstrip().partition(b"\n")
    if is_one_value:
        is_list = not (others.strip() and isinstance(_value(first), dict))
    else:
        line = _value(first)  # a list, but no list of records, is a faulty line
        is_list = first.startswith(b"[") and (not isinstance(line, list) or all(isinstance(one, dict) for one in line))
    return _json_list(path, file, columns) if is_list else _json_lines(path, file)


def _value(line: bytes) -> Any:
    """The JSON value in a line; None if it is incomplete."""
    try:
        return parse_json(line.decode("utf-8"))
    except ValueError:
        return None


def _json_list(path: str, file: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    text = _decoded(read_bytes(path, file), path)
    value = _parsed(text, path, path, 1) if text.strip() else []
    if isinstance(value, dict):
        is_record = any(name in CANONICAL_NAMES or name in columns.values() for name in value)
        found = {} if is_record else value
        lists = {n: v for n, v in found.items() if v and isinstance(v, list) and all(isinstance(r, dict) for r in v)}
        if len(lists) > 1:
            raise DataError(
                f"{path}: an object with several lists of records: {listed(lists)}. Write the one to read into a file "
                "of its own."
            )
        if is_record and all(
            isinstance(one, dict) and set(one) == set(next(iter(value.values()))) for one in value.values()
        ):
            raise DataError(
                f"{path}: an object of columns, as pandas writes it. Write records: DataFrame.to_json(path, "
                "orient='records', lines=True)."
            )
        if lists:
            (name, records), *_ = lists.items()
            say(f"{path}: the records are the list {printable(name)!r}")
            value = records
        elif is_record:
            value = [value]
    if not isinstance(value, list):
        raise DataError(f"{path}: found a JSON {kind_of(value)}; a .json file must hold one list of objects.")
    for number, item in enumerate(value, 1):
        yield f"{path}: row {number}", _object(item, f"{path}: row {number}")


def _separated_rows(path: str, file: Path, columns: Mapping[str, str], *, tabs: bool) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file. Every cell is unchanged text, except those of `JSON_CELLS`.

    Empty rows at the end, as Excel leaves them, are dropped and reported on standard error.
    """
    lines = (_decoded(raw, path, number) for number, raw in numbered_lines(path, file))
    head = next(lines, "")
    delimiter = "\t" if tabs else next((one for one in ",;\t" if one in head), ",")
    own = {columns.get(name, name): name for name in (*JSON_CELLS, *TEXT_OR_MESSAGES, *ANSWERS)}
    csv.field_size_limit(LONGEST_LINE)
    spaced = bool(head.strip()) and all(name.startswith(" ") for name in head.split(delimiter)[1:])
    reader = csv.reader(itertools.chain([head], lines), delimiter=delimiter, strict=True, skipinitialspace=spaced)
    names: list[str] = []
    empty: list[Row] = []
    line = 1
    try:
        for cells in reader:
            begun, line = line, reader.line_num + 1
            if not cells or not (names or any(cells)):  # a blank line, or nothing above the names
                continue
            if not names:
                names = [name or f"column {i}" for i, name in enumerate(cells, 1)]
                _require_distinct_columns(names, path)
                continue
            if len(cells) != len(names):
                raise DataError(
                    f"{path}:{begun}: {counted(len(cells), 'cell')}, but the first line names "
                    f"{counted(len(names), 'column')} ({listed(names)}). "
                    f"Quote a cell that holds {delimiter!r}, a quote or a line break, and double the quotes in it."
                )
            row = zip(names, cells, strict=True)
            empty.append((f"{path}:{begun}", {n: _cell(c, own.get(n, ""), f"{path}:{begun}: `{n}`") for n, c in row}))
            if any(cells):
                yield from empty
                empty.clear()
    except csv.Error as error:
        raise DataError(
            f"{path}:{line}: not {'TSV' if tabs else 'CSV'}: {error}, in the cell that begins here or before. Quote a "
            f"cell that holds {delimiter!r}, a quote or a line break, and double the quotes in it; or write .jsonl."
        ) from error
    if empty:
        say(f"{empty[0][0]}: rows of empty cells from here to the end are left out ({len(empty)})")


def _cell(text: str, name: str, place: str) -> Any:
    """The value of a cell in the column ``name``; ``""`` for a column that is always text."""
    if name in (*JSON_CELLS, *ANSWERS) and not text.strip():
        return None
    if not name or name in ANSWERS or (name in TEXT_OR_MESSAGES and not text.lstrip().startswith("[")):
        return text
    try:
        value = parse_json(text.lower() if text in ("True", "False") else text)
    except ValueError as error:
        if re.match(r"\s*\[\s*\{\s*'", text):
            raise DataError(
                f"{place} is a list as Python prints it, as pandas writes one into CSV. Write the file with "
                "DataFrame.to_json(path, orient='records', lines=True)."
            ) from error
        return text
    if name in JSON_CELLS:
        return value
    is_messages = bool(value) and all(isinstance(one, dict) and ("role" in one or "from" in one) for one in value)
    return value if is_messages else text


def _decoded(raw: bytes, path: str, line: int = 1) -> str:
    """Decode bytes that begin at the start of a line."""
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


def _batches(path: str, file: Path, ending: str) -> Iterator[Any]:
    """Yield the rows of a Parquet or Arrow file as tables of at most `PARQUET_ROWS`."""
    import pyarrow
    from pyarrow import parquet

    if ending == ".parquet":
        with parquet.ParquetFile(file) as table:
            _require_distinct_columns(table.schema_arrow.names, path)
            yield from table.iter_batches(PARQUET_ROWS)
        return
    with pyarrow.OSFile(str(file)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            table = pyarrow.ipc.open_file(source)
            whole = (table.get_batch(i) for i in range(table.num_record_batches))
        else:
            whole = table = pyarrow.ipc.open_stream(source)
        _require_distinct_columns(table.schema.names, path)
        for batch in whole:
            batch.validate(full=True)
            yield from (batch.slice(start, PARQUET_ROWS) for start in range(0, batch.num_rows, PARQUET_ROWS))


def _saved_rows(path: str, folder: Path, split: str | None) -> Iterator[Row]:
    """Yield the rows of a data set saved by `datasets`, or of one of its splits."""
    import datasets

    try:
        found = datasets.load_from_disk(str(folder if split is None else folder / split))
    except Exception as error:  # datasets raises its own, pyarrow's, OSError, and those of damaged JSON
        raise DataError(
            f"{path}: cannot be read as a data set that was saved to disk ({error}). Save it again, or name one of its "
            "splits."
        ) from error
    size = sum(one.stat().st_size for one in folder.rglob("*.arrow"))
    tables = found.with_format("arrow").iter(PARQUET_ROWS)
    return _summed(path, _table_rows(path, "a saved data set", size, tables))


def _table_rows(path: str, kind: str, size: int, tables: Iterator[Any]) -> Iterator[Row]:
    """Yield the rows of tables, which may unpack to at most `PARQUET_RATIO` times their size."""
    number = 0
    guard = DecompressionGuard(path, size, PARQUET_RATIO, "write it as .jsonl")
    try:
        for table in tables:
            guard.add(table.nbytes)
            for row in rows_of(table):
                number += 1
                yield f"{path}: row {number}", row
    except DataError:
        raise
    except (
        Exception
    ) as error:  # pyarrow's own, OSError, and those of values that Python cannot hold, such as a year 60000
        raise DataError(f"{path}: cannot be read as {kind} after row {number} ({error}). Write it again.") from error


def rows_of(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of pyarrow, as `from_arrow` decodes them. A column that a row lacks is None."""
    kinds = {field.name: field.type for field in table.schema if re.search("struct<|arrow.json|float", str(field.type))}
    for row in table.to_pylist():
        yield row | {name: from_arrow(row[name], kind, parse_json) for name, kind in kinds.items()}


NARROW = {"float": "float32", "halffloat": "float16"}
"""Arrow's names for numpy's. 0.1 of 32 bits is 0.1, not 0.10000000149011612."""


def from_arrow(value: Any, kind: Any = None, decode: Callable[[str], Any] = lambda value: value) -> Any:
    """Return a value of a table without the nulls that the table added: a null in an object is no key.

    In Arrow all objects of a column have the same keys, and those that a row lacks are null. A `datasets.Json` holds
    objects with keys of their own, so its nulls stay.

    Args:
        value: the value, as `to_pylist` returns it.
        kind: its type in Arrow; None if it is unknown.
        decode: applied to each `datasets.Json`.
    """
    if value is None:
        return None
    if getattr(kind, "extension_name", None) == "arrow.json":
        return decode(value)
    kind = getattr(kind, "storage_type", kind)
    if str(kind) in NARROW and isinstance(value, float):
        import numpy

        return float(str(getattr(numpy, NARROW[str(kind)])(value)))
    if isinstance(value, dict):
        fields = ((key, item, kind and kind.field(key).type) for key, item in value.items() if item is not None)
        return {key: from_arrow(item, inner, decode) for key, item, inner in fields}
    if isinstance(value, list):
        return [from_arrow(item, getattr(kind, "value_type", None), decode) for item in value]
    return value


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
        for number, row in enumerate(sum_rows(path, dataset_rows(dataset)), 1):
            yield f"{path}: row {number}", row
    except Exception as error:  # datasets raises its own, huggingface_hub's, requests', pyarrow's and OSError
        raise DataError(
            f"{path}: the {hub} data set {name!r}, split {split!r}, could not be loaded: "
            f"{type(error).__name__}: {error}\nCheck the name, the split (org/name:split) and the network; a gated "
            f"data set needs `{login} login`. Or download it and give a .jsonl or .parquet file. If you meant a "
            "local file: there is none of that name."
        ) from error


def dataset_rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `datasets.Dataset` or `IterableDataset` in their order, as `from_arrow` decodes them."""
    from datasets import Dataset

    if isinstance(dataset, Dataset):
        return (row for table in dataset.with_format("arrow").iter(PARQUET_ROWS) for row in rows_of(table))
    # datasets has decoded these; what a generator or a function given to map yields has no known types.
    kinds = {} if dataset.features is None else {field.name: field.type for field in dataset.features.arrow_schema}
    return ({name: from_arrow(value, kinds.get(name)) for name, value in row.items()} for row in dataset)


def _with_chosen_columns(fields: dict[str, Any], columns: Mapping[str, str], source: str) -> dict[str, Any]:
    """A record's fields under the names that ``--columns`` gives them. Raises DataError for a missing column."""
    for name, column in columns.items():
        if column not in fields:
            raise DataError(
                f"{source}: no column {column!r}, which --columns {name}={column} asks for"
                f"{_perhaps(column, list(fields))}. This record has {listed(fields) or 'no columns'}."
            )
    kept = {name: value for name, value in fields.items() if name not in columns.values()}
    return kept | {name: fields[column] for name, column in columns.items()}


def fault_in(value: Any) -> str | None:
    """Describe a NaN, infinity, lone surrogate or too deep nesting in a JSON value, with its place; None if none."""
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
    """Whether a value needs no further check; true for most, which saves building their place for a message."""
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
    """Return the names of columns or keys for a message: the first twenty, with control characters escaped."""
    every = list(names)
    more = f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES else ""
    return ", ".join(printable(name, 60) for name in every[:MOST_NAMES]) + more


# Files by line or whole, packed or not, in bounded memory --------------------------------------------------------------


MIB = 2**20
LONGEST_LINE = 64 * MIB
"""Maximal length of a line; a longer one is refused before it fills the memory."""
UNPACKED = 256 * MIB
"""A packed file may always unpack to this size; beyond it, only to a multiple of its own size."""
GZIP_RATIO = 300
"""Maximal ratio: text packs to a tenth of its size, records with the same long system message to a 140th; zeros to a
thousandth."""


class DecompressionGuard:
    """Refuses a packed file that unpacks to an implausible size, before it fills the memory.

    The content may have ``ratio`` times the file's size. ``remedy`` is the advice for genuine content.
    """

    def __init__(self, path: str, packed: int, ratio: int, remedy: str) -> None:
        self.path, self.limit, self.ratio, self.remedy = path, max(UNPACKED, ratio * packed), ratio, remedy
        self.size = 0

    def add(self, size: int) -> None:
        """Count unpacked bytes. Raises DataError above the limit."""
        self.size += size
        if self.size > self.limit:
            raise DataError(
                f"{self.path}: it unpacks to more than {self.limit // MIB} MiB, over {self.ratio} times its own size; "
                f"records do not. If the file is genuine: {self.remedy}"
            )


def numbered_lines(path: str, file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers from 1, without a byte order mark.

    Lines end only at ``\\n``: `str.splitlines` would also cut at U+2028, which JSON allows inside a string. Lines are read
    on demand, so damage in the unread rest of a packed file is not noticed.

    Raises DataError for a line that is too long, and as `read_bytes` does.
    """
    with _opened(path, file) as stream:
        number = 0
        while raw := stream.readline(LONGEST_LINE + 1):
            number += 1
            if len(raw) > LONGEST_LINE:
                raise DataError(
                    f"{path}:{number}: the line is longer than {LONGEST_LINE // MIB} MiB. A .jsonl file holds one record per "
                    "line; a list of records is a .json file"
                )
            yield number, raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw


def read_bytes(path: str, file: Path, size: int = -1) -> bytes:
    """Return the content of a file or its first ``size`` bytes, unpacked, without a byte order mark.

    Raises DataError if it cannot be read, or if a packed file is damaged or unpacks to an implausible size.
    """
    with _opened(path, file) as stream:
        return stream.read(size).removeprefix(codecs.BOM_UTF8)


def is_packed(file: Path) -> bool:
    """Whether a file is gzip, by its name."""
    return file.name.lower().endswith(".gz")


class _Unpacked(io.RawIOBase):
    """The content of a gzip file, counted."""

    def __init__(self, packed: gzip.GzipFile, guard: DecompressionGuard) -> None:
        self._packed, self._guard = packed, guard

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer, in typeshed
        size = self._packed.readinto(buffer)
        self._guard.add(size)
        return size


UTF_16 = {
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
    **dict.fromkeys((b"{\0", b"[\0"), "utf-16-le"),
    **dict.fromkeys((b"\0{", b"\0["), "utf-16-be"),
}
"""First bytes of UTF-16 files, as saved by Windows: a byte order mark, or JSON's opening bracket beside a NUL."""


def _as_utf8(stream: io.BufferedReader) -> BinaryIO:
    encoding = UTF_16.get(stream.peek(2)[:2])
    return stream if encoding is None else io.BytesIO(stream.read().decode(encoding).encode("utf-8"))


@contextlib.contextmanager
def _opened(path: str, file: Path) -> Iterator[BinaryIO]:
    """Open a file to read its content. Errors while it is open become a DataError."""
    try:
        with file.open("rb") as stream:
            if not is_packed(file):
                yield _as_utf8(stream)
                return
            guard = DecompressionGuard(path, file.stat().st_size, GZIP_RATIO, "unpack it first (gunzip)")
            with gzip.GzipFile(fileobj=stream) as packed:
                yield _as_utf8(io.BufferedReader(_Unpacked(packed, guard), MIB))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip stream is truncated or corrupt ({error}). Copy or download the file again; `gzip -t` "
            "checks it."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: it begins like UTF-16, but is not valid UTF-16 ({error.reason}). Save it as UTF-8, or copy it again."
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}). Check its permissions.") from error
