"""Policy losses, selected by ``--policy-loss``: negative surrogate objectives per token or response."""

from typing import Literal

from torch import Tensor

from heedful import core, user_code
from heedful.configs.online import OnlineConfig
from heedful.core.policy_losses import Metrics

FLAG = "--policy-loss"


def objective_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: OnlineConfig,
    reduction: core.Reduction,
) -> tuple[Tensor, Metrics]:
    """The scalar loss and metrics of the function selected by ``--policy-loss``: one of core's, or the user's.

    Args:
        logprobs, old_logprobs, advantages, response_mask: ``[batch, time]``; for sao the second are the sampler's.
        config: the settings: clip ranges, and ``importance_level`` (ratio per token or per response).
        reduction: reduction to a scalar.

    Raises ConfigError if a user's function raises, or does not return a scalar and a dictionary.
    """
    cfg, tensors = config, (logprobs, old_logprobs, advantages, response_mask)
    match cfg.policy_loss:
        case "clip":
            return core.ppo_policy_loss(
                *tensors,
                clip_range=cfg.clip_range,
                clip_range_high=cfg.clip_range_high,
                dual_clip=cfg.dual_clip,
                importance_level=cfg.importance_level,
                reduction=reduction,
            )
        case "cispo":
            return core.cispo_policy_loss(
                *tensors, clip_range=cfg.clip_range, clip_range_high=cfg.clip_range_high, reduction=reduction
            )
        case "sao":
            return core.sao_policy_loss(
                *tensors, clip_range=cfg.clip_range, clip_range_high=cfg.clip_range_high, reduction=reduction
            )
        case "a2c":
            level: Literal["token", "sequence"] = "token" if cfg.importance_level == "token" else "sequence"
            return core.a2c_policy_loss(
                logprobs, advantages, response_mask, importance_level=level, reduction=reduction
            )
    loss, metrics = user_code.call_loss(FLAG, cfg.policy_loss, *tensors, config=cfg, reduction=reduction)
    return loss, {"loss/policy": loss.detach(), **metrics}
