"""Small data sets, tiny models, and a run of each trainer."""

import json
from pathlib import Path

import pytest

FACTS = {
    "你好": "您好！",
    "2+2?": "4",
    "hello": "hi there",
    "name a colour": "blue",
    "bye": "see you",
}


def write_jsonl(path: Path, records) -> str:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.fixture
def passes():
    """Rows and tokens (rows times the longest) of every pass through a policy, a value model or a reward model."""

    def watch(model):
        seen = []

        def note(_, args):
            is_reward_model = len(args) == 1
            lengths = [len(row["input_ids"]) for row in args[0]] if is_reward_model else args[1].sum(dim=1).tolist()
            seen.append((len(lengths), len(lengths) * max(lengths)))

        model.register_forward_pre_hook(note)
        return seen

    return watch


@pytest.fixture
def demonstrations(tmp_path):
    """Five pairs of a conversation's question and answer."""
    return write_jsonl(
        tmp_path / "demonstrations.jsonl",
        [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in FACTS.items()
        ],
    )


@pytest.fixture
def prompts(tmp_path):
    """Raw-text prompts, Chinese among them."""
    words = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "苹果", "梨"]
    return write_jsonl(
        tmp_path / "prompts.jsonl", [{"prompt": f"say {word}", "number": i} for i, word in enumerate(words)]
    )
