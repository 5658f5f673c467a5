"""A user's script with functions and classes in settings passes ``mypy --strict``."""

import subprocess
import sys

import pytest

SCRIPT = """
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import heedful
from heedful import GRPOConfig, PPOConfig


def winner(rewards: Any, config: GRPOConfig) -> Tensor:
    return torch.zeros_like(rewards.per_response)


def loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, *, config: PPOConfig, reduction: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * advantages).sum(), {}


def brief(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [-float(len(one)) for one in completions]


class Mine:
    def __init__(self, policy: heedful.Policy, config: PPOConfig) -> None: ...
    def generate(self, prompts: list[Any]) -> Any: ...
    def update_weights(self, policy: heedful.Policy) -> None: ...
    def close(self) -> None: ...


PPOConfig(model="模型", data="数据.jsonl", policy_loss=loss, advantage=winner, sampler=Mine, selection_rewards=(brief,))
config = GRPOConfig(advantage="rloo", policy_loss="python:损失.py:f", sampler="vllm:http://a:1", kl_coef=0.0)
result = heedful.train_grpo(config, rewards=brief, model="模型", data=["你好"])
result = heedful.train_ppo(config, [brief, "rule:digits"])
"""
WRONG = """
from heedful import PPOConfig

PPOConfig(kl_in="rewards")
PPOConfig(seed="0")
PPOConfig(policy_loss=3)
"""


@pytest.mark.exhaustive  # mypy reads heedful and torch
def test_a_script_is_typed(tmp_path):
    (tmp_path / "脚本.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "错.py").write_text(WRONG, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", "脚本.py", "错.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line.split(":")[0] for line in errors] == ["错.py"] * 3, done.stdout + done.stderr
