"""Every fault of a data file, and every kind of character: read to the byte, or refused with its place."""

import gzip
import json
import os

import pytest

from heedful import DataError
from heedful.data import read_demonstrations, read_prompts, read_rankings, read_records
from heedful.types import plain_response
from record_files import write_records
from refusals import refused

READERS = {"demonstrations": read_demonstrations, "rankings": read_rankings, "prompts": read_prompts}
GOOD = {
    "demonstrations": {"prompt": "问", "completion": "答"},
    "rankings": {"prompt": "问", "chosen": "好", "rejected": "坏"},
    "prompts": {"prompt": "问", "expected": "1"},
}
FORMATS = ("jsonl", "jsonl.gz", "json", "parquet")


def write(folder, ending, rows):
    return write_records(folder / f"数据.{ending}", rows)


# Files ----------------------------------------------------------------------------------------------------------------


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
def test_files_that_hold_no_records(tmp_path, make, fragments):
    path = tmp_path / "数据.jsonl"
    make(path)
    with refused(DataError, str(path), *fragments):
        read_prompts(str(path))


def test_names_that_no_file_can_have():
    for path in ("x" * 300 + ".jsonl", "a\0b.jsonl", "~nosuchuser7/a.jsonl", "/" + "x/" * 3000 + "a.jsonl"):
        with refused(DataError, f"{path}: "):
            read_prompts(path)


def test_a_link_to_a_file_is_the_file(tmp_path):
    path = write(tmp_path, "jsonl", [GOOD["prompts"]])
    (tmp_path / "链接.jsonl").symlink_to(path)
    assert len(read_prompts(str(tmp_path / "链接.jsonl"))) == 1


# Lines ----------------------------------------------------------------------------------------------------------------

BAD_LINES = [
    ('{"prompt": "甲",, "n": 2}'.encode(), ["not JSON", "column 16", 'near \'{"prompt": "甲",, ', "one whole JSON"]),
    (b'{"prompt": "cut', ["not JSON", "Unterminated string", "column 12", "near", "cut"]),
    (b'{"a": 1} {"b": 2}', ["not JSON", "Extra data", "column 10"]),
    (b"{", ["not JSON", "column 2", "a .json file holds one list"]),
    (b"\xff\xfe{}", ["not UTF-8", "byte 0xff at byte 1", "iconv"]),
    ("你好".encode("gb18030"), ["not UTF-8", "byte 0xc4", "at byte 1 of the line", "iconv"]),
    (b'{"prompt": "\xe4\xbd"}', ["not UTF-8", "byte 0xe4", "at byte 13 of the line", "Save the file as UTF-8"]),
    (b'{"prompt": "\xed\xa0\xbd"}', ["not UTF-8", "byte 0xed"]),
    (b"\xef\xbb\xbf{}", ["not JSON", "BOM"]),
    (b'["prompt"]', ["found a JSON list of strings", "must be an object"]),
    (b'"prompt"', ["found a JSON string", "must be an object"]),
    (b"null", ["found a JSON null", "must be an object"]),
    (b"17", ["found a JSON integer", "must be an object"]),
    (b'{"prompt": "a", "prompt": "b"}', ["the key 'prompt' appears twice", "Keep one"]),
    (b'{"m": [{"role": "user", "role": "user"}]}', ["the key 'role' appears twice"]),
    (b'{"margin": NaN}', ["found NaN", "Numbers must be finite", "null"]),
    (b'{"margin": [-Infinity]}', ["found -Infinity", "Numbers must be finite"]),
    (b'{"m": {"margin": 1e400}}', ["m.margin is inf", "Numbers must be finite"]),
    (b'{"prompt": "\\ud83d"}', ["prompt holds a lone surrogate", "'\\ud83d'", "repair it"]),
    (b'{"m": [{}, {"content": "a\\udc00"}]}', ["m[1].content holds a lone surrogate", "'a\\udc00'"]),
    (b'{"m": [{"\\udc00": 1}]}', ["a key in m[0] holds a lone surrogate", "'\\udc00'"]),
    (b'{"\\ud800": 1}', ["a key in the record holds a lone surrogate"]),
    (b"[" * 900 + b"]" * 900, ["found a JSON list of lists", "must be an object"]),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", ["nested too deeply, more than 100 levels"]),
    (b'{"a": ' * 900 + b"1" + b"}" * 900, ["nested too deeply, more than 100 levels"]),
    (b'{"a":' * 100_000, ["nested too deeply"]),
    (b'{"prompt": ' + b"[" * 100_000, ["nested too deeply"]),
    (b'{"n": ' + b"1" * 5000 + b"}", ["integer string conversion"]),
]  # fmt: skip


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_bad_line_is_named(tmp_path, ending):
    """Its file and line; the good lines around it do not hide it, nor does --unusable drop."""
    good, path = json.dumps(GOOD["prompts"]).encode(), tmp_path / f"数据.{ending}"
    for line, fragments in BAD_LINES:
        data = b"\xef\xbb\xbf" + good + b"\r\n\r\n" + line + b"\n" + good
        path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
        for options in ({}, {"refused": []}):
            with refused(DataError, f"{path}:3: ", *fragments):
                read_prompts(str(path), **options)


