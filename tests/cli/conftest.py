"""The command line in this process, tiny models, and data sets on disk."""

import json
from pathlib import Path

import pytest

from heedful.cli import main

SHORT = {
    "sft": ["--batch-size", "2", "--max-steps", "1"],
    "reward": ["--batch-size", "2", "--max-steps", "1"],
    "ppo": ["--rollout-batch-size", "2", "--minibatch-size", "2", "--steps", "1", "--ppo-epochs", "1",
            "--max-new-tokens", "4"],
    "a2c": ["--rollout-batch-size", "2", "--steps", "1", "--max-new-tokens", "4"],
    "grpo": ["--rollout-batch-size", "2", "--samples-per-prompt", "2", "--minibatch-size", "2", "--steps", "1",
             "--max-new-tokens", "4"],
    "dpo": ["--batch-size", "2", "--max-steps", "1"],
    "kto": ["--batch-size", "2", "--max-steps", "1"],
}  # fmt: skip


class Outcome:
    """What a command said and how it ended."""

    def __init__(self, status, out, err):
        self.status = status
        self.out = out
        self.err = err
        self.message = " ".join(err.split())
        """Standard error with line breaks and runs of spaces as one space."""


@pytest.fixture
def heedful(capsys):
    """``heedful("sft", "--model", ...)`` runs a command in this process."""

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
    """``written(name, records)`` is the path of a file: JSONL of records, or a text as it is."""

    def write(name, content):
        path: Path = tmp_path / name
        if not isinstance(content, str):
            content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in content)
        path.write_text(content, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def data(written):
    """``data(command)`` is a good data file for a trainer, raw text."""
    questions = [f"第{i}个问题：{i}加{i}等于几？" for i in range(8)]
    records = {
        "sft": [{"prompt": q, "completion": f"等于{2 * i}。"} for i, q in enumerate(questions)],
        "reward": [{"prompt": q, "chosen": f"等于{2 * i}。", "rejected": "不知道"} for i, q in enumerate(questions)],
        "ppo": [{"prompt": q, "expected": str(2 * i)} for i, q in enumerate(questions)],
    }
    records |= {"a2c": records["ppo"], "grpo": records["ppo"], "dpo": records["reward"]}
    records["kto"] = [{**record, "label": i % 2 == 0} for i, record in enumerate(records["sft"])]
    return lambda command: written(f"{command}-数据.jsonl", records[command])


@pytest.fixture
def train(heedful, tiny, data, tmp_path):
    """``train(command, *flags, model=..., data_file=..., output=...)`` runs a trainer for one step on good input.

    Flags come last, so they win; the run goes to ``tmp_path / "运行"`` unless told otherwise.
    """

    def run(command, *flags, model=None, data_file=None, output=None):
        common = [
            "--model",
            model or tiny(),
            "--data",
            data_file or data(command),
            "--output",
            output or tmp_path / "运行",
        ]
        machine = ["--dtype", "float32", "--eval-fraction", "0", "--num-samples", "1"]
        rewards = ["--rewards", "rule:digits"] if command in ("ppo", "a2c", "grpo") and "--rewards" not in flags else []
        return heedful(command, *common, *machine, *SHORT[command], *rewards, *flags)

    return run
