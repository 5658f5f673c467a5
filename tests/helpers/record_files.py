"""Files of records, in every format that a test writes."""

import gzip
import json

import pyarrow
from pyarrow import parquet

from jsonl import lines


def write_records(path, records):
    """Write these records in the format that the path ends with; the path as a text."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        text = json.dumps(records, ensure_ascii=False) if ".json" in path.suffixes else lines(records)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)
