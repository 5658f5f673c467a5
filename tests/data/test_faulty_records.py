"""Every fault of a data file, and every kind of character: read to the byte, or refused with its place."""

import gzip
import json
import os

import pyarrow
import pytest
from pyarrow import parquet

from heedful import DataError
from heedful.data import read_demonstrations, read_prompts, read_rankings, read_records
from heedful.types import plain_response

READERS = {"demonstrations": read_demonstrations, "rankings": read_rankings, "prompts": read_prompts}
GOOD = {
    "demonstrations": {"prompt": "问", "completion": "答"},
    "rankings": {"prompt": "问", "chosen": "好", "rejected": "坏"},
    "prompts": {"prompt": "问", "expected": "1"},
}
each_reader = pytest.mark.parametrize("kind", READERS)
FORMATS = ("jsonl", "jsonl.gz", "json", "parquet")


def write(folder, ending, rows):
    """A file with these records, in one of the formats."""
    path = folder / f"数据.{ending}"
    if ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif ending == "json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    else:
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    return str(path)


# Files ----------------------------------------------------------------------------------------------------------------


@each_reader
@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (os.mkfifo, ["not a regular file (a pipe or a device)", "Write it to a file first"]),
        (lambda p: p.mkdir(), ["a folder without data files", "It holds nothing", "Name one file"]),
        (lambda p: p.symlink_to(p), ["a symbolic link to", "which leads nowhere", "Give the file itself"]),
        (lambda p: p.symlink_to(p.parent / "没有"), ["a symbolic link to", "没有", "which leads nowhere"]),
        (lambda p: p.write_bytes(b""), ["the data set is empty", "at least one record"]),
        (lambda p: p.write_bytes(b"\xef\xbb\xbf"), ["the data set is empty", "at least one record"]),
        (lambda p: p.write_bytes(b"\n \r\n\n"), ["the data set is empty", "at least one record"]),
    ],
    ids=["FIFO", "folder", "loop", "broken link", "0 bytes", "BOM only", "blank lines only"],
)
def test_files_that_hold_no_records(tmp_path, kind, make, fragments):
    path = tmp_path / "数据.jsonl"
    make(path)
    with pytest.raises(DataError) as caught:
        READERS[kind](str(path))
    for fragment in [str(path), *fragments]:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "path", ["x" * 300 + ".jsonl", "a\0b.jsonl", "~nosuchuser7/a.jsonl", "/" + "x/" * 3000 + "a.jsonl"]
)
def test_names_that_no_file_can_have(path):
    with pytest.raises(DataError):
        read_prompts(path)


def test_a_link_to_a_file_is_the_file(tmp_path):
    path = write(tmp_path, "jsonl", [GOOD["prompts"]])
    (tmp_path / "链接.jsonl").symlink_to(path)
    assert len(read_prompts(str(tmp_path / "链接.jsonl"))) == 1


# Lines ----------------------------------------------------------------------------------------------------------------


@each_reader
@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        (b'{"prompt": "a",}', ["not JSON", "column", "near", "one whole JSON object per line"]),
        (b'{"prompt": "a", "comp', ["not JSON", "Unterminated string", "near"]),
        (b"\xff\xfe{}", ["not UTF-8", "byte 0xff at byte 1", "iconv"]),
        (b'{"prompt": "\xed\xa0\xbd"}', ["not UTF-8", "byte 0xed"]),
        (b'{"prompt": NaN}', ["found NaN", "must be finite"]),
        (b'{"prompt": [Infinity]}', ["found Infinity", "must be finite"]),
        (b'{"margin": -1e400}', ["margin is -inf", "must be finite"]),
        (b'{"prompt": "a", "prompt": "a"}', ["'prompt' appears twice", "Keep one"]),
        (b'{"prompt": "\\ud800"}', ["prompt holds a lone surrogate", "repair it there"]),
        (b'{"\\ud800": 1}', ["a key in the record holds a lone surrogate"]),
        (b"[" * 900 + b"]" * 900, ["found a JSON list of lists", "must be an object"]),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", ["nested too deeply, more than 100 levels"]),
        (b'{"a": ' * 900 + b"1" + b"}" * 900, ["nested too deeply, more than 100 levels"]),
        (b'{"prompt": ' + b"[" * 100_000, ["nested too deeply"]),
        (b'{"n": ' + b"1" * 5000 + b"}", ["integer string conversion"]),
        (b"17", ["found a JSON integer", "must be an object"]),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_bad_line_is_named(tmp_path, kind, line, fragments, ending):
    """Its file and line; the good lines around it do not hide it, nor does --unusable drop."""
    good = json.dumps(GOOD[kind]).encode()
    data = b"\xef\xbb\xbf" + good + b"\r\n\r\n" + line + b"\n" + good
    path = tmp_path / f"数据.{ending}"
    path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    for refused in (None, []):
        with pytest.raises(DataError) as caught:
            READERS[kind](str(path), refused=refused)
        for fragment in [f"{path}:3: ", *fragments]:
            assert fragment in str(caught.value)


