"""Losses of the policy and the value function.

Each returns ``(loss, metrics)``: a scalar to minimise, and detached numbers. Both are divided by an explicit count of
the whole optimizer step (``num_tokens``, ``num_sequences``), so the results of micro-batches add up to those of the
whole batch. A count of None is the count of the call itself. Gradients flow only into ``logprobs`` and ``values``.

Arguments that several losses share:
    logprobs: log-probs of the response tokens under the policy in training.
    old_logprobs: log-probs under the policy that sampled them.
    advantages: how much better than expected each token (or response) was; constants.
    response_mask: True at response tokens.
    num_tokens, num_sequences: response tokens, or responses, of the whole optimizer step.
    clip_range: how far below 1, and by default above it, the ratio of new and old probability may move the loss.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.core.logprobs import kl_estimate
from heedful.core.masking import Count, at_least_float32, masked_mean
from heedful.core.surrogates import Bounds, Surrogate, clipped_ratio, clipped_sequence_ratio, policy_gradient, ratio_kl
from heedful.core.surrogates import aggregate as aggregate_tokens

__all__ = ["a2c_policy_loss", "grpo_loss", "ppo_policy_loss", "sequence_policy_loss", "sft_loss", "value_loss"]

Metrics = dict[str, Tensor]
Scalar = Float[Tensor, ""]


def sft_loss(
    logprobs: Float[Tensor, "*shape"], response_mask: Bool[Tensor, "*shape"], *, num_tokens: Count | None = None
) -> tuple[Scalar, Metrics]:
    """Negative log-likelihood of the response tokens, in nats per token: ``L = -1/N sum_t logprobs_t``.

    N is ``num_tokens``. Equal to ``torch.nn.functional.cross_entropy`` with ``ignore_index`` outside the mask.
    """
    loss = -masked_mean(logprobs, response_mask, count=num_tokens)
    return loss, {"loss/sft": loss.detach()}


def ppo_policy_loss(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    *,
    clip_range: float,
    num_tokens: Count | None = None,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Scalar, Metrics]:
    """Clipped surrogate policy loss (Schulman et al. 2017, eq. 7), to be minimised.

        L = -1/N sum_t min(r_t A_t, clip(r_t, 1 - clip_range, 1 + clip_range_high) A_t),   r_t = exp(new - old log-prob)

    N is ``num_tokens``.

    Args:
        clip_range_high: how far above 1; None is ``clip_range``. Yu et al. 2025 (DAPO, eq. 10) set it higher.
        dual_clip: a number c > 1 that bounds the objective from below by ``c A_t`` if ``A_t < 0`` (Ye et al. 2020, eq.
            5).

    Metrics: ``policy/clip_frac``, the share of tokens whose clipped branch is strictly the smaller one, and
    ``policy/approx_kl``, the mean of ``(r - 1) - log r``.
    """
    bounds = Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high, dual_clip)
    surrogate = clipped_ratio(logprobs, old_logprobs, advantages, response_mask, bounds)
    loss = -masked_mean(surrogate.objective, response_mask, count=num_tokens)
    return loss, {"loss/policy": loss.detach(), **_metrics(surrogate, num_tokens)}


def value_loss(
    values: Float[Tensor, "*shape"],
    old_values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    *,
    clip_range: float | None,
    num_tokens: Count | None = None,
) -> tuple[Scalar, Metrics]:
    """Value loss with clipping around the old values (lm-human-preferences; Huang et al. 2023), including the factor
    1/2.

        L = 1/N sum_t 1/2 max((V_t - R_t)^2, (clip(V_t, old_t - clip_range, old_t + clip_range) - R_t)^2)

    Args:
        values: values in training.
        old_values: values of the same states before the update.
        returns: what the values should be.
        clip_range: how far a value may move from the old one, in units of the score; None gives the plain squared
            error.

    Metric ``value/clip_frac``: the share of tokens whose clipped square is the larger one.
    """
    values = torch.where(response_mask, at_least_float32(values), 0.0)
    old_values = torch.where(response_mask, at_least_float32(old_values.detach()), 0.0)
    returns = torch.where(response_mask, at_least_float32(returns.detach()), 0.0)
    square = (values - returns).square()
    if clip_range is None:
        clipped_square = square
    else:
        clipped_values = torch.clamp(values, old_values - clip_range, old_values + clip_range)
        clipped_square = (clipped_values - returns).square()
    loss = 0.5 * masked_mean(torch.maximum(square, clipped_square), response_mask, count=num_tokens)
    clip_frac = masked_mean((clipped_square > square).to(square.dtype), response_mask, count=num_tokens)
    return loss, {"loss/value": loss.detach(), "value/clip_frac": clip_frac}


def a2c_policy_loss(
    logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    *,
    num_tokens: Count | None = None,
) -> tuple[Scalar, Metrics]:
    """Policy gradient loss of advantage actor-critic (Mnih et al. 2016, section 4): ``L = -1/N sum_t A_t log pi_t``."""
    surrogate = policy_gradient(logprobs, logprobs.detach(), advantages, response_mask)
    loss = -masked_mean(surrogate.objective, response_mask, count=num_tokens)
    return loss, {"loss/policy": loss.detach()}


def sequence_policy_loss(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    response_mask: Bool[Tensor, "batch time"],
    *,
    clip_range: float,
    num_sequences: Count | None = None,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    length_normalise: bool = False,
) -> tuple[Scalar, Metrics]:
    """Clipped surrogate with one ratio per response: the whole response is one action, as in RLOO and bandit PPO.

        r_i = exp(sum_t (new - old log-prob)),   L = -1/N sum_i min(r_i A_i, clip(r_i) A_i)

    N is ``num_sequences``; rows without a response token do not count.

    Args:
        clip_range_high, dual_clip: as in `ppo_policy_loss`.
        length_normalise: take the mean over the response's tokens in place of the sum (Zheng et al. 2025, GSPO, eq. 7).

    Metrics are those of `ppo_policy_loss`, over responses.
    """
    bounds = Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high, dual_clip)
    per_token = advantages.unsqueeze(1).expand_as(logprobs)
    surrogate = clipped_sequence_ratio(
        logprobs, old_logprobs, per_token, response_mask, bounds, length_normalise=length_normalise
    )
    loss = -masked_mean(surrogate.objective, surrogate.mask, count=num_sequences)
    return loss, {"loss/policy": loss.detach(), **_metrics(surrogate, num_sequences)}


def grpo_loss(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    response_mask: Bool[Tensor, "batch time"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    kl_coef: float = 0.0,
    aggregate: Literal["sequence", "token", "fixed"] = "sequence",
    num_sequences: Count | None = None,
    num_tokens: Count | None = None,
    max_new_tokens: int | None = None,
) -> tuple[Scalar, Metrics]:
    """Group-relative policy loss (Shao et al. 2024, GRPO, eq. 3): clipped surrogate minus a k3 penalty, per token.

        l_t = min(r_t A_i, clip(r_t) A_i) - kl_coef * k3_t

    Args:
        ref_logprobs: log-probs under the reference.
        advantages: one per response, for all of its tokens.
        clip_range_high: as in `ppo_policy_loss`.
        kl_coef: weight of the k3 estimate of the KL to the reference.
        aggregate: how tokens are averaged:
            "sequence"  -1/num_sequences sum_i 1/|o_i| sum_t l_t      (GRPO)
            "token"     -1/num_tokens sum_i sum_t l_t                 (Yu et al. 2025, DAPO)
            "fixed"     -1/(num_sequences * max_new_tokens) sum l_t   (Liu et al. 2025, Dr. GRPO)
        max_new_tokens: the longest response allowed, in tokens; used only by "fixed".

    Metrics: ``policy/clip_frac``, ``policy/approx_kl`` and ``reference/kl`` (k3), each aggregated like the loss.

    Raises ValueError for any other ``aggregate``, or "fixed" without ``max_new_tokens``.
    """
    bounds = Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high)
    per_token = advantages.unsqueeze(1).expand_as(logprobs)
    surrogate = clipped_ratio(logprobs, old_logprobs, per_token, response_mask, bounds)
    assert surrogate.log_ratio is not None
    assert surrogate.clipped is not None
    to_reference = torch.where(response_mask, at_least_float32(logprobs) - at_least_float32(ref_logprobs.detach()), 0.0)
    kl = kl_estimate(to_reference, torch.zeros_like(to_reference), kind="k3")

    def mean(x: Tensor) -> Tensor:
        return aggregate_tokens(
            x,
            response_mask,
            aggregate,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_new_tokens=max_new_tokens,
        )

    loss = kl_coef * mean(kl) - mean(surrogate.objective)
    return loss, {
        "loss/policy": loss.detach(),
        "policy/clip_frac": mean(surrogate.clipped.to(kl.dtype)),
        "policy/approx_kl": mean(ratio_kl(surrogate.log_ratio)),
        "reference/kl": mean(kl).detach(),
    }


def _metrics(surrogate: Surrogate, count: Count | None) -> Metrics:
    """Share of clipped actions, and the mean of ``(r - 1) - log r``, an estimate of the KL to the old policy."""
    assert surrogate.log_ratio is not None
    assert surrogate.clipped is not None
    clipped, mask = surrogate.clipped.to(surrogate.log_ratio.dtype), surrogate.mask
    return {
        "policy/clip_frac": masked_mean(clipped, mask, count=count),
        "policy/approx_kl": masked_mean(ratio_kl(surrogate.log_ratio), mask, count=count),
    }
