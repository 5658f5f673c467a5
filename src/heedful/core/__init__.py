"""The mathematics of learning from human feedback: pure functions of tensors and numbers.

Shapes: B responses, T tokens, V vocabulary. Masks are boolean; True means that an entry counts. Half precision is
computed in float32, float64 stays float64. Needs only torch and jaxtyping.
"""

from heedful.core.advantages import gae, group_advantages, kl_shaped_rewards, response_rewards, rloo_advantages
from heedful.core.agreement import agreement, calibration_error, correlation, ordered_pairs
from heedful.core.best_of_n import best_row, expected_best, kl_bound
from heedful.core.kl_control import AdaptiveKL, FixedKL
from heedful.core.logprobs import entropy, kl_estimate, token_logprobs
from heedful.core.masking import first_in_mask, masked_mean, masked_sum, masked_var, rescale, whiten
from heedful.core.policy_losses import (
    a2c_policy_loss,
    grpo_loss,
    ppo_policy_loss,
    sequence_policy_loss,
    sft_loss,
    value_loss,
)
from heedful.core.preference_losses import best_of_k_reward_loss, dpo_loss, pairwise_reward_loss, ranking_reward_loss
from heedful.core.score_norm import RunningScoreNorm, ScoreNorm, clip_scores, spread_scores

__all__ = [
    "AdaptiveKL",
    "FixedKL",
    "RunningScoreNorm",
    "ScoreNorm",
    "a2c_policy_loss",
    "agreement",
    "best_of_k_reward_loss",
    "best_row",
    "calibration_error",
    "clip_scores",
    "correlation",
    "dpo_loss",
    "entropy",
    "expected_best",
    "first_in_mask",
    "gae",
    "group_advantages",
    "grpo_loss",
    "kl_bound",
    "kl_estimate",
    "kl_shaped_rewards",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "ordered_pairs",
    "pairwise_reward_loss",
    "ppo_policy_loss",
    "ranking_reward_loss",
    "rescale",
    "response_rewards",
    "rloo_advantages",
    "sequence_policy_loss",
    "sft_loss",
    "spread_scores",
    "token_logprobs",
    "value_loss",
    "whiten",
]
