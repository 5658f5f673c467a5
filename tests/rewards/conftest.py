"""Completions to score, and tiny models to score them with."""

import pytest
import torch

from heedful.rewards import Completion
from heedful.types import Message, Prompt


@pytest.fixture
def completions():
    """Three answers to raw-text prompts, with two columns."""
    answers = [("一加一等于几？", "等于2。"), ("苹果是什么颜色？", "红色"), ("say hi", "你好")]
    return [
        Completion(
            Prompt(q, f"数据.jsonl:{i}", {"expected": a[-2:], "难度": i, "weights": i}),
            a,
            ids=(i, i + 1),
            truncated=i == 3,
        )
        for i, (q, a) in enumerate(answers, 1)
    ]


@pytest.fixture
def chat():
    """One answer in a conversation."""
    turns = (Message("system", "简短"), Message("user", "你好"))
    return Completion(Prompt(turns, "chat.jsonl:7"), "您好！", ids=(5,))


@pytest.fixture
def cpu():
    return {"device": torch.device("cpu"), "compute_dtype": torch.float32}
