"""Trainers on the command line in this process, and data sets for them."""

import pytest

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
