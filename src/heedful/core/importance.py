"""Importance weights: what a response counts for the policy's gradient if something else than the policy drew it.

The sampler is something else if top-k or top-p leave tokens out, or if it computes in another precision.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.core.masking import at_least_float32, first_in_mask, masked_mean, masked_sum

__all__ = ["ImportanceWeights", "effective_sample_size", "importance_weights"]


class ImportanceWeights(NamedTuple):
    """Weights per token, and what they come from; zero outside the response mask."""

    weights: Float[Tensor, "batch time"]
    """What the objective of each token is multiplied by."""
    log_ratio: Float[Tensor, "batch time"]
    """Log of the ratio before its bounds; with level "sequence" that of the response, at each of its tokens."""
    bounded: Bool[Tensor, "batch time"]
    """True where a bound was active: the weight is not the ratio."""


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
    """Weights w with which samples of a sampler q stand for samples of the policy pi.

        rho_t = pi(a_t | s_t) / q(a_t | s_t)                   level "token"
        rho_t = prod_k pi(a_k | s_k) / q(a_k | s_k)            level "sequence", the same at every token of a response
        w_t = min(rho_t, high)                                 bound "truncate"
        w_t = rho_t if low <= rho_t <= high, otherwise 0       bound "mask"
        w_t <- w_t / mean(w)                                   with ``normalise``; the mean is over tokens, or responses

    Token and truncate are TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training");
    token and mask are IcePop (Ling Team 2025, "Every Step Evolves", with 0.5 and 5); whole responses are those of Liu et
    al. 2025 ("When Speed Kills Stability"). Bounds trade bias for variance (Ionides 2008).

    Args:
        logprobs: of the policy in training, before the update, ``log pi``.
        sampler_logprobs: of the same tokens under the distribution that they were drawn from, ``log q``. With top-k or
            top-p that is ``log pi - log Z``, Z being the mass of the tokens that were kept: then ``rho_t`` is Z.
        response_mask: True at response tokens.
        level: what a ratio belongs to.
        bound: what becomes of a ratio beyond a bound.
        low: the smallest ratio that is kept; only for "mask".
        high: the largest.
        normalise: divide by the mean weight, so that a small kept mass does not make the whole gradient small.

    Without bounds, at level "sequence", E_q[w f] is the sum of pi f over the responses that q can draw. What q never draws
    is missing, and no weight brings it back: filtered sampling stays biased by that part.

    Raises ValueError for another ``level`` or ``bound``, or unless ``0 <= low < high``.
    """
    if not 0 <= low < high:
        raise ValueError(f"importance_weights: low must be at least 0 and below high, got {low} and {high}")
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
    """How many equally weighted samples say as much, as a share of those there are (Kong 1992).

        ESS / n = (sum w)^2 / (n sum w^2)

    Args:
        weights: importance weights, at least 0.
        mask: which of them count.

    It is 1 if all weights are equal, 1/n if one has everything, and 0 if all are 0.
    """
    largest = torch.where(mask, at_least_float32(weights), 0.0).amax()
    scaled = weights / torch.where(largest > 0, largest, 1.0)  # so that no square overflows
    squares = masked_sum(scaled.square(), mask)
    return torch.where(squares > 0, masked_sum(scaled, mask).square() / (mask.sum() * squares), 0.0)
