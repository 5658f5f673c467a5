"""Online training learns: a letter's share rises with every kind of loss, and penalties hold a policy back."""

from dataclasses import replace

import pytest

from cases import often
from heedful import A2CConfig, GRPOConfig, OnlineDPOConfig, PPOConfig, core, train_ppo
from trainers import TRAIN

LONG_A2C = {"steps": 24, "minibatch_size": 64, "learning_rate": 1e-2, "ppo_epochs": 1}
LEARNERS = {
    "ppo": (PPOConfig, {"steps": 16, "max_new_tokens": 6, "learning_rate": 4e-3}),
    "ppo-1": (PPOConfig, {"seed": 1}),
    "response": (PPOConfig, {"steps": 24, "importance_level": "sequence"}),
    "a2c": (A2CConfig, LONG_A2C),
    "a2c-response": (A2CConfig, {**LONG_A2C, "importance_level": "sequence"}),
    "grpo": (GRPOConfig, {}),
    "dr-grpo": (GRPOConfig, {"advantage": "dr_grpo", "loss_reduction": "fixed"}),
    "dapo": (GRPOConfig, {"loss_reduction": "token", "clip_range_high": 0.28}),
    "rloo": (GRPOConfig, {"advantage": "rloo", "importance_level": "sequence", "kl_in": "reward"}),
    "gspo": (GRPOConfig, {"importance_level": "sequence-mean", "clip_range": 0.02}),
    "reinforce": (GRPOConfig, {"advantage": "reinforce", "importance_level": "sequence", "kl_in": "reward"}),
    "online-dpo": (OnlineDPOConfig, {"steps": 24, "minibatch_size": 16, "max_new_tokens": 8, "learning_rate": 5e-3}),
}


@pytest.fixture
def settings(config):
    """``settings(Config, **changes)`` of a run that learns a share of a letter."""

    def make(kind=PPOConfig, **changes):
        run = {"steps": 40, "learning_rate": 2e-3, "lr_schedule": "constant", "response_length": "fixed"}
        run |= {"rollout_batch_size": 64, "samples_per_prompt": 8, "minibatch_size": 32, "micro_batch_size": 32}
        run |= {} if kind is OnlineDPOConfig else {"kl_coef": 0.0}
        own = {GRPOConfig: {"ppo_epochs": 2}, OnlineDPOConfig: {}}.get(kind, {"value_learning_rate": 1e-2})
        return config(kind, **(run | own | changes))

    return make


def gain(summary):
    first, last = (summary[name]["eval/score_mean"] for name in ("first_evaluation", "last_evaluation"))
    return last - first


@pytest.mark.parametrize("name", often(LEARNERS, ["ppo"]))
def test_raises_the_share_of_a_letter(settings, share_of_a, name):
    kind, changes = LEARNERS[name]
    assert gain(TRAIN[kind](settings(kind, **changes), rewards=[share_of_a])) >= 0.3


@pytest.mark.parametrize("kind", [PPOConfig, GRPOConfig])
@pytest.mark.exhaustive
def test_a_wrong_sign_in_the_policy_loss_would_be_noticed(settings, share_of_a, monkeypatch, kind):
    """Negative control of the learning test: with the sign flipped the score does not rise by 0.3."""
    right = core.ppo_policy_loss

    def wrong(*tensors, **settings):
        loss, metrics = right(*tensors, **settings)
        return -loss, metrics

    monkeypatch.setattr(core, "ppo_policy_loss", wrong)
    assert gain(train_ppo(settings(kind), rewards=[share_of_a])) < 0.3


PENALTIES = {
    "ppo": (PPOConfig, {}, 0.2),
    "grpo-loss": (GRPOConfig, {"kl_in": "loss", "advantage": "grpo"}, 0.3),
    "grpo-reward": (GRPOConfig, {"kl_in": "reward", "advantage": "dr_grpo"}, 0.3),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PENALTIES)
def test_a_kl_penalty_keeps_the_policy_near_its_reference(settings, share_of_a, tmp_path, name):
    kind, changes, share = PENALTIES[name]
    kl = {}
    for coef in (0.0, 3.0):
        run = settings(kind, kl_coef=coef, output=tmp_path / str(coef), **changes)
        run = replace(run, reference=run.model)  # at a price of 0 only a named one is measured against
        kl[coef] = train_ppo(run, rewards=[share_of_a])["last_evaluation"]["eval/kl"]
    assert kl[3.0] < share * kl[0.0]


@pytest.mark.exhaustive
def test_entropy_bonus_keeps_the_policy_diverse(settings, share_of_a, numbers, tmp_path):
    entropy = {}
    for coef in (0.0, 1.0):
        train_ppo(settings(entropy_coef=coef, output=tmp_path / str(coef)), rewards=[share_of_a])
        entropy[coef] = numbers(tmp_path / str(coef))[-2]["policy/entropy"]
    assert entropy[1.0] > entropy[0.0] + 1.0
