"""The command line in this process, and prompts on disk."""

import json

import pytest

from heedful.cli import main


class Outcome:
    """What a command said and how it ended."""

    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err
        self.message = " ".join(err.split())


@pytest.fixture
def heedful(capsys):
    """``heedful("sample", "--models", ...)`` runs a command in this process."""

    def run(*words):
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as stopped:
            status = stopped.code or 0
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture
def written(tmp_path):
    """``written(name, records)`` is the path of a JSON Lines file."""

    def write(name, records):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
        return path

    return write


@pytest.fixture
def prompts(written):
    """Twelve prompts, raw and conversations, with Chinese, emoji, U+2028 and a column that is kept."""
    texts = ["猫用英文怎么说？", "🦊 line\u2028break", "1 + 1 = ?", "مرحبا"] * 3
    return written(
        "题目.jsonl",
        [
            {"prompt": f"{text} {i}" if i % 2 else [{"role": "user", "content": f"{text} {i}"}], "难度": i}
            for i, text in enumerate(texts)
        ],
    )
