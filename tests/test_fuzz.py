"""Random bytes and damaged records through every reader, damaged settings through the parser.

Each outcome is records, or an error that names the file: no traceback, no hang, and no record that is neither read nor
reported. `python tests/test_fuzz.py` makes the long runs and prints a table.
"""

import contextlib
import copy
import dataclasses
import gzip
import io
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from heedful import (
    BestOfNConfig,
    ChatConfig,
    ConfigError,
    DataError,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RewardConfig,
    ServeRewardConfig,
    SFTConfig,
)
from heedful.configs.parse import parse, to_yaml
from heedful.data import read_demonstrations, read_labelled, read_prompts, read_rankings

LONGEST = 120.0
"""Seconds within which a reader must be done with a few bytes; it takes less than a millisecond."""

READERS = {
    "demonstrations": read_demonstrations,
    "rankings": read_rankings,
    "labelled": read_labelled,
    "prompts": read_prompts,
}
CHAT = [{"role": "user", "content": "你好？"}, {"role": "assistant", "content": "您好！"}]
CALL = {"type": "function", "id": "1", "function": {"name": "加", "arguments": {"a": 2}}}
VALID = {
    "demonstrations": [
        {"prompt": "一加一？", "completion": "等于二。"},
        {"messages": [*CHAT, *CHAT]},
        {"text": "从前有座山。"},
        {"prompt": CHAT[:1], "completion": "好", "truncated": True},
        {"tools": [{"name": "加"}], "messages": [CHAT[0], {"role": "assistant", "tool_calls": [CALL]},
         {"role": "tool", "tool_call_id": "1", "content": "5"}, {"role": "assistant", "content": "五"}]},
    ],
    "rankings": [
        {"prompt": "问", "chosen": "好", "rejected": "坏", "margin": 0.5},
        {"prompt": "问", "responses": ["甲", "乙", "丙"], "ranks": [0, 1, 1]},
        {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "哼"}]},
        {"chosen": "\n\nHuman: 问\n\nAssistant: 好", "rejected": "\n\nHuman: 问\n\nAssistant: 坏"},
        {"prompt": CHAT[:1], "chosen": "好", "rejected": "坏", "truncated": False},
    ],
    "labelled": [
        {"prompt": "问", "completion": "好", "label": True},
        {"prompt": CHAT[:1], "completion": "坏", "label": False},
        {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True},
        {"prompt": "问", "chosen": "好", "rejected": "坏"},
        {"prompt": "问", "completion": "断", "label": False, "truncated": True},
    ],
    "prompts": [
        {"prompt": "问", "expected": "1", "extra": {"a": [1, None]}},
        {"prompt": CHAT[:1]},
        {"messages": CHAT},
        {"messages": CHAT[:1], "tools": '[{"name": "加"}]'},
        {"prompt": "second", "n": 2.5},
    ],
}  # fmt: skip
ODD = [
    None, True, 0, -1, 1.5, 10**30, 1e308, "", " ", "\0", "\u2028", "\x1b[31m", "<think>", "</think>", "x" * 500, [], {},
    [[]], [None], [{}], ["a", "b"], {"role": "user"}, {"role": "user", "content": "问"}, [{"role": "user", "content": "问"}],
    {"a": {"a": {"a": {}}}}, [0, 1], [1, 0, 2], "[]", "{}", '[{"name": "f"}]', '[{"name": "\\ud800"}]',
]  # fmt: skip
"""Values that are put in the place of others."""
KEYS = ["prompt", "chosen", "label", "messages", "role", "content", "ranks", "text", "margin", "x", ""]
PIECES = [
    "NaN", "1e400", '"\\ud800"', "\ufeff", "\n", "\r\n", "\u2028", '"', "{", "}", "[" * 500, ",", ":", "\\", "1" * 5000,
]  # fmt: skip
"""Texts that are put anywhere."""
ALPHABET = '{}[]",:\\ \n\t0123456789.-+eE' + "".join(sorted({c for rows in VALID.values() for c in json.dumps(rows)}))


