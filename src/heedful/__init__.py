"""heedful trains language models that heed human feedback: SFT, reward models, PPO, GRPO, DPO, in one process.

>>> import heedful
>>> config = heedful.PPOConfig(model="runs/sft/final", data="prompts.jsonl", output="runs/ppo")
>>> config.kl_coef
0.05

Names are resolved when they are first used, so that ``import heedful`` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful.checkpoints.merge import merge_model
    from heedful.checkpoints.tiny import make_tiny_model
    from heedful.configs.a2c import A2CConfig
    from heedful.configs.chat import ChatConfig
    from heedful.configs.demo import DemoConfig
    from heedful.configs.dpo import DPOConfig
    from heedful.configs.evaluate import (
        AccuracyConfig,
        BestOfNConfig,
        KLConfig,
        PerplexityConfig,
        ScoresConfig,
        WinRateConfig,
    )
    from heedful.configs.grpo import GRPOConfig
    from heedful.configs.merge import MergeConfig
    from heedful.configs.ppo import PPOConfig
    from heedful.configs.reward_model import RewardConfig
    from heedful.configs.scoring import ServeRewardConfig
    from heedful.configs.sft import SFTConfig
    from heedful.demo.pipeline import run_demo
    from heedful.errors import CheckpointError, ConfigError, DataError, HeedfulError, RewardError, TrainingError
    from heedful.evaluate.curves import draw_curves
    from heedful.evaluate.policies import (
        evaluate_best_of_n,
        evaluate_kl,
        evaluate_perplexity,
        evaluate_scores,
        evaluate_win_rate,
    )
    from heedful.evaluate.reward_models import evaluate_accuracy
    from heedful.rewards.interface import Reward
    from heedful.rewards.serve import serve_reward
    from heedful.train.dpo import train_dpo
    from heedful.train.online.grpo import train_grpo
    from heedful.train.online.ppo import train_ppo
    from heedful.train.reward import train_reward
    from heedful.train.sft import train_sft
    from heedful.types import Demonstration, Message, Prompt, Ranking

_HOMES = {
    "configs.a2c": ("A2CConfig",),
    "configs.chat": ("ChatConfig",),
    "configs.demo": ("DemoConfig",),
    "configs.dpo": ("DPOConfig",),
    "configs.evaluate": (
        "AccuracyConfig",
        "BestOfNConfig",
        "KLConfig",
        "PerplexityConfig",
        "ScoresConfig",
        "WinRateConfig",
    ),
    "configs.grpo": ("GRPOConfig",),
    "configs.merge": ("MergeConfig",),
    "configs.ppo": ("PPOConfig",),
    "configs.reward_model": ("RewardConfig",),
    "configs.scoring": ("ServeRewardConfig",),
    "configs.sft": ("SFTConfig",),
    "demo.pipeline": ("run_demo",),
    "errors": ("CheckpointError", "ConfigError", "DataError", "HeedfulError", "RewardError", "TrainingError"),
    "evaluate.curves": ("draw_curves",),
    "evaluate.policies": (
        "evaluate_best_of_n",
        "evaluate_kl",
        "evaluate_perplexity",
        "evaluate_scores",
        "evaluate_win_rate",
    ),
    "evaluate.reward_models": ("evaluate_accuracy",),
    "checkpoints.merge": ("merge_model",),
    "checkpoints.tiny": ("make_tiny_model",),
    "rewards.interface": ("Reward",),
    "rewards.serve": ("serve_reward",),
    "train.dpo": ("train_dpo",),
    "train.online.grpo": ("train_grpo",),
    "train.online.ppo": ("train_ppo",),
    "train.reward": ("train_reward",),
    "train.sft": ("train_sft",),
    "types": ("Demonstration", "Message", "Prompt", "Ranking"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "A2CConfig",
    "AccuracyConfig",
    "BestOfNConfig",
    "ChatConfig",
    "CheckpointError",
    "ConfigError",
    "DPOConfig",
    "DataError",
    "DemoConfig",
    "Demonstration",
    "GRPOConfig",
    "HeedfulError",
    "KLConfig",
    "MergeConfig",
    "Message",
    "PPOConfig",
    "PerplexityConfig",
    "Prompt",
    "Ranking",
    "Reward",
    "RewardConfig",
    "RewardError",
    "SFTConfig",
    "ScoresConfig",
    "ServeRewardConfig",
    "TrainingError",
    "WinRateConfig",
    "draw_curves",
    "evaluate_accuracy",
    "evaluate_best_of_n",
    "evaluate_kl",
    "evaluate_perplexity",
    "evaluate_scores",
    "evaluate_win_rate",
    "make_tiny_model",
    "merge_model",
    "run_demo",
    "serve_reward",
    "train_dpo",
    "train_grpo",
    "train_ppo",
    "train_reward",
    "train_sft",
]


def __getattr__(name: str) -> Any:
    if name == "core":
        return import_module("heedful.core")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'heedful' has no attribute {name!r}")
    return getattr(import_module(f"heedful.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
