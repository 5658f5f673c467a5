"""From text to scores: rules, a user's own functions, reward models here or over HTTP, and several of them as one."""

from heedful.rewards.interface import Completion, Ensemble, Reward, RewardFunction, score, score_tokens

__all__ = ["Completion", "Ensemble", "Reward", "RewardFunction", "score", "score_tokens"]
