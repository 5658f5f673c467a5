"""Surrogate objectives per action, which a policy update maximises.

Each takes tensors ``[batch, time]`` and returns a `Surrogate`, per token or per response. The losses of
`heedful.core.policy_losses` are their negative averages. Gradients flow only into ``logprobs``.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.core.masking import at_least_float32, first_in_mask, same_shape

__all__ = [
    "Bounds",
    "Surrogate",
    "cispo",
    "clipped_ratio",
    "clipped_sequence_ratio",
    "double_sided",
    "policy_gradient",
    "ratio_kl",
    "sequence_policy_gradient",
]


class Bounds(NamedTuple):
    """Clip bounds of the probability ratio, beyond which its gradient is 0."""

    low: float
    """The ratio is clipped at ``1 - low`` if the advantage is negative."""
    high: float
    """It is clipped at ``1 + high`` if the advantage is positive."""
    dual: float | None = None
    """Above 1: with a negative advantage the objective is at least ``dual`` times it."""


class Surrogate(NamedTuple):
    """An objective per action, to be maximised."""

    objective: Float[Tensor, "*shape"]
    """``[batch, time]`` if each token is an action, ``[batch]`` if each response is one; zero outside the mask."""
    mask: Bool[Tensor, "*shape"]
    """True for actions."""
    log_ratio: Float[Tensor, "*shape"] | None = None
    """Log of the probability ratio, detached; None without a ratio."""
    clipped: Tensor | None = None
    """True where the bound, not the ratio, is the active branch."""


def clipped_ratio(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    bounds: Bounds,
) -> Surrogate:
    """The clipped surrogate of PPO (Schulman et al. 2017, eq. 7), one ratio per token.

        J_t = min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t),   r_t = exp(new - old log-prob)

    ``high`` above ``low`` is DAPO's clip-higher (Yu et al. 2025, eq. 10). ``dual`` = c bounds the objective from below by
    ``c A_t`` if ``A_t < 0`` (Ye et al. 2020, eq. 5).
    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, response_mask=response_mask)
    log_ratio = _log_ratio(logprobs, old_logprobs, response_mask)
    advantages = torch.where(response_mask, at_least_float32(advantages.detach()), 0.0)
    objective, clipped = _clip(log_ratio, advantages, bounds)
    return Surrogate(objective, response_mask, log_ratio.detach(), clipped)


def clipped_sequence_ratio(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
    bounds: Bounds,
    *,
    length_normalise: bool = False,
) -> Surrogate:
    """`clipped_ratio` with one ratio per response, which is then one action (RLOO, response-level PPO).

        J_i = min(r_i A_i, clip(r_i) A_i),   r_i = exp(sum_t (new - old log-prob))

    A_i is the advantage at the response's first token. ``length_normalise`` takes the mean over the response's tokens in
    place of the sum (Zheng et al. 2025, GSPO, eq. 7). Rows without a response token do not count.
    """
    same_shape(2, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, response_mask=response_mask)
    log_ratio = _log_ratio(logprobs, old_logprobs, response_mask).sum(dim=1)
    if length_normalise:
        log_ratio = log_ratio / response_mask.sum(dim=1).clamp_min(1)
    objective, clipped = _clip(log_ratio, _of_responses(advantages, response_mask), bounds)
    return Surrogate(objective, response_mask.any(dim=1), log_ratio.detach(), clipped)


def policy_gradient(
    logprobs: Float[Tensor, "*shape"], advantages: Float[Tensor, "*shape"], response_mask: Bool[Tensor, "*shape"]
) -> Surrogate:
    """Policy gradient of advantage actor-critic (Mnih et al. 2016, section 4), without a ratio: ``J_t = A_t log
    pi_t``."""
    same_shape(logprobs=logprobs, advantages=advantages, response_mask=response_mask)
    advantages = torch.where(response_mask, at_least_float32(advantages.detach()), 0.0)
    logprobs = torch.where(response_mask, at_least_float32(logprobs), 0.0)
    return Surrogate(advantages * logprobs, response_mask)


def sequence_policy_gradient(
    logprobs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
) -> Surrogate:
    """`policy_gradient` with each response as one action: ``J_i = A_i sum_t log pi_t``, A_i at its first token."""
    same_shape(2, logprobs=logprobs, advantages=advantages, response_mask=response_mask)
    whole = torch.where(response_mask, at_least_float32(logprobs), 0.0).sum(dim=1)
    return policy_gradient(whole, _of_responses(advantages, response_mask), response_mask.any(dim=1))


