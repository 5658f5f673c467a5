"""Losses that are put together of core's, as the page of PPO does it."""

import torch

from heedful.core import Reduction, kl_estimate, ppo_policy_loss


def sequence_policy_loss(new, old, advantages, inside, *, length_normalise=False, num_sequences=None, **options):
    """PPO's loss with one ratio and one of the advantages ``[batch]`` per response."""
    return ppo_policy_loss(
        new,
        old,
        advantages.unsqueeze(1).expand_as(new),
        inside,
        importance_level="sequence-mean" if length_normalise else "sequence",
        reduction=Reduction(num_sequences=num_sequences),
        **options,
    )


def grpo_loss(new, old, ref, advantages, inside, *, how="sequence", kl_coef=0.0, clip_range=0.2, high=None, **counts):
    """Shao et al. 2024, eq. 3: a clipped surrogate with one of the advantages ``[batch]`` per response, and a k3 penalty."""
    reduction = Reduction(how, **counts)
    loss, metrics = ppo_policy_loss(
        new,
        old,
        advantages.unsqueeze(1).expand_as(new),
        inside,
        clip_range=clip_range,
        clip_range_high=high,
        reduction=reduction,
    )
    here, there = torch.where(inside, new, 0.0), torch.where(inside, ref.detach(), 0.0)
    kl = reduction.tokens(kl_estimate(here, there, kind="k3"), inside)
    loss = loss + kl_coef * kl
    return loss, metrics | {"loss/policy": loss.detach(), "reference/kl": kl.detach()}
