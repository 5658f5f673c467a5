"""Turn text into scores: rules, a user's own functions, reward models (here or over HTTP), and combinations of these."""

from heedful.rewards.scoring import Ensemble, Reward, RewardFunction, score, score_tokens
from heedful.types import Completion

__all__ = ["Completion", "Ensemble", "Reward", "RewardFunction", "score", "score_tokens"]