@each_reader
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n\r\n \n"], ids=["LF", "CRLF", "blank lines"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["no BOM", "BOM"])
def test_ends_of_lines_change_nothing(tmp_path, kind, end, bom):
    path = tmp_path / "数据.jsonl"
    path.write_bytes(bom + end.join([json.dumps(GOOD[kind], ensure_ascii=False).encode()] * 3))
    assert len(READERS[kind](str(path))) == 3


# Records --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "record", "fragments"),
    [
        ("demonstrations", {"prompt": "a"}, ["not a demonstration", "`prompt` (string)", "Accepted"]),
        ("demonstrations", {"prompt": "a", "completion": ""}, ["`completion` is empty"]),
        ("demonstrations", {"prompt": "a", "completion": " \n\u3000"}, ["`completion` is empty"]),
        ("demonstrations", {"prompt": "a", "completion": 5}, ["`prompt` is a string but `completion` is 5 (integer)"]),
        (
            "demonstrations",
            {"prompt": 5, "completion": "a"},
            ["`prompt` is 5 (integer)", "a string or a list of messages"],
        ),
        ("demonstrations", {"prompt": {"role": "user"}, "completion": "a"}, ["`prompt` is", "(object)"]),
        (
            "demonstrations",
            {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]},
            ["both strings, or both"],
        ),
        ("demonstrations", {"prompt": [{"role": "user", "content": {}}], "completion": "a"}, ["prompt[0].content"]),
        ("demonstrations", {"messages": "a"}, ["`messages` is 'a' (string)", "a list of messages"]),
        ("demonstrations", {"messages": []}, ["`messages` is [] (empty list)"]),
        ("demonstrations", {"messages": [["user", "a"]]}, ["`messages[0]` is"]),
        ("demonstrations", {"messages": [{"role": "user", "content": "a", "\x1b[31m": "x"}]}, ["role", "\\x1b[31m"]),
        ("demonstrations", {}, ["not a demonstration", "no columns"]),
        ("rankings", {"prompt": "a", "chosen": "b"}, ["not a preference pair or ranking"]),
        (
            "rankings",
            {"prompt": "a", "chosen": "b", "rejected": None},
            ["not a preference pair or ranking", "`rejected` (null)"],
        ),
        ("rankings", {"prompt": "a", "chosen": "b", "rejected": ""}, ["`rejected` is empty"]),
        ("rankings", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, ["`margin` is '1' (string)"]),
        ("rankings", {"prompt": "a", "responses": ["b", "c"], "ranks": [0, 0]}, ["nothing is preferred"]),
        ("rankings", {"prompt": "a", "responses": ["b", "c"], "ranks": [0, 1.5]}, ["`ranks` is", "integers"]),
        ("rankings", {"prompt": "a", "responses": ["b"], "ranks": [0]}, ["two or more responses"]),
        ("prompts", {"question": "a"}, ["not a prompt", "Perhaps: --columns instruction=question"]),
        ("prompts", {"prompt": ""}, ["`prompt` is empty"]),
        ("prompts", {"prompt": None}, ["not a prompt", "`prompt` (null)"]),
        ("prompts", {"prompt": [], "x": 1}, ["`prompt` is [] (empty list)"]),
        (
            "prompts",
            {"prompt": [{"role": "user", "content": "a"}], "tools": '[{"name": "\\ud800"}]'},
            ["lone surrogate"],
        ),
        ("prompts", {"prompt": [{"role": "user", "content": "a"}], "tools": '[{"name": "f", "x": 1e400}]'}, ["is inf"]),
        ("prompts", {"prompt": [{"role": "user", "content": "a"}], "tools": '[{"name": "f", "name": "g"}]'}, ["twice"]),
        (
            "prompts",
            {"prompt": [{"role": "user", "content": "a"}], "tools": "[" * 900 + "]" * 900},
            ["nested too deeply"],
        ),
        ("prompts", {"prompt": [{"role": "user", "content": "a"}], "tools": "[" * 5000}, ["nested too deeply"]),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_record_that_does_not_fit_is_named_or_counted(tmp_path, kind, record, fragments, ending):
    rows = [GOOD[kind], record, GOOD[kind]]
    path = write(tmp_path, ending, rows)
    place = f"{path}:2: " if ending == "jsonl" else f"{path}: row 2: "
    with pytest.raises(DataError) as caught:
        READERS[kind](path)
    for fragment in [place, *fragments]:
        assert fragment in str(caught.value)
    assert "\x1b" not in str(caught.value)
    refused = []
    assert len(READERS[kind](path, refused=refused)) == 2
    assert [str(error) for error in refused] == [str(caught.value)]


