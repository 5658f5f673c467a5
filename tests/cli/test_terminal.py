"""What an error quotes from a file cannot give orders to the terminal."""

import json

from heedful.cli.main import main
from heedful.display import harmless


def test_escapes_in_the_place_of_orders(tmp_path, tiny, capsys):
    """OSC 52 would write to the clipboard, CSI recolour or clear; here from a column's name, a folder's and a file's."""
    folder = tmp_path / "一\x1b]52;c;aGk=\x07"
    folder.mkdir()
    data = folder / "\x1b[2J.jsonl"
    data.write_text(json.dumps({"\x1b[31m红\u202e": 1}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert main(["sft", "--model", tiny(), "--data", str(data), "--output", str(tmp_path / "运行")]) == 2
    error = capsys.readouterr().err
    assert "\\x1b]52;c;aGk=\\x07" in error
    assert "\\x1b[31m红\\u202e" in error
    assert not {"\x1b", "\x07", "\u202e"} & set(error)


def test_text_stays_as_it_is():
    text = "第一行\n\t二：é 👩 　\xa0"
    assert harmless(text) == text
    assert harmless("a\x1b[0m\x9b\r\ud800") == "a\\x1b[0m\\x9b\\r\\ud800"
