"""A model whose chat template loops is refused by every command that could render it, wherever the model is named."""

import json
import shutil

import pytest

from heedful.data import sandbox

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
PAIRS, PROMPTS, SFT = ("--data", "{pairs}"), ("--data", "{prompts}"), ("--data", "{sft}")
DIGITS, RUN = ("--rewards", "rule:digits"), ("--output", "{run}")
SMALL = ("--rollout-batch-size=2", "--minibatch-size=2", "--max-new-tokens=4", "--eval-fraction=0", "--dtype=float32")
JUDGE = ("--selection-rewards", "model:{loops}", "--eval-data", "{prompts}")
COMMANDS = {
    "sft": ("sft", *SFT, *RUN, "--model", "{loops}"),
    "reward": ("reward", *PAIRS, *RUN, "--model", "{loops}", "--batch-size", "2"),
    "dpo": ("dpo", *PAIRS, *RUN, "--model", "{loops}"),
    "ppo": ("ppo", *PROMPTS, *RUN, *DIGITS, *SMALL, "--model", "{loops}"),
    "a reward of ppo": ("ppo", *PROMPTS, *RUN, *SMALL, "--model", "{good}", "--rewards", "model:{loops}"),
    "a judge of ppo": ("ppo", *PROMPTS, *RUN, *SMALL, *DIGITS, "--model", "{good}", *JUDGE),
    "perplexity": ("evaluate", "perplexity", *SFT, "--model", "{loops}"),
    "scores": ("evaluate", "scores", *PROMPTS, *DIGITS, "--model", "{loops}"),
    "win-rate": ("evaluate", "win-rate", *PROMPTS, *DIGITS, "--model", "{good}", "--baseline", "{loops}"),
    "kl": ("evaluate", "kl", *PROMPTS, "--model", "{loops}", "--reference", "{good}"),
    "best-of-n": ("evaluate", "best-of-n", *PROMPTS, *DIGITS, "--model", "{loops}"),
    "accuracy": ("evaluate", "accuracy", *PAIRS, "--reward-model", "{loops}"),
    "serve-reward": ("serve-reward", "--port", "0", "--model", "{loops}"),
    "chat": ("chat", "--model", "{loops}"),
}


@pytest.fixture
def places(tmp_path, tiny, written, heedful):
    """Data, a good model, and a reward model whose template loops, which is also a language model."""
    question = [{"role": "user", "content": "你好"}]
    rows = {
        "sft": {"prompt": question, "completion": "好"},
        "pairs": {"prompt": question, "chosen": "好", "rejected": "坏"},
        "prompts": {"prompt": question},
    }
    found = {name: written(f"{name}.jsonl", [row] * 4) for name, row in rows.items()}
    words = ("--data", found["pairs"], "--batch-size=2", "--max-steps=1", "--eval-fraction=0", "--sample-every=0")
    outcome = heedful("reward", "--model", tiny("qwen3"), "--output", tmp_path / "评分", *words)
    assert outcome.status == 0, outcome.err
    found |= {"good": tiny("qwen3"), "loops": str(tmp_path / "圈"), "run": str(tmp_path / "运行")}
    shutil.copytree(tmp_path / "评分" / "final", found["loops"])
    (tmp_path / "圈" / "chat_template.jinja").write_text(LOOP, encoding="utf-8")
    return found


@pytest.mark.exhaustive
def test_every_command_refuses_it(places, heedful, monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    for name, words in COMMANDS.items():
        outcome = heedful(*(word.format(**places) for word in words))
        assert outcome.status == 2, f"{name}: {outcome.err}"
        assert "did not render a conversation of 1 message within 0.5 seconds: it probably loops" in outcome.message, (
            name
        )
        assert "Traceback" not in outcome.err
        assert not (tmp_path / "运行").exists()
    assert json.loads((tmp_path / "圈" / "config.json").read_text(encoding="utf-8"))
