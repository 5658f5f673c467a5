"""Files, folders and patterns of files that hold records: each gives the same ones, with the place where each was read."""

import gzip
import json
import random
import re
import subprocess
import sys

import datasets
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from heedful import DataError
from heedful.data import read_demonstrations, read_labelled, read_prompts, read_rankings, read_records
from heedful.hub import dataset_sum
from jsonl import lines
from refusals import refused

ROWS = [
    {"prompt": '你好\n第二行，"引号" \u2028 🐎', "chosen": "007", "rejected": "NA"},
    {"prompt": " 空 格 ", "chosen": "1e5", "rejected": "null"},
    {"prompt": "tab\there;semicolon", "chosen": "true", "rejected": "' \\ \r\n x"},
]
MESSAGES = [{"role": "user", "content": "问"}, {"role": "assistant", "content": "答"}]


def fields(path):
    return [record.fields for record in read_records(str(path), columns={})]


def sources(path):
    return [record.source for record in read_records(str(path), columns={})]


def fault(path, *parts, read=read_rankings):
    """Reading a file says all of this, and names it."""
    with refused(DataError, str(path), *parts):
        read(str(path))


# CSV and TSV ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_every_cell_is_text_to_the_character(tmp_path, ending, encoding):
    """007 stays 007, NA stays NA, and a quoted cell keeps its line breaks. Excel writes a byte order mark and semicolons."""
    path = tmp_path / f"数据.{ending}"
    for separator in "\t" if ending == "tsv" else ",;\t":
        data = pandas.DataFrame(ROWS).to_csv(index=False, sep=separator, lineterminator="\n").encode(encoding)
        path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
        assert fields(path) == ROWS
        assert sources(path) == [f"{path}:{line}" for line in (2, 4, 5)]  # cells have a line break, of Windows too


def test_cells_of_lists_and_labels(tmp_path):
    """In a column that is no text, a cell is JSON; empty, it is absent."""
    path = tmp_path / "a.csv"
    rows = [
        {"messages": json.dumps(MESSAGES, ensure_ascii=False), "label": "1", "truncated": "", "id": "007"},
        {"messages": json.dumps(MESSAGES), "label": "False", "truncated": "True", "id": "8"},
    ]
    pandas.DataFrame(rows).to_csv(path, index=False)
    assert [(one.label, one.truncated, one.response) for one in read_labelled(str(path))] == [
        (True, False, "答"),
        (False, True, "答"),
    ]
    (tmp_path / "b.csv").write_text('q,responses,ranks,margin\n问,"[""甲"", ""乙""]","[1, 0]",\n')
    (ranking,) = read_rankings(str(tmp_path / "b.csv"), columns="prompt=q")
    assert (ranking.prompt, ranking.responses, ranking.ranks) == ("问", ("甲", "乙"), (1, 0))
    (tmp_path / "c.csv").write_text('prompt,chosen,rejected,margin\n"[1]","[a","[]",0.5\n')
    (pair,) = read_rankings(str(tmp_path / "c.csv"))
    assert (pair.prompt, pair.responses, pair.margin) == ("[1]", ("[a", "[]"), 0.5)


def test_pandas_puts_lists_into_csv_as_python_prints_them(tmp_path):
    path = tmp_path / "a.csv"
    pandas.DataFrame({"messages": [MESSAGES]}).to_csv(path, index=False)
    fault(path, ":2: `messages` is a list as Python prints it", "to_json(path", read=read_demonstrations)


FAULTY_CSV = [
    ("prompt,prompt\na,b\n", ["the column 'prompt' appears twice"]),
    ("prompt,chosen,rejected\na,b\n", [":2: 2 cells, but the first line names 3 columns (prompt, chosen, rejected)"]),
    ("prompt,chosen,rejected\na,b,c\n一, 二,三,四\n", [":3: 4 cells", "Quote a cell that holds ','"]),
    ('prompt,chosen,rejected\na,b,"c" d\n', [":2: not CSV", "double the quotes"]),
    ('prompt,chosen,rejected\na,b,c\na,b,"c\nd\n', [":3: not CSV"]),
    ("prompt,chosen,rejected\n", ["the data set is empty"]),
    ("", ["the data set is empty"]),
    ("prompt,chosen\na,b\n", [":2: not a preference pair or ranking: found `prompt` (string), `chosen` (string)"]),
]  # fmt: skip


def test_faulty_csv(tmp_path):
    for text, parts in FAULTY_CSV:
        path = tmp_path / "数据.csv"
        path.write_text(text, encoding="utf-8")
        fault(path, *parts)


def test_rows_of_empty_cells_at_the_end_are_left_out_and_reported(tmp_path, capsys):
    """As Excel leaves them there. Above the names of the columns they are nothing."""
    path = tmp_path / "a.csv"
    path.write_text("\n,\nprompt,x\n\n问,1\n\n,\n,\n")
    assert sources(path) == [f"{path}:5"]
    assert f"{path}:7: rows of empty cells from here to the end are left out (2)" in capsys.readouterr().err
    path.write_text("\nprompt,x\n\n问,1\n\n")
    assert sources(path) == [f"{path}:4"]
    assert capsys.readouterr().err == ""


