"""Columns of text that nothing reads are named once at the start, with what would read them; advice loses nothing."""

import pytest

from heedful import DataError
from heedful.data import read_demonstrations, read_prompts, read_rankings

ALPACA = {"instruction": "翻译", "input": "你好", "output": "hello", "system": "简短", "history": [["一", "二"]]}
TURNS = [{"role": "user", "content": "问"}, {"role": "assistant", "content": "答"}]


UNREAD = [
    (read_demonstrations, ALPACA, "prompt=instruction,completion=output",
     ["not read: `input`, `system`, `history`. Without --columns the file is read as alpaca, with `input`"]),
    (read_prompts, ALPACA, "prompt=instruction",
     ["beside the prompt: `input`", "Reward functions receive them. Without --columns the file is read as alpaca"]),
    (read_prompts, {"prompt": "问", "answer": "答"}, "", ["beside the prompt: `answer`. Reward functions receive them"]),
    (read_demonstrations, {"messages": TURNS, "system": "简短", "id": "a1"}, "",
     ["not read: `system`, `id`. --columns conversations=messages reads `system` as the system message"]),
    (read_rankings, {"system": "简短", "prompt": "问", "chosen": "好", "rejected": "坏"}, "",
     ["not read: `system`. --columns question=prompt reads `system` as the system message"]),
    (read_demonstrations, {"prompt": "问", "completion": "答", "messages": TURNS}, "",
     ["not read: `messages`. --columns messages=messages reads `messages` instead"]),
    (read_demonstrations,
     {"messages": [{**TURNS[0], "msg_id": "a", "created_at": 3}, {**TURNS[1], "score": 0.5, "human_rating": 4}]}, "",
     ["not read in messages: `msg_id`, `created_at`, `score`, `human_rating`"]),
]  # fmt: skip


def test_the_line_at_the_start(written, capsys):
    for read, record, columns, parts in UNREAD:
        path = written("数据.jsonl", [record] * 3)
        read(path, columns=columns)
        said = capsys.readouterr().err.splitlines()
        (line,) = [line for line in said if not line.startswith(f"heedful: {path}: read as ")]
        assert line.startswith(f"heedful: {path}: ")
        assert [part for part in parts if part not in line] == [], line


ADVICE = [
    (read_demonstrations, {**ALPACA, "output": None, "answer": "好"}, "output=answer"),
    (read_demonstrations, {"system": "简短", "prompt": "问", "completion": "答"},
     "question=prompt,response=completion"),
    (read_rankings, {"system": "简短", "prompt": "问", "chosen": "好", "rejected": "坏"}, "question=prompt"),
]  # fmt: skip


def test_the_advice_reads_it(written, capsys):
    """Following it, nothing is named any more."""
    for read, record, columns in ADVICE:
        path = written("数据.jsonl", [record])
        found = read(path, columns=columns)[0]
        assert found.prompt[0].content == "简短"
        assert "not read" not in capsys.readouterr().err


def test_the_advice_of_an_error_loses_nothing(written):
    """Only the answer has another name, so only that is renamed; what would not be read is named."""
    record = {name: value for name, value in ALPACA.items() if name != "output"} | {"answer": "hello"}
    with pytest.raises(DataError, match=r"Perhaps: --columns output=answer$"):
        read_demonstrations(written("一.jsonl", [record]))
    record = {"question": "问", "answer": "答", "hint": "提示"}
    with pytest.raises(DataError, match=r"completion=answer \(raw text\), which does not read `hint`$"):
        read_demonstrations(written("二.jsonl", [record]))


def test_two_formats_are_refused_and_each_can_be_chosen(written):
    shared = [{"from": "human", "value": "甲"}, {"from": "gpt", "value": "乙"}]
    path = written("数据.jsonl", [{"conversations": shared, "messages": TURNS}])
    with pytest.raises(DataError, match=rf"{path}:1: this may be ShareGPT or `messages`") as caught:
        read_demonstrations(path)
    for columns, answer in (("conversations=conversations", "乙"), ("messages=messages", "答")):
        assert f"--columns {columns}" in str(caught.value)
        assert read_demonstrations(path, columns=columns)[0].response == answer


def test_pairs_of_alpaca_in_two_places(written):
    both = {"instruction": "问", "output": ["甲", "乙"], "chosen": "好", "rejected": "坏"}
    path = written("数据.jsonl", [both])
    with pytest.raises(DataError, match=r"this may be alpaca pairs or alpaca pairs in `output`") as caught:
        read_rankings(path)
    for name, columns, best in (
        ("alpaca pairs", "chosen=chosen,rejected=rejected", "好"),
        ("alpaca pairs in `output`", "output=output", "甲"),
    ):
        assert f"{name} by --columns {columns}" in str(caught.value)
        assert read_rankings(path, columns=columns)[0].responses[0] == best


def test_a_record_of_another_format_is_named_or_counted(written):
    path = written("数据.jsonl", [ALPACA, {"messages": TURNS}, ALPACA])
    with pytest.raises(DataError, match=rf"{path}:2: not alpaca like the other records"):
        read_demonstrations(path)
    refused = []
    assert len(read_demonstrations(path, refused=refused)) == 4
    assert [error.cause for error in refused] == ["not alpaca"]


def test_an_empty_answer_is_a_fault_of_a_demonstration_only(written):
    path = written("数据.jsonl", [ALPACA, {**ALPACA, "output": " "}])
    with pytest.raises(DataError, match=rf"{path}:2: `output` is empty .*\(read as alpaca\)"):
        read_demonstrations(path)
    assert len(read_prompts(path)) == 2


def test_the_format_is_reported_unless_columns_name_it(written, capsys):
    """Who says how a file is read knows it."""
    path = written("数据.jsonl", [{"instruction": "翻译", "ask": "翻译", "output": "hello"}])
    read_demonstrations(path)
    assert "read as alpaca" in capsys.readouterr().err
    read_demonstrations(path, columns="instruction=ask")
    assert "read as" not in capsys.readouterr().err