@each_reader
def test_more_columns_than_needed_are_no_fault(tmp_path, kind):
    path = write(tmp_path, "jsonl", [GOOD[kind] | {"id": 7, "来源": {"a": [1, None]}, "": "", "score": -0.5}])
    assert len(READERS[kind](path)) == 1


def test_equal_responses_are_found_with_their_place(tmp_path):
    """chosen == rejected is no fault of the file; --equal-pairs decides, after tokenising."""
    (ranking,) = read_rankings(write(tmp_path, "jsonl", [{"prompt": "a", "chosen": "b", "rejected": "b"}]))
    assert ranking.responses == ("b", "b")


def test_names_of_columns_cannot_reach_the_terminal(tmp_path):
    """Escapes in the place of ESC, bidi overrides and the like; and no message is as long as a column's name."""
    names = ["\x1b]52;c;AAAA\x07", "\u202egnp.exe", "\x9b31m", "n" * 100_000]
    for name in names:
        path = write(tmp_path, "jsonl", [{name: 1}])
        for read in (*READERS.values(), lambda p: read_records(p, columns={"prompt": "x"})):
            with pytest.raises(DataError) as caught:
                read(path)
            assert name not in str(caught.value)
            assert all(c.isprintable() for c in str(caught.value))
            assert len(str(caught.value)) < 1500


# Characters -----------------------------------------------------------------------------------------------------------


CHARACTERS = {
    "line separator": "一\u2028二",
    "paragraph separator": "一\u2029二",
    "next line": "一\x85二",
    "vertical tab, form feed": "一\x0b\x0c二",
    "file separators": "一\x1c\x1d\x1e二",
    "carriage return": "一\r二",
    "CRLF": "一\r\n二",
    "NUL": "一\0二",
    "ESC": "一\x1b[31m二",
    "bidi override": "一\u202e二\u202c",
    "zero width": "一\u200b\u200d\ufeff二",
    "BOM inside": "\ufeff一",
    "emoji ZWJ": "👩\u200d👩\u200d👧\u200d👦",
    "composed": "é",
    "decomposed": "e\u0301",
    "Hangul jamo": "\u1112\u1161\u11ab",
    "four bytes": "𠮷𝄞🐎",
    "private use": "\ue000\uf8ff\U0010fffd",
    "no characters": "\ufffe\uffff\ufdd0",
    "combining first": "\u0301a",
}


@pytest.mark.parametrize("name", CHARACTERS)
@pytest.mark.parametrize("ending", FORMATS)
def test_text_is_read_to_the_byte(tmp_path, name, ending):
    """In every column that is read, in keys, in every format, between records that are not disturbed."""
    text = CHARACTERS[name]
    pairs = [{"prompt": text, "chosen": text + "。", "rejected": text + "！", "key " + text: text}] * 2
    path = write(tmp_path, ending, pairs)
    first, second = read_rankings(path)
    assert (first.prompt, first.responses) == (text, (text + "。", text + "！"))
    assert (second.prompt, second.responses) == (first.prompt, first.responses)
    prompt, _ = read_prompts(path)
    assert (prompt.prompt, prompt.columns["key " + text]) == (text, text)
    path = write(
        tmp_path, ending, [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}]
    )
    (demonstration,) = read_demonstrations(path)
    assert (demonstration.prompt[0].content, plain_response(demonstration.response)) == (text, text)


@pytest.mark.parametrize("name", CHARACTERS)
def test_escapes_mean_what_they_stand_for(tmp_path, name):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": CHARACTERS[name]}) + "\n", encoding="ascii")
    assert read_prompts(str(tmp_path / "a.jsonl"))[0].prompt == CHARACTERS[name]


@pytest.mark.parametrize("name", CHARACTERS)
def test_a_text_file_is_read_to_the_byte(tmp_path, name):
    (tmp_path / "a.txt").write_bytes(f"开头{CHARACTERS[name]}".encode())
    assert read_demonstrations(str(tmp_path / "a.txt"))[0].response == f"开头{CHARACTERS[name]}"
