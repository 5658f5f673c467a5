"""From text to scores: rule functions, a user's own functions, reward models."""

from heedful.rewards.interface import Completion, Reward, RewardFunction, score

__all__ = ["Completion", "Reward", "RewardFunction", "score"]
