"""What the page of PPO promises, counted: how far `backward()` is from the loop, what a run imports, who calls core."""

import ast
import json
import traceback
from pathlib import Path

import pytest

from heedful import PPOConfig, make_tiny_model, train_ppo
from heedful.algorithms import ppo

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "heedful"
PAGE = Path(ppo.__file__)
MOST_MODULES, MOST_LINES = 175, 31_500
"""Of heedful, that a PPO run imports. Before the page was written there were 258 and 32,192."""


def config(tmp_path):
    make_tiny_model("gpt2", tmp_path / "tiny", hidden_size=16, max_length=64)
    rows = [{"prompt": prompt} for prompt in ("你好", "say ab", "say cd", "say ef")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return PPOConfig(
        model=str(tmp_path / "tiny"), data=str(tmp_path / "prompts.jsonl"), output=tmp_path / "run", steps=1,
        rewards=("rule:repetition",), rollout_batch_size=4, minibatch_size=4, max_new_tokens=4, eval_fraction=0.0,
    )  # fmt: skip


def test_frames_and_lines_between_the_loop_and_backward(tmp_path, monkeypatch):
    """Two frames of heedful's own are between the loop over steps and the first backward pass, and no closure."""
    seen = []

    class StopError(Exception):
        pass

    def stop(*_, **__):
        seen.extend(frame for frame in traceback.extract_stack() if str(SOURCE) in frame.filename)
        raise StopError

    monkeypatch.setattr("torch.Tensor.backward", stop)
    monkeypatch.setattr(ppo, "learn_values", lambda *_: ({}, []))  # the value head's own epochs come first
    with pytest.raises(StopError):
        train_ppo(config(tmp_path))
    names = [frame.name for frame in seen]
    loop = names.index("train_online")
    assert names[loop:] == ["train_online", "learn", "backward_minibatch"]
    assert {frame.filename for frame in seen[loop:]} == {str(PAGE)}
    way = {"make_experience", "learn", "backward_minibatch", "policy_loss", "critic_loss", "value_loss"}
    inner = [node for node in ast.parse(PAGE.read_text(encoding="utf-8")).body if getattr(node, "name", "") in way]
    assert len(inner) == len(way)
