"""Prompts on disk, and a round that waits for labels."""

import pytest

from small_rounds import made, quietly, words_of


@pytest.fixture(scope="session")
def words(tiny, tmp_path_factory):
    """The words of a round on a small project (`small_rounds.words_of`)."""
    return words_of(tmp_path_factory.mktemp("设置"), tiny("qwen3"))


@pytest.fixture(scope="session")
def waiting(words, tmp_path_factory):
    """A project whose first round waits for labels, and what the command said. Read-only."""
    folder = made(tmp_path_factory.mktemp("等待") / "标注 项目")
    return folder, quietly("round", folder, *words)


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