def test_rows_of_empty_cells_among_others_are_records(tmp_path):
    """As in JSON Lines, where they are faults."""
    for text in ("prompt,chosen,rejected\na,b,c\n,,\na,b,c\n", 'prompt\na\n""\nb\n'):
        path = tmp_path / "a.csv"
        path.write_text(text)
        assert sources(path) == [f"{path}:{line}" for line in (2, 3, 4)]
        fault(path, f"{path}:3", "`prompt` is empty or only white space", read=read_prompts)


def test_an_unnamed_column_has_a_name(tmp_path):
    """pandas writes its index without one."""
    pandas.DataFrame({"prompt": ["问"]}).to_csv(tmp_path / "a.csv")
    assert fields(tmp_path / "a.csv") == [{"column 1": "0", "prompt": "问"}]


# JSON of either kind, UTF-16 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("is_list", [False, True], ids=["lines", "list"])
def test_json_is_told_by_its_first_character(tmp_path, is_list, encoding):
    data = (json.dumps(ROWS, ensure_ascii=False, indent=2) if is_list else lines(ROWS)).encode(encoding)
    for ending in ("jsonl", "json", "jsonl.gz", "json.gz", "JSONL"):
        path = tmp_path / f"数据.{ending}"
        path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
        assert fields(path) == ROWS
        assert sources(path)[1] == (f"{path}: row 2" if is_list else f"{path}:2")


def test_damaged_utf_16(tmp_path):
    """Half of a character, and an odd number of bytes."""
    for i, end in enumerate([b"\x3d\xd8", b"x"]):
        path = tmp_path / f"{i}.jsonl"
        path.write_bytes(lines(ROWS).encode("utf-16") + end)
        fault(path, "begins like UTF-16, but is not", "Save it as UTF-8")


