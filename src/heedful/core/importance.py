"""Importance weights: correct the policy gradient for responses that another distribution than the policy sampled.

The sampler differs from the policy if top-k or top-p exclude tokens, or if it computes in another precision.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.core.masking import at_least_float32, first_in_mask, masked_mean, masked_sum, same_shape

__all__ = ["ImportanceWeights", "effective_sample_size", "importance_weights"]


class ImportanceWeights(NamedTuple):
    """Weights per token, with their ratios; zero outside the response mask."""

    weights: Float[Tensor, "batch time"]
    """Factor of each token's objective."""
    log_ratio: Float[Tensor, "batch time"]
    """Log of the ratio before bounding; with level "sequence" the response's, repeated at each of its tokens."""
    bounded: Bool[Tensor, "batch time"]
    """True where a bound replaced the ratio."""


@torch.no_grad()
def importance_weights(
    logprobs: Float[Tensor, "batch time"],
    sampler_logprobs: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
    *,
    level: Literal["token", "sequence"],
    bound: Literal["truncate", "mask"],
    low: float = 0.0,
    high: float = 2.0,
    normalise: bool = False,
) -> ImportanceWeights:
    """Importance weights w for samples from q in place of the policy pi.

        rho_t = pi(a_t | s_t) / q(a_t | s_t)                   level "token"
        rho_t = prod_k pi(a_k | s_k) / q(a_k | s_k)            level "sequence", the same at every token of a response
        w_t = min(rho_t, high)                                 bound "truncate"
        w_t = rho_t if low <= rho_t <= high, otherwise 0       bound "mask"
        w_t <- w_t / mean(w)                                   with ``normalise``; the mean is over tokens, or responses

    Token and truncate are TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training");
    token and mask are IcePop (Ling Team 2025, "Every Step Evolves", with 0.5 and 5); whole responses are those of Liu et
    al. 2025 ("When Speed Kills Stability"). Bounds trade bias for variance (Ionides 2008).

    Args:
        logprobs: ``log pi``, of the policy in training before the update.
        sampler_logprobs: ``log q`` of the same tokens, under the distribution that sampled them. With top-k or top-p it
            is ``log pi - log Z``, where Z is the probability mass of the kept tokens; then ``rho_t`` is Z.
        response_mask: True at response tokens.
        level: one ratio per token, or one per response.
        bound: "truncate" cuts a ratio above ``high`` down to it; "mask" sets one outside the bounds to 0.
        low: smallest ratio kept; only for "mask".
        high: largest ratio kept.
        normalise: divide by the mean weight, so that a small Z does not shrink the whole gradient.

    Without bounds, at level "sequence", E_q[w f] is the sum of pi f over the responses that q can sample. Responses
    that q never samples are missing: no weight corrects this bias of top-k and top-p.

    Raises ValueError for an unknown ``level`` or ``bound``, or unless ``0 <= low < high``.
    """
    if not 0 <= low < high:
        raise ValueError(f"importance_weights: low must be at least 0 and below high, got {low} and {high}")
    same_shape(2, logprobs=logprobs, sampler_logprobs=sampler_logprobs, response_mask=response_mask)
    log_ratio = at_least_float32(logprobs) - at_least_float32(sampler_logprobs)
    log_ratio = torch.where(response_mask, log_ratio, 0.0)
    actions = response_mask
    if level == "sequence":
        log_ratio = torch.where(response_mask, log_ratio.sum(dim=1, keepdim=True), 0.0)
        actions = first_in_mask(response_mask)
    elif level != "token":
        raise ValueError(f"importance_weights: level is {level!r}; choose 'token' or 'sequence'")
    ratio = log_ratio.exp()
    if bound == "truncate":
        weights, bounded = ratio.clamp(max=high), ratio > high
    elif bound == "mask":
        bounded = (ratio < low) | (ratio > high)
        weights = torch.where(bounded, 0.0, ratio)
    else:
        raise ValueError(f"importance_weights: bound is {bound!r}; choose 'truncate' or 'mask'")
    weights = torch.where(response_mask, weights, 0.0)
    if normalise and bool(weights.any()):
        weights = weights / masked_mean(weights, actions)
    return ImportanceWeights(weights, log_ratio, bounded & response_mask)


def effective_sample_size(weights: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Effective sample size as a share of the number of samples (Kong 1992).

        ESS / n = (sum w)^2 / (n sum w^2)

    Args:
        weights: importance weights, at least 0.
        mask: True for entries that count.

    1 if all weights are equal, 1/n if only one is not 0, and 0 if all are 0.
    """
    same_shape(weights=weights, mask=mask)
    weights = at_least_float32(weights)
    largest = torch.where(mask, weights, 0.0).amax()
    scaled = weights / torch.where(largest > 0, largest, 1.0)  # avoids overflow of the squares
    squares = masked_sum(scaled.square(), mask)
    return torch.where(squares > 0, masked_sum(scaled, mask).square() / (mask.sum() * squares), 0.0)
