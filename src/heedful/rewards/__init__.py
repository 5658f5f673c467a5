"""From text to scores: rule functions, a user's own functions, reward models."""

from heedful.rewards.interface import Completion, Ensemble, Reward, RewardFunction, score, score_tokens

__all__ = ["Completion", "Ensemble", "Reward", "RewardFunction", "score", "score_tokens"]
