"""Long learning runs: every seed, critic and shape learns, and the first-steps recipe does what the README says."""

import json
import math
from pathlib import Path

import pytest

from heedful import PPOConfig, WinRateConfig, evaluate_win_rate, train_ppo
from heedful.cli.main import main

pytestmark = pytest.mark.exhaustive
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("architecture", ["gpt2", "qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("seed", range(3))
def test_ppo_raises_the_share_of_a_letter(tiny, prompts, share_of_a, tmp_path, architecture, critic, seed):
    config = PPOConfig(
        model=tiny(architecture), data=prompts, output=tmp_path / "run", critic=critic, seed=seed, eval_fraction=0.3,
        steps=100, rollout_batch_size=64, samples_per_prompt=16, minibatch_size=32, micro_batch_size=32,
        max_new_tokens=12, response_length="fixed", learning_rate=2e-3, value_learning_rate=1e-2, kl_coef=0.0,
        entropy_coef=0.02, sample_every=0, eval_every=0, dtype="float32",
    )  # fmt: skip
    summary = train_ppo(config, rewards=[share_of_a])
    first, last = (summary[name]["eval/score_mean"] for name in ("first_evaluation", "last_evaluation"))
    assert last - first >= 0.3


@pytest.mark.parametrize("seed", range(3))
def test_the_first_steps_make_a_model_polite(tmp_path, monkeypatch, seed):
    """Half the demonstrations are polite. Preferring that half costs log 2 = 0.69 nats, and little more is spent."""
    monkeypatch.chdir(tmp_path)
    recipes = ROOT / "recipes" / "first"
    for name in ("demonstrations", "preferences"):
        target = tmp_path / "recipes" / "first" / f"{name}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((recipes / f"{name}.jsonl").read_bytes())
    assert main(["tiny", "--output", "runs/first/tiny", "--seed", str(seed)]) == 0
    for command in ("sft", "reward", "ppo"):
        assert main([command, str(recipes / f"{command}.yaml"), "--seed", str(seed)]) == 0
    lines = Path("runs/first/ppo/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [step for step in map(json.loads, lines) if "reward/score_mean" in step]
    scores, kl = ([step[name] for step in steps] for name in ("reward/score_mean", "reference/kl"))
    assert scores[-1] > scores[0] + 1.0  # sampled: the likeliest answer may be polite before PPO
    summary = json.loads(Path("runs/first/ppo/summary.json").read_text(encoding="utf-8"))
    assert summary["last_evaluation"]["eval/eos_frac"] >= 0.9
    assert sum(kl[-5:]) / 5 < 3 * math.log(2)  # of 320 responses; the evaluation has 28
    judged = {"rewards": ("model:runs/first/reward/final",), "data": "recipes/first/preferences.jsonl"}
    models = {"model": "runs/first/ppo/final", "baseline": "runs/first/sft/final"}
    result = evaluate_win_rate(WinRateConfig(**models, **judged, max_new_tokens=48, temperature=1.0))
    assert result["win_rate"] >= 0.6
