"""Run folders of PPO, made without training."""

import json

import pytest

from logged_runs import write_rollouts


@pytest.fixture
def log_run(tmp_path, tiny):
    """``log_run(name, steps, responses, **changes)`` is a run folder of PPO with all its responses.

    ``responses`` are (prompt, response) pairs of each step. ``columns`` is False if none was learned from, ``rewards``
    gives the parts of each score, ``episodes`` their turns (`logged_runs.episode`), ``settings`` changes config.yaml.
    """

    def write(name="运行/ppo", steps=3, responses=(("2+2?", "四 4"), ("hi", "hello")), *, columns=True, rewards=None,
              settings=None, algorithm="ppo", alarms=(), samples=(), episodes=()):  # fmt: skip
        folder = tmp_path / name
        (folder / "rollouts").mkdir(parents=True)
        config = {"model": tiny(), "temperature": 1.0, "rewards": ["rule:length"], **(settings or {})}
        (folder / "config.yaml").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
        environment = {"command": f"heedful {algorithm}", "seed": 0, "data": {"prompts.jsonl": "ab" * 32}}
        environment |= {"models": {config["model"]: "cd" * 32}, "versions": {"torch": "2.0"}}
        (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
        lines = [{"step": 0, "eval/score_mean": 0.5, "eval/kl": 0.0}]
        lines += [
            {"step": s, "reward/score_mean": s / 2, "reference/kl": 0.1 * s, "rollout/eos_frac": 1.0, "policy/entropy": 1.0,
             "policy/approx_kl": 0.01 * s, "policy/ratio_max": 1.0 + s, "time/rollout": 60.0, "rollout/response_length": 5.0}
            for s in range(1, steps + 1)
        ]  # fmt: skip
        for file, records in (("metrics", lines), ("alarms", alarms), ("samples", samples)):
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in records)
            if records:
                (folder / f"{file}.jsonl").write_text(text, encoding="utf-8")
        for step in range(1, steps + 1):
            write_rollouts(folder, step, responses, columns=columns, rewards=rewards, episodes=episodes)
        return folder

    return write
