"""From text to scores: rules, a user's own functions, reward models here or over HTTP, and several of them as one."""

from heedful.rewards.interface import Ensemble, Reward, RewardFunction, score, score_tokens
from heedful.types import Completion

__all__ = ["Completion", "Ensemble", "Reward", "RewardFunction", "score", "score_tokens"]
