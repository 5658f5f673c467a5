"""Reading records: every format gives the same ones, and every fault says where, what was found, and what to do."""

import gzip

import pyarrow
import pytest
from pyarrow import parquet

from heedful import ConfigError, DataError
from heedful.data import Record, parse_columns, read_records
from heedful.data.readers import ANSWERS, CANONICAL_NAMES
from jsonl import lines
from refusals import refused

ROWS = [
    {"prompt": "你好，世界\u2028第二行 🐎", "n": 1, "tags": ["甲", None]},
    {"prompt": "second", "n": 2.5, "tags": []},
]


def fault(path, *parts, columns=None):
    """Reading a file says all of this, and names it."""
    with refused(DataError, str(path), *parts):
        read_records(str(path), columns=columns or {})


# ------------------------------------------------------------------------------------------------------------- formats


def test_json_lines_number_their_sources_from_one_and_count_blank_lines(tmp_path):
    """Line 2 is blank, U+2028 inside a string ends no line, and CRLF is a line's end."""
    file = tmp_path / "a.jsonl"
    file.write_bytes((lines(ROWS[:1]) + "  \r\n" + lines(ROWS[1:]).replace("\n", "\r\n")).encode())
    assert read_records(str(file), columns={}) == [Record(f"{file}:1", ROWS[0]), Record(f"{file}:3", ROWS[1])]


def test_parquet_gives_the_same_fields_with_row_numbers(tmp_path):
    """More rows than one row group holds; numbers go on across groups."""
    file = tmp_path / "a.parquet"
    rows = [{"prompt": f"问题 {i}", "messages": [{"role": "user", "content": "甲"}], "margin": None} for i in range(7)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=3)
    records = read_records(str(file), columns={})
    assert [record.fields for record in records] == rows
    assert [record.source for record in records] == [f"{file}: row {i}" for i in range(1, 8)]


def test_hub_names_are_loaded_with_their_split(monkeypatch):
    """What is no file and looks like org/name goes to datasets.load_dataset."""
    import datasets

    calls, found = [], datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: calls.append((args, options)) or found)
    for path, name, split in (("org/na-me_1.5", "org/na-me_1.5", "train"), ("org/n:test[:5]", "org/n", "test[:5]")):
        records = read_records(path, columns={})
        assert calls.pop() == ((name,), {"split": split, "streaming": False})
        assert records == [Record(f"{path}: row 1", ROWS[0]), Record(f"{path}: row 2", ROWS[1])]
    assert not calls


def test_hub_failures_say_what_to_do(monkeypatch):
    import datasets

    def fail(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    fault(
        "org/name:validation",
        "org/name:validation: the Hub data set 'org/name', split 'validation'",
        "ConnectionError: no route to host",
        "Check the name, the split",
        "hf auth login",
        "download it",
    )


# --------------------------------------------------------------------------------------------------- files that are not


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "train.jsonl").touch()
    fault(
        tmp_path / "trian.jsonl", "trian.jsonl: no such file. Perhaps you meant 'train.jsonl'", ".parquet", "org/name"
    )
    fault(tmp_path / "gone" / "a.jsonl", "no such file: there is no folder", "gone")
    (tmp_path / "a.xlsx").write_text("prompt\nhello\n")
    fault(tmp_path / "a.xlsx", "the ending '.xlsx' is not a known format", "Accepted: a .jsonl")
    (tmp_path / "a.json").write_bytes(b"[]")
    fault(tmp_path / "a.json", "a.json: the data set is empty", "at least one record")
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    fault(tmp_path / "a.parquet", "the data set is empty")


