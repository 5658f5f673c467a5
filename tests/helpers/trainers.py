"""Every trainer by its settings, and one step of each."""

from heedful import (
    A2CConfig,
    CriticConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RewardConfig,
    SFTConfig,
    train_critic,
    train_dpo,
    train_grpo,
    train_kto,
    train_online_dpo,
    train_ppo,
    train_reward,
    train_sft,
)
from heedful.algorithms import critic, dpo, kto, online_dpo, ppo, reward_model, sft
from heedful.algorithms.online.rollout import rollout

MODULES = {"sft": sft, "reward": reward_model, "dpo": dpo, "kto": kto}
"""Of the trainers that learn from data."""
CONFIGS = {"sft": SFTConfig, "reward": RewardConfig, "dpo": DPOConfig, "kto": KTOConfig}
TRAIN = {
    SFTConfig: train_sft,
    RewardConfig: train_reward,
    DPOConfig: train_dpo,
    KTOConfig: train_kto,
    PPOConfig: train_ppo,
    CriticConfig: train_critic,
    A2CConfig: train_ppo,
    GRPOConfig: train_grpo,
    OnlineDPOConfig: train_online_dpo,
}
ONLINE = {kind: TRAIN[kind] for kind in (PPOConfig, GRPOConfig, OnlineDPOConfig)}


def begin(settings, *, with_samples=False):
    """The learner of a trainer that learns from data, and a function that does its next step and returns the metrics.

    The table of samples, which draws random numbers, is then part of a step; reward models have none.
    """
    (module,) = (MODULES[name] for name, kind in CONFIGS.items() if type(settings) is kind)
    learner, data = module.start(settings)

    def step():
        metrics = module.learn(learner, [data.train[i] for i in next(learner.batches)], settings)
        samples = {"samples": module.sample_rows(learner, data)} if with_samples and module is not reward_model else {}
        return metrics | samples

    return learner, step


def step_online(learner):
    """The next step of whatever online algorithm: its metrics, and the batch of responses that it learned from."""
    kinds = {OnlineDPOConfig: online_dpo, CriticConfig: critic}
    algorithm = kinds.get(type(learner.config), ppo)
    scored = rollout(learner, next(learner.prompts))
    return algorithm.learn(learner, algorithm.make_experience(learner, scored)).metrics, scored
