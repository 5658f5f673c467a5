"""Reading the first so many records: what follows is not read, however broken, and the counts say that reading stopped."""

import gzip
import json

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from heedful import DataError, PerplexityConfig, SFTConfig
from heedful.data import read_demonstrations, read_prompts, read_rankings, read_records
from heedful.data.loading import load_split
from heedful.evaluate.measuring import held_out, left_out
from jsonl import lines, write_jsonl

ROWS = [{"prompt": f"问题{i}", "n": i} for i in range(4)]


@pytest.fixture
def spoiled(tmp_path):
    """``spoiled(name)``: a file of that format with four good records and a fault behind them."""

    def write(name):
        file = tmp_path / name
        if name.endswith(".parquet"):
            rows = [{"prompt": row["prompt"], "n": float(row["n"])} for row in ROWS]
            table = pyarrow.Table.from_pylist([*rows, {"prompt": "坏", "n": float("nan")}])
            parquet.write_table(table, file)
        elif name.endswith(".json"):
            file.write_text(json.dumps([*ROWS, "no object"], ensure_ascii=False), encoding="utf-8")
        else:
            data = (lines(ROWS) + "{no JSON\n").encode()
            file.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(file)

    return write


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"])
def test_local_files_are_read_no_further(spoiled, name):
    path = spoiled(name)
    for count in (1, 4):
        assert [record.fields for record in read_records(path, columns={}, max_samples=count)] == ROWS[:count]
    for count in (5, 100, None):
        with pytest.raises(DataError, match=r"a\.json|a\.parquet"):
            read_records(path, columns={}, max_samples=count)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """``org/name`` on a Hub that lies in a folder: two good shards of two records, and a third that is no JSON.

    datasets itself reads it, streaming or not; only the place where it looks is another. The calls are recorded.
    """
    folder, calls, load = tmp_path / "hub", [], datasets.load_dataset
    folder.mkdir()
    for shard in range(2):
        write_jsonl(folder / f"train-0000{shard}.jsonl", ROWS[2 * shard : 2 * shard + 2])
    (folder / "train-00002.jsonl").write_text("no JSON\n", encoding="utf-8")

    def from_folder(name, **options):
        calls.append((name, options))
        return load(str(folder), cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    return calls


def test_hub_data_sets_are_streamed_no_further(hub):
    """The third shard would be an error: nothing of it was asked for."""
    records = read_records("org/name", columns={}, max_samples=3)
    assert [record.fields for record in records] == ROWS[:3]
    assert [record.source for record in records] == [f"org/name: row {i}" for i in (1, 2, 3)]
    assert hub == [("org/name", {"split": "train", "streaming": True})]
    with pytest.raises(DataError, match="the Hub data set 'org/name', split 'train', could not be loaded"):
        read_records("org/name", columns={})
    with pytest.raises(DataError, match=r"(?s)the Hub data set 'org/name', split 'train', could not.*the network"):
        read_records("org/name", columns={}, max_samples=5)  # while records are read, long after it was opened
    assert hub[-1][1]["streaming"]


def test_a_slice_is_loaded_whole(tmp_path, hub):
    """datasets cannot stream one."""
    (tmp_path / "hub" / "train-00002.jsonl").unlink()
    records = read_records("org/name:train[1:]", columns={}, max_samples=2)
    assert [record.fields for record in records] == ROWS[1:3]
    assert hub == [("org/name", {"split": "train[1:]", "streaming": False})]


def test_records_are_counted_not_what_is_made_of_them(written):
    """A conversation of two answers is one record and two demonstrations."""
    turns = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    talks = written("a.jsonl", [{"messages": turns}] * 3)
    pairs = written("b.jsonl", [{"prompt": "p", "chosen": "c", "rejected": "r"}] * 3)
    assert len(read_demonstrations(talks, max_samples=2)) == 4
    assert len(read_prompts(talks, max_samples=2)) == 2
    assert len(read_rankings(pairs, max_samples=2)) == 2
    assert len(read_rankings(pairs, max_samples=100)) == 3


def test_trainers_read_the_first_of_both_files_and_say_so(written):
    ours, others = (written(f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(9)]) for name in "ab")
    config = SFTConfig(model="m", output="o", data=ours, eval_data=others, max_samples=2)
    train, eval_half, counts = load_split(read_prompts, config)
    assert ([item.prompt for item in train], [item.prompt for item in eval_half]) == (["a0", "a1"], ["b0", "b1"])
    assert counts == {"records": 4, "train": 2, "held_out": 2, "max_samples": 2}
    config = SFTConfig(model="m", output="o", data=ours, max_samples=5, eval_fraction=0.0)
    assert load_split(read_prompts, config)[2] == {"records": 5, "train": 5, "held_out": 0, "max_samples": 5}
    config = SFTConfig(model="m", output="o", data=ours, eval_fraction=0.0)
    assert load_split(read_prompts, config)[2] == {"records": 9, "train": 9, "held_out": 0}


def test_measures_read_the_first_and_say_so(written):
    """An unusable record among them is one of them."""
    data = written("a.jsonl", [{"prompt": "a"}, {"prompt": " "}, {"prompt": "b"}, {"prompt": "c"}])
    options = {"model": "m", "data": data, "unusable": "drop", "max_dropped": 0.5}
    items, counts = held_out(read_prompts, PerplexityConfig(max_samples=3, **options))
    assert [item.prompt for item in items] == ["a", "b"]
    assert left_out(counts) == {"dropped_unusable": 1, "unusable/empty prompt": 1, "max_samples": 3}
    assert "max_samples" not in left_out(held_out(read_prompts, PerplexityConfig(**options))[1])