def random_bytes(rng):
    """Bytes of one of three kinds: any, of JSON's characters, or pieces of JSON in any order."""
    length = rng.choice([0, 1, 5, 40, 300])
    kind = rng.randrange(3)
    if kind == 0:
        return rng.randbytes(length)
    if kind == 1:
        return "".join(rng.choices(ALPHABET, k=length)).encode()
    words = [
        "{",
        "}",
        "[",
        "]",
        '"prompt"',
        '"chosen"',
        '"messages"',
        '"role"',
        '"user"',
        ":",
        ",",
        "1",
        "null",
        "\n",
        '"a"',
    ]
    words += PIECES
    return "".join(rng.choices(words, k=length // 4)).encode()


def places(value, path=()):
    """The path of every value inside a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(rng, record):
    """A record with one of its values, keys or bytes changed, as one line or more."""
    record = copy.deepcopy(record)
    *before, last = rng.choice([path for path in places(record) if path])
    parent = record
    for key in before:
        parent = parent[key]
    what = rng.randrange(6)
    if what == 0:
        parent[last] = copy.deepcopy(rng.choice(ODD))
    elif what == 1:
        del parent[last]
    elif what == 2 and isinstance(parent, dict):
        parent[rng.choice(KEYS)] = parent.pop(last)
    elif what == 3 and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[last]))
    line = bytearray(json.dumps(record, ensure_ascii=rng.random() < 0.5).encode())
    if what >= 4:
        for _ in range(rng.choice([1, 1, 1, 3])):
            at = rng.randrange(len(line))
            change = rng.randrange(4)
            if change == 0:
                line[at] = rng.randrange(256)
            elif change == 1:
                del line[at : at + rng.choice([1, 1, 8])]
            elif change == 2:
                line[at:at] = rng.choice(PIECES).encode()
            else:
                line[at:at] = line[at : at + rng.choice([1, 8, 40])]
            line = line or bytearray(b"x")
    return bytes(line)


def outcome(read, path):
    """What came of reading: items and refused records, or the error. Raises anything that is not for the user."""
    began, refused = time.monotonic(), []
    try:
        items = read(str(path), refused=refused)
    except DataError as error:
        found = str(error)
    else:
        found = items, refused
    assert not isinstance(found, str) or str(path) in found, f"an error that does not name the file: {found}"
    assert time.monotonic() - began < LONGEST, f"{time.monotonic() - began:.0f} s"
    return found


def content(item):
    return dataclasses.replace(item, source="")


def check_records(kind, path, lines, untouched):
    """Every row is read, refused with its place, or the file is refused; what was not touched is read as it was.

    ``lines`` is None for a file of which only its own format knows how many rows it has.
    """
    found = outcome(READERS[kind], path)
    if isinstance(found, str):
        return "file refused"
    items, refused = found
    sources = {item.source for item in items}
    assert lines in (None, len(sources) + len(refused)), f"{lines} rows in, {len(sources)} out, {len(refused)} reported"
    assert not sources & {str(error).partition(": ")[0] for error in refused}
    read = [content(item) for item in items]
    for item in untouched:
        assert item in read, f"a record that nothing was done to is lost: {item}"
    return "some refused" if refused else "all read"


def check_random(seed, number, folder):
    """Random bytes as every kind of file. Returns counts of outcomes."""
    rng, counts = random.Random(seed), Counter()
    for i in range(number):
        data = random_bytes(rng)
        names = (
            ["a.jsonl"]
            + ["a.json", "a.txt", "a.jsonl.gz"] * (i % 5 == 0)
            + ["b.jsonl.gz", "a.json.gz", "a.parquet"] * (i % 20 == 0)
        )
        for name in names:
            path = folder / name
            path.write_bytes(gzip.compress(data, 1) if name in ("a.jsonl.gz", "a.json.gz") else data)
            rows = sum(bool(line.strip()) for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
            for kind in READERS:
                counts[check_records(kind, path, rows if ".jsonl" in name else None, [])] += 1
    return counts


def check_mutated(seed, number, folder):
    """Files of valid records in which one was changed. Returns counts of outcomes."""
    rng, counts = random.Random(seed), Counter()
    for i in range(number):
        kind = rng.choice(list(READERS))
        records = rng.sample(VALID[kind], k=4)
        at = rng.randrange(4)
        lines = [json.dumps(record, ensure_ascii=False).encode() for record in records]
        good = folder / "good.jsonl"
        good.write_bytes(b"\n".join(lines[:at] + lines[at + 1 :]))
        untouched = [content(item) for item in READERS[kind](str(good))]
        lines[at] = mutated(rng, records[at])
        data = rng.choice([b"\n", b"\r\n", b"\n\n"]).join(lines) + rng.choice([b"", b"\n"])
        rows = sum(bool(line.strip()) for line in data.split(b"\n"))
        for name in ["a.jsonl"] + ["a.jsonl.gz"] * (i % 4 == 0):
            path = folder / name
            path.write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)
            counts[check_records(kind, path, rows, untouched)] += 1
    return counts


def check_parquet(seed, number, folder):
    """Parquet files whose bytes, or one of whose values, were changed. Returns counts of outcomes."""
    rng, counts = random.Random(seed), Counter()
    rows = [{"prompt": f"问 {i}", "chosen": "好" * (1 + i % 5), "rejected": "坏", "margin": i / 7} for i in range(50)]
    path = folder / "a.parquet"
    for i in range(number):
        table = pyarrow.Table.from_pylist(rows)
        if i % 2:
            column = rng.randrange(4)
            values = [rng.choice(ODD[2:8]) if rng.random() < 0.1 else row for row in table.column(column).to_pylist()]
            with contextlib.suppress(pyarrow.ArrowException, OverflowError):  # what Parquet cannot hold
                table = table.set_column(column, table.column_names[column], pyarrow.array(values))
        parquet.write_table(table, path, compression=rng.choice(["snappy", "none", "zstd"]), row_group_size=20)
        if i % 2:
            counts[check_records("rankings", path, len(rows), [])] += 1
            continue
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice([1, 3, 20])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        for kind in READERS:
            counts[check_records(kind, path, None, [])] += 1
    return counts


SETTINGS = {
    SFTConfig: {"model": "m", "data": "d.jsonl", "output": "o"},
    RewardConfig: {"model": "m", "data": "d.jsonl", "output": "o", "offset_data": "e.jsonl"},
    DPOConfig: {"model": "m", "data": "d.jsonl", "output": "o", "beta": 0.2},
    KTOConfig: {"model": "m", "data": "d.jsonl", "output": "o", "desirable_weight": 1.3},
    PPOConfig: {"model": "m", "data": "d.jsonl", "output": "o", "rewards": ["rule:digits"], "reward_weights": [1.0]},
    GRPOConfig: {
        "model": "m", "data": "d.jsonl", "output": "o", "rewards": ["model:r"], "selection_rewards": ["rule:digits"],
    },
    OnlineDPOConfig: {
        "model": "m", "data": "d.jsonl", "output": "o", "rewards": ["judge:http://localhost:1/v1#m"],
        "judge_mode": "pairwise",
    },
    BestOfNConfig: {"model": "m", "data": "d.jsonl", "rewards": ["rule:digits"], "n": 4},
    ServeRewardConfig: {"model": "m", "port": 0},
    ChatConfig: {"model": "m", "system_prompt": "简短"},
}  # fmt: skip
ODD_SETTINGS = [
    "~", "~nosuchuser7/x", "-1", "--overwrite", "-x", "1e400", "-1e400", ".nan", ".inf", "9" * 310, "9" * 5000, "1e-5", "yes",
    "no", "010", "12:30", "null", "''", '"\\0"', '"\\ud800"', '"\\x1b[31m"', "[]", "[1, 2]", "[[1]]", "{a: 1}", "&a [*a]",
    "!!python/object/apply:os.system ['true']", "!!binary aGk=", "[" * 500, "'", "*x", "|", "2024-02-17", "你好", "a=b",
    "0x1f", "1_000", "'null'", "%", "\t", "@a", "`a", "http://[", "http://u:p@h/?t=1", "python:a", "model:", "rule:",
    "rule:regex:(", "judge:", "judge:http://h/v1", "judge:http://u:p@h/v1#模型",
    "cuda:99", "1" * 60_000,
]  # fmt: skip


def settings_text(rng, config_class):
    """A YAML file of settings of which some are odd."""
    fields = [field.name for field in dataclasses.fields(config_class)]
    text = yaml.safe_dump(SETTINGS[config_class], allow_unicode=True)
    for _ in range(rng.choice([1, 1, 2, 4])):
        key = (
            rng.choice(fields)
            if rng.random() < 0.85
            else rng.choice(["help", "h", "x y", "a=b", "--steps", "", "no_overwrite"])
        )
        text = "".join(line + "\n" for line in text.split("\n") if not line.startswith(f"{key}:") and line)
        text += f"{key}: {rng.choice(ODD_SETTINGS)}\n"
    data = bytearray(text.encode())
    if rng.random() < 0.25:
        for _ in range(rng.choice([1, 5])):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def check_settings(seed, number, folder):
    """Files of settings: a configuration that its own YAML repeats, or a message. Returns counts of outcomes."""
    rng, counts = random.Random(seed), Counter()
    for _ in range(number):
        config_class = rng.choice(list(SETTINGS))
        path = folder / "settings.yaml"
        path.write_bytes(settings_text(rng, config_class))
        began = time.monotonic()
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
            try:
                config = parse(config_class, [str(path)], prog="heedful test")
            except ConfigError:
                status = 2
            except SystemExit as stopped:
                status = stopped.code
            else:
                status = None
        assert time.monotonic() - began < LONGEST
        if status is not None:
            assert status == 2, path.read_bytes()
            assert "Traceback" not in said.getvalue()
            counts["refused"] += 1
            continue
        (folder / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
        assert parse(config_class, [str(folder / "again.yaml")], prog="heedful test") == config
        counts["accepted"] += 1
    return counts


RUNS = {
    "random bytes": (check_random, 300, 10_000),
    "one record of four changed": (check_mutated, 150, 2000),
    "changed Parquet files": (check_parquet, 30, 600),
    "settings": (check_settings, 40, 2100),
}
"""What is tried, how many in the suite, and how many in the long run."""


@pytest.mark.parametrize("name", RUNS)
def test_nothing_breaks_or_is_lost(name, tmp_path):
    check, few, _ = RUNS[name]
    counts = check(1, few, tmp_path)
    assert counts.total() >= few


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_nothing_breaks_or_is_lost_in_many(name, tmp_path):
    check, _, many = RUNS[name]
    assert check(0, many, tmp_path).total() >= many


def test_a_lost_record_would_be_noticed(tmp_path, monkeypatch):
    """Negative control: a reader that leaves out the last record, or does not say which it refused, fails."""
    monkeypatch.setitem(READERS, "prompts", lambda path, refused: read_prompts(path, refused=refused)[:-1])
    monkeypatch.setitem(READERS, "rankings", lambda path, refused: read_rankings(path, refused=[]))
    monkeypatch.setattr(sys.modules[__name__], "VALID", VALID | {"demonstrations": VALID["prompts"]})
    for kind in ("prompts", "rankings"):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in [*VALID[kind], {"x": 1}]), encoding="utf-8")
        with pytest.raises(AssertionError, match="rows in"):
            check_records(kind, path, len(VALID[kind]) + 1, [])


def write():
    """Make the long runs and print a row for each."""
    print("| what | cases | reads | outcome | s |\n|---|---|---|---|---|")
    for name, (check, _, many) in RUNS.items():
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            counts = check(0, many, Path(folder))
        found = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(counts.items()))
        print(f"| {name} | {many:,} | {counts.total():,} | {found} | {time.perf_counter() - began:.0f} |", flush=True)


if __name__ == "__main__":
    write()
