"""The losses of PPO and A2C on a part of a minibatch, with each token or each whole response as an action."""

import torch
from torch import Tensor

from heedful import core
from heedful.configs.ppo import PPOConfig
from heedful.core.policy_losses import Metrics
from heedful.models.policy import TokenOutputs
from heedful.train.online.experience import Experience, action_mask


def policy_loss(
    outputs: TokenOutputs, part: Experience, config: PPOConfig, *, num_tokens: Tensor, num_actions: Tensor
) -> tuple[Tensor, Metrics]:
    """``L = L_surrogate - entropy_coef H + kl_coef KL``, the last with ``kl_in`` loss alone.

    The surrogate is divided by the minibatch's ``num_actions``, entropy and KL by its ``num_tokens``.
    """
    mask = part.batch.response_mask
    loss, metrics = _surrogate(outputs.logprobs, part, config, num_actions)
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * core.masked_mean(outputs.entropy, mask, count=num_tokens)
    if config.kl_in == "loss":
        kl = core.kl_estimate(outputs.logprobs, part.ref_logprobs, kind=config.kl_kind)
        penalty = part.kl_coef * core.masked_mean(kl, mask, count=num_tokens)
        loss, metrics = loss + penalty, metrics | {"loss/kl": penalty.detach()}
    return loss, metrics


def critic_loss(values: Tensor, part: Experience, config: PPOConfig, *, num_actions: Tensor) -> tuple[Tensor, Metrics]:
    """``value_coef * L_value`` where actions begin: before every token, or after the prompt alone.

    A separate critic has parameters and learning rate of its own, so its loss is not weighted.
    """
    loss, metrics = core.value_loss(
        values,
        part.old_values,
        part.returns,
        action_mask(part.batch.response_mask, config),
        clip_range=config.value_clip_range,
        num_tokens=num_actions,
    )
    return (config.value_coef if config.critic == "shared" else 1.0) * loss, metrics


def _surrogate(logprobs: Tensor, part: Experience, config: PPOConfig, num_actions: Tensor) -> tuple[Tensor, Metrics]:
    mask = part.batch.response_mask
    if config.action == "token":
        if config.policy_loss == "a2c":
            return core.a2c_policy_loss(logprobs, part.advantages, mask, num_tokens=num_actions)
        return core.ppo_policy_loss(
            logprobs,
            part.old_logprobs,
            part.advantages,
            mask,
            clip_range=config.clip_range,
            clip_range_high=config.clip_range_high,
            dual_clip=config.dual_clip,
            num_tokens=num_actions,
        )
    advantages = torch.where(action_mask(mask, config), part.advantages, 0.0).sum(dim=1)
    if config.policy_loss == "a2c":
        return core.a2c_policy_loss(logprobs.sum(dim=1), advantages, mask.any(dim=1), num_tokens=num_actions)
    return core.sequence_policy_loss(
        logprobs,
        part.old_logprobs,
        advantages,
        mask,
        clip_range=config.clip_range,
        clip_range_high=config.clip_range_high,
        dual_clip=config.dual_clip,
        num_sequences=num_actions,
    )
