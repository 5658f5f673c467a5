"""Commands of rounds, and settings of a small one."""

import contextlib
import io
import json

from heedful.cli.main import main

REWARD = "batch_size: 2\nmax_steps: 2\nlearning_rate: 1e-3\neval_every: 1\nsample_every: 0\n"
PPO = "steps: 1\nrollout_batch_size: 2\nminibatch_size: 2\nppo_epochs: 1\nsample_every: 0\n"
SETTINGS = (
    "--labels", "6", "--answers", "3", "--max-new-tokens", "4", "--response-length", "fixed", "--eval-fraction", "0.4",
    "--reward-models", "2", "--random-share", "0.5", "--pool", "2", "--judge", "rule:length:1-2", "--device", "cpu",
    "--dtype", "float32",
)  # fmt: skip


def words_of(folder, policy):
    """The words of a round on a small project, ``heedful round PROJECT`` left out; their files are written into a folder."""
    (folder / "评分.yaml").write_text(REWARD, encoding="utf-8")
    (folder / "策略.yaml").write_text(PPO, encoding="utf-8")
    rows = ({"prompt": f"第{i}个：🦊\u2028{i} + {i} = ?", "难度": i} for i in range(30))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "题.jsonl").write_text(text, encoding="utf-8")
    start = ("--policy", policy, "--prompts", folder / "题.jsonl")
    files = ("--reward-config", folder / "评分.yaml", "--ppo-config", folder / "策略.yaml")
    return [str(word) for word in (*start, *SETTINGS, *files)]


def quietly(*command):
    """What a command printed. It must succeed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main([str(word) for word in command])
    assert status == 0, said.getvalue()
    return said.getvalue()


def made(folder):
    """A new project."""
    quietly("label", "new", folder, "--name", "回合", "--seed", "0")
    return folder
