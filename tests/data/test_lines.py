"""Packed files are streamed: memory is bounded, and a few records of a large file cost what they are."""

import gzip
import json
import os
import random
import subprocess
import sys

import pyarrow
import pytest
from pyarrow import parquet

from heedful import DataError
from heedful.data import read_records, readers
from heedful.data.readers import LONGEST_LINE, MIB

MEASURED = """
import json, resource, sys
import heedful.data.readers as readers
import pyarrow.parquet

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak()
for path, samples in json.loads(sys.argv[1]):
    try:
        said = str(len(readers.read_records(path, columns={}, max_samples=samples)))
    except readers.DataError as error:
        said = str(error)
    print(json.dumps([said, peak() - before]))
"""


def measured(*files):
    """What reading each file said, and the MiB that it and those before it took, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, json.dumps([(str(path), samples) for path, samples in files])],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_bomb(path, filling, *, mib):
    """A few records and then many times the same MiB; a gzip file may have several parts."""
    part = gzip.compress(filling * (MIB // len(filling)), 9)
    path.write_bytes(gzip.compress((b"[" if ".json." in path.name else b"") + RECORDS) + part * mib)
    return path


RECORDS = b"".join(json.dumps({"prompt": f"问题 {i}"}).encode() + b"\n" for i in range(12))


def test_memory_is_bounded(tmp_path):
    """Ten records of a bomb cost ten records; whole bombs, and a line of 100 MB, are refused before they are read."""
    zeros = write_bomb(tmp_path / "zeros.jsonl.gz", b"\0", mib=2048)
    spaces = write_bomb(tmp_path / "a.json.gz", b" ", mib=1024)
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(RECORDS + b'{"prompt": "')
        for _ in range(100):
            file.write(b"x" * MIB)
        file.write(b'"}\n')
    once = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200_000, pyarrow.int32()), ["x" * 10_000])
    table = tmp_path / "a.parquet"  # a text that is stored once and repeated 200,000 times would be 2 GB
    parquet.write_table(pyarrow.table({"prompt": once}), table, store_schema=False)
    few_zeros, few_rows, line, all_zeros, all_spaces, all_rows = measured(
        (zeros, 10), (table, 10), (tmp_path / "a.jsonl", None), (zeros, None), (spaces, None), (table, None)
    )
    assert few_zeros[0] == few_rows[0] == "10"
    assert few_zeros[1] < 64
    assert few_rows[1] < 200
    assert line[0].startswith(f"{tmp_path / 'a.jsonl'}:13: the line is longer than 64 MiB")
    assert line[1] < 3 * LONGEST_LINE / MIB
    assert f"{zeros}:13: the line is longer than 64 MiB" in all_zeros[0]
    assert all_zeros[1] < 700
    for fragment in ("over 300 times its own size", "(gunzip)"):
        assert fragment in all_spaces[0]
    assert all_spaces[1] < 700
    for fragment in ("unpacks to more than 256 MiB, over 1000 times its own size", "write it as .jsonl"):
        assert fragment in all_rows[0]
    assert all_rows[1] < 900


@pytest.mark.exhaustive
def test_a_bomb_of_many_lines_is_refused_in_bounded_memory(tmp_path):
    bomb = write_bomb(tmp_path / "a.jsonl.gz", b" " * 1023 + b"\n", mib=1024)
    ((said, grown),) = measured((bomb, None))
    assert "over 300 times its own size" in said
    assert "(gunzip)" in said
    assert grown < 700


def test_a_long_line_below_the_limit_is_read(tmp_path):
    text = "长" * (10 * MIB // 3)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False), encoding="utf-8")
    assert read_records(str(tmp_path / "a.jsonl"), columns={})[0].fields == {"prompt": text}


@pytest.mark.parametrize("rows", [3, 1500])
def test_real_text_that_packs_well_is_read(tmp_path, monkeypatch, rows):
    """A long system message repeated in every record packs far better than text alone."""
    monkeypatch.setattr(readers, "UNPACKED", 1024)
    rules = "".join(random.Random(0).choices("春夏秋冬风雨雷电山水花鸟", k=2000))
    records = [{"messages": [{"role": "system", "content": rules}], "prompt": f"{i * i * 7919}"} for i in range(rows)]
    data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    assert [r.fields for r in read_records(str(tmp_path / "a.jsonl.gz"), columns={})] == records


@pytest.mark.parametrize("place", ["before", "in", "after"])
def test_damage_that_looks_like_a_fault_in_a_line_is_called_damage(tmp_path, place):
    """Line 3 of a stored (not compressed) block is damaged: its JSON is bad because the file is."""
    data = bytearray(gzip.compress(RECORDS * 40, compresslevel=0))
    at = data.index(b'{"prompt"', 200)
    if place == "in":
        data[at] ^= 1
    elif place == "before":
        data[at : at + 1] = b"#"
        data[-8:-4] = b"\0\0\0\0"
    else:
        data = data[:-4]
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(DataError, match="the gzip stream is truncated or corrupt"):
        read_records(str(tmp_path / "a.jsonl.gz"), columns={})


def test_only_what_is_asked_for_is_read(tmp_path):
    """The rest of a damaged file is not looked at."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(RECORDS * 4000)[:-100])
    assert len(read_records(str(tmp_path / "a.jsonl.gz"), columns={}, max_samples=3)) == 3