# Records --------------------------------------------------------------------------------------------------------------

RECORDS = [
    ("demonstrations", {"prompt": "a"}, ["not a demonstration", "`prompt` (string)", "Accepted"]),
    ("demonstrations", {"prompt": {"role": "user"}, "completion": "a"}, ["`prompt` is", "(object)"]),
    ("demonstrations", {"prompt": [{"role": "user", "content": {}}], "completion": "a"}, ["prompt[0].content"]),
    ("demonstrations", {"messages": []}, ["`messages` is [] (empty list)"]),
    ("demonstrations", {"messages": [["user", "a"]]}, ["`messages[0]` is"]),
    ("demonstrations", {"messages": [{"role": "user", "content": "a", "\x1b[31m": "x"}]}, ["role", "\\x1b[31m"]),
    ("rankings", {"prompt": "a", "chosen": "b", "rejected": None}, ["not a preference pair", "`rejected` (null)"]),
    ("prompts", {"prompt": None}, ["not a prompt", "`prompt` (null)"]),
    ("prompts", {"tools": '[{"name": "\\ud800"}]'}, ["lone surrogate"]),
    ("prompts", {"tools": '[{"name": "f", "x": 1e400}]'}, ["is inf"]),
    ("prompts", {"tools": '[{"name": "f", "name": "g"}]'}, ["twice"]),
    ("prompts", {"tools": "[" * 900 + "]" * 900}, ["nested too deeply"]),
    ("prompts", {"tools": "[" * 5000}, ["nested too deeply"]),
]


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_record_that_does_not_fit_is_named_or_counted(tmp_path, ending):
    for kind, wrong, fragments in RECORDS:
        asked = {"prompt": [{"role": "user", "content": "a"}]} if "tools" in wrong else {}
        path = write(tmp_path, ending, [GOOD[kind], asked | wrong, GOOD[kind]])
        with refused(DataError, f"{path}:2: " if ending == "jsonl" else f"{path}: row 2: ", *fragments) as caught:
            READERS[kind](path)
        assert "\x1b" not in str(caught.value)
        counted = []
        assert len(READERS[kind](path, refused=counted)) == 2
        assert [str(error) for error in counted] == [str(caught.value)]


def test_more_columns_than_needed_are_no_fault(tmp_path):
    for kind, read in READERS.items():
        path = write(tmp_path, "jsonl", [GOOD[kind] | {"id": 7, "来源": {"a": [1, None]}, "": "", "score": -0.5}])
        assert len(read(path)) == 1


def test_names_of_columns_cannot_reach_the_terminal(tmp_path):
    """Escapes in the place of ESC, bidi overrides and the like; and no message is as long as a column's name."""
    for name in ("\x1b]52;c;AAAA\x07", "\u202egnp.exe", "\x9b31m", "n" * 100_000):
        path = write(tmp_path, "jsonl", [{name: 1}])
        for read in (*READERS.values(), lambda p: read_records(p, columns={"prompt": "x"})):
            with refused(DataError, path) as caught:
                read(path)
            said = str(caught.value)
            assert name not in said
            assert said.isprintable()
            assert len(said) < 1500


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


@pytest.mark.parametrize("ending", FORMATS)
def test_text_is_read_to_the_byte(tmp_path, ending):
    """In every column that is read, in keys, in every format, one after the other."""
    texts = [*CHARACTERS.values()]
    rows = [{"prompt": text, "chosen": text + "。", "rejected": text + "！"} for text in texts]
    path = write(tmp_path, ending, rows)
    assert [(one.prompt, one.responses) for one in read_rankings(path)] == [(t, (t + "。", t + "！")) for t in texts]
    keys = {"key " + text: text for text in texts}
    (prompt,) = read_prompts(write(tmp_path, ending, [{"prompt": "问"} | keys]))
    assert prompt.columns == keys
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in texts]
    found = read_demonstrations(write(tmp_path, ending, [{"messages": one} for one in turns]))
    assert [(one.prompt[0].content, plain_response(one.response)) for one in found] == [(text, text) for text in texts]


def test_escapes_and_text_files_are_what_they_stand_for(tmp_path):
    for name, text in CHARACTERS.items():
        (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": text}) + "\n", encoding="ascii")
        assert read_prompts(str(tmp_path / "a.jsonl"))[0].prompt == text, name
        (tmp_path / "a.txt").write_bytes(f"开头{text}".encode())
        assert read_demonstrations(str(tmp_path / "a.txt"))[0].response == f"开头{text}", name
