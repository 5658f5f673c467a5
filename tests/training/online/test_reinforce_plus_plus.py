"""REINFORCE++ (Hu 2025): the rewards to come at each token, normalised over the batch, without a critic."""

import pytest
import torch

from heedful import ConfigError, PPOConfig, core, train_ppo
from heedful.algorithms.online.advantages import ADVANTAGES, Rewards
from jsonl import read_metrics

MASK = torch.tensor([[True, True, True], [True, True, False]])
KL = torch.tensor([[0.5, 1.0, -0.5], [2.0, 0.0, 7.0]])
SCORES = torch.tensor([1.0, -1.0])


def config(**settings):
    return PPOConfig(model="m", data="d", output="o", advantage="reinforce++", **settings)


def rewards(kl_coef):
    per_token = core.kl_shaped_rewards(SCORES, KL, torch.zeros_like(KL), MASK, kl_coef=kl_coef)
    return Rewards(per_token, SCORES - kl_coef * torch.where(MASK, KL, 0.0).sum(dim=1), None, MASK)


def test_golden():
    """Score less 0.1 times the KL that is still to come: 1 - 0.1 (0.5 + 1 - 0.5), 1 - 0.1 (1 - 0.5), 1 + 0.05; -1.2, -1."""
    advantages, returns = ADVANTAGES["reinforce++"](rewards(0.1), config())
    assert returns is None
    torch.testing.assert_close(advantages, torch.tensor([[0.9, 0.95, 1.05], [-1.2, -1.0, 0.0]]))


def test_golden_with_a_discount():
    """gamma 1/2, no KL: the score halves with each token before the last."""
    advantages, _ = ADVANTAGES["reinforce++"](rewards(0.0), config(gamma=0.5))
    torch.testing.assert_close(advantages, torch.tensor([[0.25, 0.5, 1.0], [-0.5, -1.0, 0.0]]))


def test_it_is_gae_without_values():
    expected, _ = core.gae(rewards(0.1).per_token, torch.zeros_like(KL), MASK, gamma=1.0, gae_lambda=1.0)
    assert torch.equal(ADVANTAGES["reinforce++"](rewards(0.1), config())[0], expected)


def test_rewards_can_be_scaled():
    given = rewards(0.1)
    scaled = given._replace(per_token=core.rescale(given.per_token, MASK))
    assert torch.equal(
        ADVANTAGES["reinforce++"](given, config(whiten_rewards=True))[0], ADVANTAGES["reinforce++"](scaled, config())[0]
    )


@pytest.mark.parametrize("setting", [{"gae_lambda": 0.9}, {"critic": "separate"}, {"value_coef": 1}])
def test_what_belongs_to_a_critic_is_refused(setting):
    with pytest.raises(ConfigError, match="--advantage reinforce\\+\\+ has none"):
        config(**setting)


def test_a_run_has_whitened_advantages_and_no_values(tiny, prompts, tmp_path):
    settings = PPOConfig(
        model=tiny(), data=prompts, output=tmp_path / "run", eval_fraction=0.3, steps=2, advantage="reinforce++",
        rollout_batch_size=8, minibatch_size=4, max_new_tokens=8, dtype="float32", learning_rate=1e-3,
    )  # fmt: skip
    train_ppo(settings, rewards=[lambda completions, **_: [float(len(c)) for c in completions]])
    lines = read_metrics(tmp_path / "run")
    step = next(line for line in lines if "loss/policy" in line)
    assert not any(name.startswith(("value/", "loss/value")) for name in step)
    assert not (tmp_path / "run" / "final" / "value_head").exists()