def cispo(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    bounds: Bounds,
) -> Surrogate:
    """CISPO (MiniMax 2025, "MiniMax-M1", eq. 4 and 5): clips the ratio without losing any token's gradient.

        J_t = sg(clip(r_t, 1 - low, 1 + high)) A_t log pi_t,   r_t = exp(new - old log-prob)

    sg is stop-gradient: the clipped ratio only weights the policy gradient. A token beyond a bound still has a
    gradient, with the bound as its weight; in PPO it has none. The paper drops the lower bound (``low`` of 1).
    ``clipped`` is True where a bound is the weight; ``dual`` is not used.
    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, response_mask=response_mask)
    log_ratio = _log_ratio(logprobs, old_logprobs, response_mask).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    gradient = policy_gradient(logprobs, weight * at_least_float32(advantages.detach()), response_mask)
    return Surrogate(gradient.objective, response_mask, log_ratio, (weight != ratio) & response_mask)


def double_sided(
    logprobs: Float[Tensor, "*shape"],
    sampler_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    bounds: Bounds,
) -> Surrogate:
    """Direct double-sided importance sampling (GLM-5.2's SAO 2026, arXiv 2607.07508, eq. 3).

        J_t = sg(r_t [1 - low < r_t < 1 + high]) A_t log pi_t,   r_t = exp(new - sampler's log-prob)

    Inside the bounds the ratio to the policy that sampled is the weight of the policy gradient. Outside, whatever the sign
    of the advantage, a token has no gradient; PPO's clip (`clipped_ratio`) still corrects a token that moved the wrong way,
    and `cispo` keeps the bound as its weight. The ratio is that of the policy in training, so it changes with each
    minibatch; the weights of `importance_weights` are fixed before the update. ``clipped`` is True outside the bounds;
    ``dual`` is not used.
    """
    same_shape(logprobs=logprobs, sampler_logprobs=sampler_logprobs, advantages=advantages, response_mask=response_mask)
    log_ratio = _log_ratio(logprobs, sampler_logprobs, response_mask).detach()
    ratio = log_ratio.exp()
    inside = (ratio > 1 - bounds.low) & (ratio < 1 + bounds.high)
    weight = torch.where(inside, ratio, 0.0)
    gradient = policy_gradient(logprobs, weight * at_least_float32(advantages.detach()), response_mask)
    return Surrogate(gradient.objective, response_mask, log_ratio, ~inside & response_mask)


def ratio_kl(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``(r - 1) - log r`` for each action, never negative: its mean estimates the KL of the old policy to the new one."""
    log_ratio = at_least_float32(log_ratio)
    return torch.expm1(log_ratio) - log_ratio


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``new - old`` inside the mask, zero (ratio 1) outside; gradient only into the first argument."""
    return torch.where(mask, at_least_float32(logprobs) - at_least_float32(old_logprobs.detach()), 0.0)


def _of_responses(advantages: Tensor, mask: Tensor) -> Tensor:
    """``[batch]``: each response's advantage, read at its first token."""
    return torch.where(first_in_mask(mask), at_least_float32(advantages.detach()), 0.0).sum(dim=1)


def _clip(log_ratio: Tensor, advantages: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """The clipped objective, and a mask of its active clipped branches.

    Where the objective does not depend on the ratio (a bound is active, or the advantage is 0), it is computed without
    it: the gradient through an infinite ratio would be 0 times infinity.
    """
    ratio = log_ratio.detach().exp()
    at_bound = ratio.clamp(1 - bounds.low, 1 + bounds.high) * advantages
    clipped = at_bound < ratio * advantages
    constant = torch.where(clipped, at_bound, 0.0)
    is_constant = clipped | (advantages == 0)
    if bounds.dual is not None:
        at_floor = (advantages < 0) & (ratio > bounds.dual)
        constant, is_constant = torch.where(at_floor, bounds.dual * advantages, constant), is_constant | at_floor
    unclipped = torch.where(is_constant, 0.0, log_ratio).exp() * advantages
    return torch.where(is_constant, constant, unclipped), clipped
