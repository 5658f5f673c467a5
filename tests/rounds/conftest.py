"""Prompts on disk."""

import pytest


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