@pytest.mark.parametrize(
    "path", ["data/absent.jsonl", "data/absent.csv", "./a/b", "absent", "a/b/c", "org/name.parquet"]
)
def test_missing_files_are_not_taken_for_hub_names(path, monkeypatch, tmp_path):
    """No network is touched for what cannot be org/name, or ends like a file."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    fault(path, f"{path}: no such file", "Accepted:", "org/name:split")


# ----------------------------------------------------------------------------------------------------- lines and lists


def test_surrogate_pairs_are_one_character(tmp_path):
    """JSON writes an emoji as two escapes; together they are no fault."""
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\\ud83d\\udc0e"}\n')
    assert read_records(str(tmp_path / "a.jsonl"), columns={})[0].fields == {"prompt": "🐎"}


BAD_LISTS = [
    (b'[{"a": 1},\n {"a": }]', [":2: not JSON", "column 8"]),
    (b'{"a": 1}', ["found a JSON object", "must hold one list of objects"]),
    (b'{"a": 1}\n{"a": }\n', [":2: not JSON: Expecting value", "A .jsonl file holds one whole JSON object per line"]),
    (b'{"a": [{"b": 1}], "c": [{"b": 1}]}', ["several lists of records: a, c", "into a file of its own"]),
    (b'[{"a": 1}, 5]', [": row 2: found a JSON integer", "must be an object"]),
    (b'[{"a": 1}, {"a": "\\ud800"}]', [": row 2: a holds a lone surrogate"]),
    (b'[{"a": 1, "a": 2}]', [": the key 'a' appears twice"]),
    (b'[{"a": 1},\n\xff]', [":2: not UTF-8: byte 0xff"]),
]  # fmt: skip


def test_bad_json_lists(tmp_path):
    path = tmp_path / "a.json"
    for data, parts in BAD_LISTS:
        path.write_bytes(data)
        fault(path, str(path) + parts[0] if parts[0][0] == ":" else parts[0], *parts[1:])


# -------------------------------------------------------------------------------------------------------- broken packings


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip"])
def test_broken_gzip(tmp_path, damage):
    packed = bytearray(gzip.compress(lines({"n": i, "text": f"第{i * i}行"} for i in range(5000)).encode()))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 255
    else:
        packed = lines(ROWS).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    fault(tmp_path / "a.jsonl.gz", "truncated or corrupt", "Copy or download the file again", "gzip -t")


def test_parquet_is_checked_as_json_is(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 not really")
    fault(path, f"{path}: cannot be read as Parquet", "Write it again")
    parquet.write_table(pyarrow.table({"margin": [1.0, float("nan")]}), path)
    fault(path, ": row 2: margin is nan", "Numbers must be finite")
    table = pyarrow.Table.from_arrays([pyarrow.array(["甲"]), pyarrow.array(["乙"])], names=["prompt", "prompt"])
    parquet.write_table(table, path)
    fault(path, "the column 'prompt' appears twice", "Keep one")


# ---------------------------------------------------------------------------------------------------------------- columns


def test_columns_are_renamed_and_can_be_swapped(written):
    path = written("a.jsonl", [{"问": "q", "chosen": "bad", "rejected": "good", "id": 7}])
    (record,) = read_records(path, columns=parse_columns("prompt=问, chosen=rejected, rejected = chosen"))
    assert record.fields == {"prompt": "q", "chosen": "good", "rejected": "bad", "id": 7}
    path = written("a.jsonl", [{"prompt": "old", "question": "new"}])
    (record,) = read_records(path, columns={"prompt": "question"})
    assert record.fields == {"prompt": "new"}


def test_a_mapped_column_that_a_record_lacks(written):
    path = written("a.jsonl", [{"question": "a", "n": 1}, {"questions": "b", "n": 1}])
    parts = [f"{path}:2: no column 'question'", "--columns prompt=question", "perhaps 'questions'"]
    fault(path, *parts, "This record has questions, n", columns={"prompt": "question"})


def test_parse_columns_takes_every_canonical_name():
    assert parse_columns("") == parse_columns("  ") == {}
    names = (*CANONICAL_NAMES, *ANSWERS)
    assert parse_columns(",".join(f"{name}=x y={name}" for name in names)) == {name: f"x y={name}" for name in names}


def test_answers_of_another_column(written):
    """An empty cell is none: CSV has no null. Spaces behind the commas of the first line are no part of names or cells."""
    for name, content, answers in (
        ("题.csv", "prompt,ground_truth\n一,1\n二,\n三,007\n", ["1", None, "007"]),
        ("题.csv", 'prompt, ground_truth\n"一", "1, 2"\n二, 3\n', ["1, 2", "3"]),
        ("题.jsonl", '{"prompt": "一", "ground_truth": "1"}\n', ["1"]),
    ):
        found = read_records(written(name, content), columns=parse_columns("answer=ground_truth"))
        expected = [{"prompt": prompt, "answer": one} for prompt, one in zip("一二三", answers, strict=False)]
        assert [one.fields for one in found] == expected


def test_columns_as_pandas_writes_them_by_default(written):
    path = written("题.json", '{"prompt": {"0": "一", "1": "二"}, "answer": {"0": 1, "1": 2}}')
    fault(path, "an object of columns, ", "orient='records', lines=True")


BAD_COLUMNS = [
    ("prompt", ["'prompt' in 'prompt' is not NAME=COLUMN", "--columns prompt=question,completion=answer"]),
    ("prompt=a,", ["'' in 'prompt=a,' is not NAME=COLUMN"]),
    ("prompt=", ["'prompt=' in 'prompt=' is not NAME=COLUMN"]),
    ("prompt=问 题 chosen=better", ["a comma is missing before 'chosen' in 'prompt=问 题 chosen=better'"]),
    ("=a", ["'=a' in '=a' is not NAME=COLUMN"]),
    ("promt=a", ["unknown name 'promt' (perhaps 'prompt')", "text, messages, prompt, completion", "right of it"]),
    ("solution=prompt", ["unknown name 'solution'", "Left of '=' goes one of"]),
    ("prompt=a,prompt=b", ["'prompt' is given twice, as 'a' and 'b'", "Keep one"]),
]  # fmt: skip


def test_parse_columns_refuses():
    for columns, parts in BAD_COLUMNS:
        with refused(ConfigError, "--columns", *parts):
            parse_columns(columns)


def test_a_text_file_is_one_text_to_the_last_character(tmp_path):
    """Line ends of every kind stay; a BOM does not."""
    path = tmp_path / "故事.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "从前\r\n有座山。\u2028\n\n 完".encode())
    (record,) = read_records(str(path), columns={})
    assert record.fields == {"text": "从前\r\n有座山。\u2028\n\n 完"}
    assert record.source == f"{path}:1"
    path.write_bytes(b"a\n\xff")
    fault(path, f"{path}:2: not UTF-8")
    path.write_bytes(b" \n")
    fault(path, "the data set is empty")
