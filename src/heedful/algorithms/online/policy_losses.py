"""Policy losses: what an update maximises for each token, or each response, as a loss.

`POLICY_LOSSES` is the table that ``--policy-loss`` chooses from. An entry takes log-probs, old log-probs, advantages and mask
``[batch, time]``, the settings, and what the sum is divided by; it returns a scalar and metrics. Each is a loss of
`heedful.core`.
"""

from typing import Literal, Protocol

from torch import Tensor

from heedful import core, user_code
from heedful.configs.online import OnlineConfig
from heedful.core.policy_losses import Metrics
from heedful.errors import ConfigError

FLAG = "--policy-loss"


class PolicyLoss(Protocol):
    """An entry of `POLICY_LOSSES`."""

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        /,
        *,
        config: OnlineConfig,
        reduction: core.Reduction,
    ) -> tuple[Tensor, Metrics]: ...


def clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: OnlineConfig,
    reduction: core.Reduction,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate (`core.ppo_policy_loss`)."""
    return core.ppo_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        response_mask,
        clip_range=config.clip_range,
        clip_range_high=config.clip_range_high,
        dual_clip=config.dual_clip,
        importance_level=config.importance_level,
        reduction=reduction,
    )


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: OnlineConfig,
    reduction: core.Reduction,
) -> tuple[Tensor, Metrics]:
    """The clipped ratio as a weight (`core.cispo_policy_loss`)."""
    return core.cispo_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        response_mask,
        clip_range=config.clip_range,
        clip_range_high=config.clip_range_high,
        reduction=reduction,
    )


def a2c(
    logprobs: Tensor,
    _old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: OnlineConfig,
    reduction: core.Reduction,
) -> tuple[Tensor, Metrics]:
    """The policy gradient, without a ratio (`core.a2c_policy_loss`)."""
    level: Literal["token", "sequence"] = "token" if config.importance_level == "token" else "sequence"
    return core.a2c_policy_loss(logprobs, advantages, response_mask, importance_level=level, reduction=reduction)


POLICY_LOSSES: dict[str, PolicyLoss] = {"clip": clip, "cispo": cispo, "a2c": a2c}


def objective_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: OnlineConfig,
    reduction: core.Reduction,
) -> tuple[Tensor, Metrics]:
    """The loss by the entry of `POLICY_LOSSES`, or the user's own function, that ``--policy-loss`` names.

    Raises ConfigError if a user's function raises, or returns something else than a scalar and a dictionary.
    """
    tensors = (logprobs, old_logprobs, advantages, response_mask)
    if not user_code.is_named(config.policy_loss):
        return POLICY_LOSSES[config.policy_loss](*tensors, config=config, reduction=reduction)
    found = user_code.call(FLAG, config.policy_loss, *tensors, config=config, reduction=reduction)
    match found:
        case (Tensor(shape=()) as loss, dict(metrics)):
            return loss, {"loss/policy": loss.detach(), **metrics}
    raise ConfigError(f"{FLAG} {config.policy_loss} must return (loss, metrics): a scalar tensor and a dictionary")
