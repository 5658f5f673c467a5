"""Surrogates: what a policy update maximises for each action, before it is averaged.

Each takes tensors ``[batch, time]`` and returns a `Surrogate`, per token or per response. `aggregate` makes one number of it.
`SURROGATES` is the table that trainers choose from; a new one is a function here and a line there. Gradients flow only into
``logprobs``.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.core.masking import Count, at_least_float32, first_in_mask, masked_mean

__all__ = [
    "Bounds",
    "Surrogate",
    "aggregate",
    "cispo",
    "clipped_ratio",
    "clipped_sequence_ratio",
    "policy_gradient",
    "ratio_kl",
    "sequence_policy_gradient",
]


class Bounds(NamedTuple):
    """How far a probability ratio may move before its gradient stops."""

    low: float
    """The ratio stops at ``1 - low`` if the advantage is negative."""
    high: float
    """It stops at ``1 + high`` if the advantage is positive."""
    dual: float | None = None
    """Above 1: the objective of a bad action is at least ``dual`` times its advantage."""


class Surrogate(NamedTuple):
    """An objective to be maximised, for each action."""

    objective: Float[Tensor, "*shape"]
    """``[batch, time]`` if each token is an action, ``[batch]`` if each response is one; zero outside the mask."""
    mask: Bool[Tensor, "*shape"]
    """True where there is an action."""
    log_ratio: Float[Tensor, "*shape"] | None = None
    """Log of the probability ratio, detached; None for a surrogate without one."""
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
    """The same with one ratio per response: the whole response is one action (RLOO, response-level PPO).

        J_i = min(r_i A_i, clip(r_i) A_i),   r_i = exp(sum_t (new - old log-prob))

    A_i is the advantage at the response's first token. ``length_normalise`` takes the mean over the response's tokens in
    place of the sum (Zheng et al. 2025, GSPO, eq. 7). Rows without a response token count nowhere.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, response_mask).sum(dim=1)
    if length_normalise:
        log_ratio = log_ratio / response_mask.sum(dim=1).clamp_min(1)
    objective, clipped = _clip(log_ratio, _of_responses(advantages, response_mask), bounds)
    return Surrogate(objective, response_mask.any(dim=1), log_ratio.detach(), clipped)


def policy_gradient(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001  every surrogate is given it
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    bounds: Bounds | None = None,  # noqa: ARG001  every surrogate is given it
) -> Surrogate:
    """The policy gradient of advantage actor-critic (Mnih et al. 2016, section 4), no ratio: ``J_t = A_t log pi_t``."""
    advantages = torch.where(response_mask, at_least_float32(advantages.detach()), 0.0)
    logprobs = torch.where(response_mask, at_least_float32(logprobs), 0.0)
    return Surrogate(advantages * logprobs, response_mask)


def sequence_policy_gradient(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
    bounds: Bounds | None = None,
) -> Surrogate:
    """The same with each response as one action: ``J_i = A_i sum_t log pi_t``, A_i at the response's first token."""
    whole = torch.where(response_mask, at_least_float32(logprobs), 0.0).sum(dim=1)
    old = old_logprobs.sum(dim=1)
    return policy_gradient(whole, old, _of_responses(advantages, response_mask), response_mask.any(dim=1), bounds)


def cispo(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    bounds: Bounds,
) -> Surrogate:
    """CISPO (MiniMax 2025, "MiniMax-M1", eq. 4 and 5): the ratio is clipped, and no token's gradient is lost by it.

        J_t = sg(clip(r_t, 1 - low, 1 + high)) A_t log pi_t,   r_t = exp(new - old log-prob)

    sg(x) is x without its gradient, so the clipped ratio only weighs the policy gradient: a token beyond a bound still
    learns, with the bound as its weight, where PPO's surrogate stops. The paper leaves the lower bound off (``low`` of 1).
    ``clipped`` is True where a bound is the weight; ``dual`` has no part here.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, response_mask).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    gradient = policy_gradient(logprobs, old_logprobs, weight * at_least_float32(advantages.detach()), response_mask)
    return Surrogate(gradient.objective, response_mask, log_ratio, (weight != ratio) & response_mask)


SURROGATES: dict[tuple[str, str], Callable[[Tensor, Tensor, Tensor, Tensor, Bounds], Surrogate]] = {
    ("clip", "token"): clipped_ratio,
    ("clip", "sequence"): clipped_sequence_ratio,
    ("clip", "sequence-mean"): partial(clipped_sequence_ratio, length_normalise=True),
    ("a2c", "token"): policy_gradient,
    ("a2c", "sequence"): sequence_policy_gradient,
    ("cispo", "token"): cispo,
}
"""By ``--policy-loss`` and by what one action is."""


def aggregate(
    x: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
    how: Literal["token", "sequence", "fixed"],
    *,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    max_new_tokens: int | None = None,
) -> Float[Tensor, ""]:
    """One number from numbers per token.

        "token"     1/num_tokens sum_i sum_t x_t                           (PPO; Yu et al. 2025, DAPO)
        "sequence"  1/num_sequences sum_i 1/|o_i| sum_t x_t                (Shao et al. 2024, GRPO)
        "fixed"     1/(num_sequences * max_new_tokens) sum_i sum_t x_t     (Liu et al. 2025, Dr. GRPO)

    The counts are those of the whole optimizer step, so that micro-batches add up; None means those of the call itself.

    Raises ValueError for another ``how``, or "fixed" without ``max_new_tokens``.
    """
    if how == "token":
        return masked_mean(x, response_mask, count=num_tokens)
    mask = response_mask.to(x.dtype)
    sequences = mask.any(dim=1).sum() if num_sequences is None else num_sequences
    if how == "sequence":
        weights = mask / mask.sum(dim=1, keepdim=True).clamp_min(1) / sequences
    elif how == "fixed":
        if max_new_tokens is None:
            raise ValueError("aggregate: how='fixed' divides by max_new_tokens; pass it")
        weights = mask / (sequences * max_new_tokens)
    else:
        raise ValueError(f"aggregate: how is {how!r}; choose 'sequence', 'token' or 'fixed'")
    return (weights * torch.where(response_mask, x, 0.0)).sum()


def ratio_kl(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``(r - 1) - log r`` for each action, never negative: its mean estimates the KL of the old policy to the new one."""
    return torch.expm1(log_ratio) - log_ratio


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``new - old`` inside the mask, zero (ratio 1) outside; gradient only into the first argument."""
    return torch.where(mask, at_least_float32(logprobs) - at_least_float32(old_logprobs.detach()), 0.0)


def _of_responses(advantages: Tensor, mask: Tensor) -> Tensor:
    """``[batch]``: each response's advantage, read at its first token."""
    return torch.where(first_in_mask(mask), at_least_float32(advantages.detach()), 0.0).sum(dim=1)


def _clip(log_ratio: Tensor, advantages: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """The clipped objective, and where its clipped branch is the active one.

    If the objective does not depend on the ratio (a bound is active, or the advantage is 0), the ratio is left out of it: an
    infinite one would make its gradient 0 times infinity.
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
