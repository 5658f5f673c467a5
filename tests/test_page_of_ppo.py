"""What the page of PPO promises: how far `backward()` is from the loop, and that the README has the loop of the example."""

import ast
import json
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from heedful import PPOConfig, make_tiny_model, train_ppo
from heedful.algorithms import ppo

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "heedful"
PAGE = Path(ppo.__file__)


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
    loop = names.index("run_online")
    assert names[loop:] == ["run_online", "learn", "backward_minibatch"]
    assert {frame.filename for frame in seen[loop + 1 :]} == {str(PAGE)}
    way = {"make_experience", "learn", "backward_minibatch", "policy_loss"}
    inner = [node for node in ast.parse(PAGE.read_text(encoding="utf-8")).body if getattr(node, "name", "") in way]
    assert len(inner) == len(way)
    assert [ast.unparse(node) for function in inner for node in closures(function)] == []


def closures(function):
    """Functions inside a function."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return [node for node in ast.walk(function) if isinstance(node, kinds) and node is not function]


def loop_of_the_readme():
    return (
        (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- PPO by hand -->\n```python\n")[1].split("```")[0]
    )


def test_the_loop_of_the_readme_is_that_of_the_example():
    """Line by line, from the rollout to the optimizer's step."""
    example = (ROOT / "examples" / "ppo_by_hand.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in loop_of_the_readme().split("for step in range(train_steps):\n")[1].splitlines()]
    theirs = [line.strip() for line in example.split("for step in range(train_steps):\n")[1].splitlines()]
    assert lines[:-1] == theirs[: len(lines) - 1]
    assert lines[-2] == "optimizer.step()"


@pytest.mark.exhaustive  # the example, whose loop it is, runs in the suite
def test_the_loop_of_the_readme_runs_and_learns(tmp_path):
    command = [sys.executable, "-c", loop_of_the_readme()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    rewards = [float(line.split("rm_reward=")[1]) for line in done.stdout.splitlines()]
    assert len(rewards) == 40
    assert sum(rewards[-5:]) > sum(rewards[:5])
