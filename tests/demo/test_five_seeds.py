"""The demo as it is shipped learns, whatever the seed: by the gold judge, which nothing was trained on."""

import pytest

from heedful import DemoConfig, run_demo

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("seed", range(5))
def test_the_shipped_recipe_makes_a_better_model(tmp_path, seed):
    summary = run_demo(DemoConfig(output=tmp_path / "demo", seed=seed, device="cpu"))
    assert summary["prompts"] >= 256
    assert summary["reward.accuracy"] >= 0.90
    assert summary["ppo.gold"] - summary["sft.gold"] >= 0.25
    assert summary["ppo.win_rate"] >= 0.70
    assert summary["ppo.kl"] <= 20
    assert summary["ppo.eos_frac"] >= 0.95
    assert summary["ppo.empty_frac"] <= 1 / 256
