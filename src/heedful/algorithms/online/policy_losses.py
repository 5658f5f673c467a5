"""Policy losses: what an update maximises for each token, or each response, as a loss (``--policy-loss``)."""

from typing import Literal

from torch import Tensor

from heedful import core, user_code
from heedful.configs.online import OnlineConfig
from heedful.core.policy_losses import Metrics
from heedful.errors import ConfigError

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
    """The loss, a scalar, and the metrics of the function that ``--policy-loss`` names: one of core, or the user's own.

    Args:
        logprobs, old_logprobs, advantages, response_mask: ``[batch, time]``.
        config: the settings: clip ranges, and ``importance_level``, which says whether a ratio is a token's or a response's.
        reduction: what the sum is divided by.

    Raises ConfigError if a user's function raises, or returns something else than a scalar and a dictionary.
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
        case "a2c":
            level: Literal["token", "sequence"] = "token" if cfg.importance_level == "token" else "sequence"
            return core.a2c_policy_loss(
                logprobs, advantages, response_mask, importance_level=level, reduction=reduction
            )
    match user_code.call(FLAG, cfg.policy_loss, *tensors, config=cfg, reduction=reduction):
        case (Tensor(shape=()) as loss, dict(metrics)):
            return loss, {"loss/policy": loss.detach(), **metrics}
    raise ConfigError(f"{FLAG} {cfg.policy_loss} must return (loss, metrics): a scalar tensor and a dictionary")