def test_a_list_in_an_object(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": "1.1", "data": ROWS}, ensure_ascii=False), encoding="utf-8")
    assert fields(path) == ROWS
    assert f"{path}: the records are the list 'data'" in capsys.readouterr().err
    path.write_text(json.dumps({"train": ROWS, "test": ROWS}), encoding="utf-8")
    fault(path, "several lists of records: train, test", "into a file of its own")


def test_one_record_is_no_list_in_an_object(tmp_path):
    path = tmp_path / "a.json"
    for indent in (None, 1):
        path.write_text(json.dumps({"messages": MESSAGES}, indent=indent))
        assert read_demonstrations(str(path))[0].response == "答"


def test_records_with_lists_of_other_names(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(lines([{"turns": MESSAGES}, {"turns": MESSAGES}]))
    assert len(read_demonstrations(str(path), columns="messages=turns")) == 2


# Shards, folders, patterns ----------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path):
    """A folder with three shards, and files that are no data."""
    folder = tmp_path / "分片"
    folder.mkdir()
    for i, row in enumerate(ROWS):
        (folder / f"train-{i}.jsonl").write_text(lines([row]), encoding="utf-8")
    (folder / "README.md").write_text("读我")
    (folder / ".hidden.jsonl").write_text("{")
    (folder / "dataset_infos.json").write_text("{}")
    return folder


def test_a_folder_and_a_pattern_are_their_files_by_name(shards, monkeypatch):
    for path in (shards, shards / "*.jsonl", shards.parent / "**" / "train-[0-9].jsonl"):
        assert fields(path) == ROWS
        assert sources(path) == [f"{shards}/train-{i}.jsonl:1" for i in range(3)]
    first = dataset_sum(str(shards))
    (shards / "train-1.jsonl").write_text(lines(ROWS[:1]), encoding="utf-8")
    fields(shards)
    assert first != dataset_sum(str(shards))
    monkeypatch.chdir(shards)
    assert sources("train-*.jsonl")[0] == "train-0.jsonl:1"


def test_what_a_folder_may_not_mix(shards):
    (shards / "test-0.jsonl").write_text(lines(ROWS))
    fault(shards, f"{shards}: a folder with files for several uses", "test-0.jsonl", "a pattern in quotes")
    (shards / "test-0.jsonl").unlink()
    (shards / "more.csv").write_text("prompt\n")
    fault(shards, f"{shards}: a folder with files of several kinds", "more.csv")
    fault(f"{shards}/*.xlsx", "/*.xlsx: no such file, and none matches this pattern")


def test_a_fault_in_a_shard_is_named_with_the_shard(shards):
    (shards / "train-1.jsonl").write_text('{"prompt": "问"}\n')
    fault(shards, f"{shards}/train-1.jsonl:1: not a preference pair or ranking")


def test_arrow_files(tmp_path):
    path, table = tmp_path / "a.arrow", pyarrow.Table.from_pylist(ROWS)
    for new in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file):
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        assert fields(path) == ROWS
        assert sources(path) == [f"{path}: row {i}" for i in (1, 2, 3)]
        path.write_bytes(path.read_bytes()[:-200])
        fault(path, f"{path}: cannot be read as Arrow after row")


def test_damaged_arrow_files_give_no_traceback(tmp_path):
    """A process of its own: pyarrow may crash on what it does not check."""
    path = tmp_path / "a.arrow"
    datasets.Dataset.from_list(ROWS * 5).save_to_disk(tmp_path / "saved")
    whole = next((tmp_path / "saved").glob("*.arrow")).read_bytes()
    code = """
import random, sys
from heedful.data import read_prompts
from heedful.errors import DataError
path, whole = sys.argv[1], open(sys.argv[2], "rb").read()
rng = random.Random(0)
for _ in range(300):
    damaged = bytearray(whole)
    for _ in range(rng.randint(1, 5)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    open(path, "wb").write(damaged)
    try:
        read_prompts(path)
    except DataError as error:
        assert path in str(error)
print("whole")
"""
    (tmp_path / "whole").write_bytes(whole)
    done = subprocess.run(
        [sys.executable, "-c", code, path, tmp_path / "whole"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-2000:]


def test_data_sets_that_were_saved_to_disk(tmp_path):
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "一")
    assert fields(tmp_path / "一") == ROWS
    assert sources(tmp_path / "一")[2] == f"{tmp_path / '一'}: row 3"
    assert dataset_sum(str(tmp_path / "一")) is not None
    whole.select([2, 0]).save_to_disk(tmp_path / "挑")
    assert fields(tmp_path / "挑") == [ROWS[2], ROWS[0]]
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(tmp_path / "二")
    fault(tmp_path / "二", "several splits", f"Name one: {tmp_path / '二'}:test or {tmp_path / '二'}:train.")
    assert fields(f"{tmp_path / '二'}:test") == [ROWS[1]]
    fault(f"{tmp_path / '二'}:dev", "cannot be read as a data set that was saved to disk")
    (tmp_path / "一" / "state.json").write_text("{")
    fault(tmp_path / "一", "cannot be read as a data set that was saved to disk", "Save it again")


def test_parquet_shards_in_one_command(tmp_path, tiny, heedful):
    """The run's environment has a sum of what was read, as of a data set on the Hub."""
    for i in range(2):
        rows = [{"prompt": f"问{i}{j}", "completion": "答"} for j in range(4)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"train-0000{i}-of-00002.parquet")
    command = ["sft", "--model", tiny(), "--data", tmp_path / "train-*.parquet", "--output", tmp_path / "运行"]
    done = heedful(*command, "--max-steps", "1", "--batch-size", "2", "--eval-fraction", "0", "--sample-every", "0")
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "运行" / "summary.json").read_text())["data"]["records"] == 8
    environment = json.loads((tmp_path / "运行" / "environment.json").read_text())
    assert re.fullmatch("[0-9a-f]{64}", environment["data"][str(tmp_path / "train-*.parquet")])


def test_no_bytes_give_a_traceback(tmp_path):
    """Random bytes, and damaged CSV, in every kind of file."""
    rng = random.Random(3)
    good = pandas.DataFrame(ROWS).to_csv(index=False).encode()
    for i in range(400):
        path = tmp_path / f"a.{rng.choice(['csv', 'tsv', 'arrow', 'jsonl', 'json', 'csv.gz'])}"
        data = bytearray(good if rng.random() < 0.5 else rng.randbytes(80))
        for _ in range(rng.randint(0, 4)):
            data[rng.randrange(len(data))] = rng.choice(b'",\n\r\0\xff[{x')
        path.write_bytes(gzip.compress(bytes(data)) if path.suffix == ".gz" and i % 2 else bytes(data))
        for read in (read_rankings, read_prompts):
            try:
                said = str(path) if read(str(path)) else "nothing"
            except DataError as error:
                said = str(error)
            assert str(path) in said


def test_a_text_of_prompts_becomes_prompts(tmp_path, tiny, heedful):
    """The message's command makes a prompt of each line; a flag would make one of the whole file."""
    (tmp_path / "问题.txt").write_text('一加一？\n\n"2" + \\2? \n', encoding="utf-8")
    path = str(tmp_path / "问题.txt")
    outcome = heedful("ppo", model=tiny(), data=path, rewards="rule:digits", output=tmp_path / "运行")
    assert outcome.status == 2
    assert "--columns" not in outcome.message
    command = outcome.message.partition("To make a prompt of each line: python")[2]
    subprocess.run(sys.executable + command, shell=True, check=True, cwd=tmp_path)
    assert [one.prompt for one in read_prompts(str(tmp_path / "prompts.jsonl"))] == ["一加一？", '"2" + \\2?']
