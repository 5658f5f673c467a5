"""Tables of samples: readable at their width, whatever the language, and with nothing that a terminal would obey."""

import fcntl
import io
import json
import os
import runpy
import subprocess
import sys
import termios
import unicodedata

import pytest
from rich.cells import cell_len
from rich.console import Console

from heedful.display import Display, harmless, print_table, say, shown, silence
from jsonl import write_jsonl


def printed(rows, width):
    file = io.StringIO()
    print_table(Console(file=file, width=width), "", rows)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 100])
def test_a_table_keeps_to_its_width(width):
    """A Chinese character takes two columns."""
    row = {
        "prompt": "请说大的反义词。" * 4,
        "SFT answer": "当然，是小。" * 9,
        "SFT reward": -12.345,
        "PPO answer": "x" * 70,
    }
    lines = printed([row], width)
    assert {cell_len(line) for line in lines} == {width}
    table = "\n".join(lines)
    for text in ("请", "反", "当然", "x", "-12.35"):
        assert text in table
    assert sum(line.count("x") for line in lines) == 70


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.126, "0.13"),
        (-0.001, "0.00"),
        (-1.5, "-1.50"),
        (3, "3"),
        ("a\nb\x1b[1m", "a\\nb\\x1b[1m"),
        ("[red]好", "[red]好"),
    ],
)
def test_values_as_text(value, text):
    assert shown(value) == text
    assert shown("长" * 301) == "长" * 299 + "…"


def has_commands(text):
    return any(unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" for c in text)


def test_a_text_of_unknown_origin_commands_no_terminal():
    """It keeps everything else, also what joins the parts of an emoji."""
    text = "好\n\ta👨\u200d👩 \u2028é"
    assert harmless(text) == text
    clipboard = "\x1b]52;c;aGk=\x07"
    assert harmless(clipboard) == "\\x1b]52;c;aGk=\\x07"
    for number in [*range(0x100), 0xD800, 0xDFFF]:
        assert not has_commands(harmless(chr(number))), number


@pytest.mark.exhaustive
def test_errors_and_answers_command_no_terminal(tiny, tmp_path):
    """A key of a record that sets the clipboard; and a random model, whose every fourth byte is a control character."""
    data = tmp_path / "数据.jsonl"
    data.write_text(json.dumps({"prompt": [{"\x1b]52;c;aGk=\x07": 1}], "completion": "a"}) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "heedful"]
    sft = ["sft", "--model", tiny(), "--data", str(data), "--output", str(tmp_path / "run")]
    done = subprocess.run([*command, *sft], capture_output=True, check=False)
    assert (done.returncode, has_commands(done.stderr.decode())) == (2, False), done.stderr
    assert r"\x1b]52;c;aGk=\x07" in done.stderr.decode()
    chat = ["chat", "--model", tiny(), "--raw", "--max-new-tokens", "100", "--device", "cpu"]
    done = subprocess.run([*command, *chat], input=b"a\n", capture_output=True, check=True)
    assert not has_commands(done.stdout.decode())
    assert "\\x" in done.stdout.decode()


@pytest.mark.exhaustive
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_run_goes_on_when_nobody_reads_it_any_more(tiny, tmp_path, unbuffered):
    """As in ``heedful sft ... 2>&1 | head -1``."""
    data = tmp_path / "数据.jsonl"
    write_jsonl(data, [{"prompt": f"{i}", "completion": f"a{i}"} for i in range(60)])
    sft = ["sft", "--model", tiny(), "--data", str(data), "--output", str(tmp_path / "run"), "--max-steps", "3"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "heedful", *sft, "--batch-size", "2", "--device", "cpu"],
        stdout=writing,
        stderr=writing,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    wrong = [
        sys.executable,
        "-m",
        "heedful.cli.main",
        "sft",
        "--model",
        "没有",
        "--data",
        "没有.jsonl",
        "--output",
        str(tmp_path),
    ]
    assert subprocess.run(wrong, stdout=writing, stderr=writing, check=False).returncode == 2
    os.close(writing)


def test_a_run_whose_terminal_is_closed_leaves_a_checkpoint(tiny, forked, tmp_path):
    """The window goes away: SIGHUP, and whatever the run still says cannot be written (EIO)."""
    data, run = tmp_path / "数据.jsonl", tmp_path / "run"
    write_jsonl(data, [{"prompt": f"{i}", "completion": f"a{i}"} for i in range(60)])
    sft = ["sft", "--model", tiny(), "--data", str(data), "--output", str(run), "--max-steps", "100000"]
    sft += ["--batch-size", "2", "--epochs", "100000", "--device", "cpu"]
    ours, theirs = os.openpty()

    def train_in_terminal():
        os.setsid()
        os.close(ours)
        for stream in range(3):
            os.dup2(theirs, stream)
        os.close(theirs)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        sys.argv = ["heedful", *sft]
        runpy.run_module("heedful", run_name="__main__")

    process = forked(train_in_terminal)
    try:
        os.close(theirs)
        metrics = run / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"loss/sft") < 3:
            os.read(ours, 4096)
        os.close(ours)
        process.communicate()
        assert process.returncode == 129
    finally:
        process.kill()
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert (checkpoint / "MANIFEST.json").is_file()
    assert checkpoint.name >= "step-000003"


def test_a_run_inside_silence_shows_nothing_and_the_next_one_does(capsys):
    for _ in range(2):
        with silence(), silence():
            say("inside")
            with Display("sft", 1, {}) as shows:
                shows.update(1, {})
                shows.note("inside")
        assert capsys.readouterr() == ("", "")
    say("outside")
    with Display("sft", 1, {}) as shows:
        shows.update(1, {})
    assert capsys.readouterr().err.splitlines() == ["heedful: outside", "sft 1/1  "]
