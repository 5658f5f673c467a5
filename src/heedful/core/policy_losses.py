"""Losses of the policy and the value function.

Each returns ``(loss, metrics)``: a scalar to minimise, and detached tensors. Both are divided by an explicit count of
the whole optimizer step (``num_tokens``, or the counts of a `Reduction`), so the results of micro-batches add up to
those of the whole batch. A count of None is the count of the call itself. Gradients flow only into ``logprobs`` and
``values``.

Arguments shared by several losses:
    logprobs: log-probs of the response tokens under the policy in training.
    old_logprobs: log-probs under the policy that sampled them.
    advantages: advantages of the tokens (or responses); constants.
    response_mask: True at response tokens.
    clip_range: epsilon: the probability ratio is clipped below 1 - epsilon and, by default, above 1 + epsilon.
    clip_range_high: epsilon of the upper bound; None is ``clip_range``. Yu et al. 2025 (DAPO, eq. 10) set it higher.
    importance_level: level of the probability ratio. "token": one per token. "sequence": one per response, which is
        then one action with the advantage at its first token. "sequence-mean": the same with the geometric mean over
        its tokens. reduction: reduces the objective of tokens, or of responses, to one number.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.core.masking import Count, at_least_float32, masked_mean, one_number, one_per_row, same_shape
from heedful.core.surrogates import (
    Bounds,
    Surrogate,
    cispo,
    clipped_ratio,
    clipped_sequence_ratio,
    double_sided,
    policy_gradient,
    ratio_kl,
    sequence_policy_gradient,
)

__all__ = [
    "Reduction",
    "a2c_policy_loss",
    "cispo_policy_loss",
    "positive_example_loss",
    "ppo_policy_loss",
    "sao_policy_loss",
    "sft_loss",
    "value_loss",
]

Metrics = dict[str, Tensor]
Scalar = Float[Tensor, ""]
ImportanceLevel = Literal["token", "sequence", "sequence-mean"]
LARGEST_LOG_RATIO = 40.0
"""Upper bound of log-ratios in ``policy/ratio_square``, to avoid overflow."""


class Reduction(NamedTuple):
    """Reduction of numbers per token to one (``--loss-reduction``).

        "token"     1/num_tokens sum_i sum_t x_t                           (PPO; Yu et al. 2025, DAPO)
        "sequence"  1/num_sequences sum_i 1/|o_i| sum_t x_t                (Shao et al. 2024, GRPO)
        "fixed"     1/(num_sequences * max_new_tokens) sum_i sum_t x_t     (Liu et al. 2025, Dr. GRPO)

    Counts are of the whole optimizer step, so that micro-batches add up; None means those of the call itself.
    """

    how: Literal["token", "sequence", "fixed"] = "token"
    num_tokens: Count | None = None
    """Number of response tokens."""
    num_sequences: Count | None = None
    """Number of responses."""
    max_new_tokens: int | None = None
    """The longest response allowed, in tokens; only for "fixed"."""

    def tokens(self, x: Float[Tensor, "*shape"], response_mask: Bool[Tensor, "*shape"]) -> Scalar:
        """Reduce numbers per token to one.

        Raises ValueError for an unknown ``how``, or "fixed" without ``max_new_tokens``.
        """
        if self.how == "token":
            return masked_mean(x, response_mask, count=self.num_tokens)
        same_shape(x=x, response_mask=response_mask)
        one_number(num_sequences=self.num_sequences)
        x = at_least_float32(x)
        mask = response_mask.to(x.dtype)
        sequences = mask.any(dim=1).sum() if self.num_sequences is None else self.num_sequences
        if self.how == "sequence":
            weights = mask / mask.sum(dim=1, keepdim=True).clamp_min(1) / sequences
        elif self.how == "fixed":
            if self.max_new_tokens is None:
                raise ValueError("Reduction: how='fixed' divides by max_new_tokens; pass it")
            weights = mask / (sequences * self.max_new_tokens)
        else:
            raise ValueError(f"Reduction: how is {self.how!r}; choose 'sequence', 'token' or 'fixed'")
        return (weights * torch.where(response_mask, x, 0.0)).sum()

    def sequences(self, x: Float[Tensor, " batch"], mask: Bool[Tensor, " batch"]) -> Scalar:
        """The mean of numbers per response."""
        return masked_mean(x, mask, count=self.num_sequences)


PER_TOKEN = Reduction()
"""The mean over the tokens of the call."""


def sft_loss(
    logprobs: Float[Tensor, "*shape"], response_mask: Bool[Tensor, "*shape"], *, num_tokens: Count | None = None
) -> tuple[Scalar, Metrics]:
    """Negative log-likelihood of the response tokens, in nats per token: ``L = -1/N sum_t logprobs_t``.

    N is ``num_tokens``. Equal to ``torch.nn.functional.cross_entropy`` with ``ignore_index`` outside the mask.
    """
    same_shape(logprobs=logprobs, response_mask=response_mask)
    loss = -masked_mean(logprobs, response_mask, count=num_tokens)
    return loss, {"loss/sft": loss.detach()}


def ppo_policy_loss(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    importance_level: ImportanceLevel = "token",
    reduction: Reduction = PER_TOKEN,
) -> tuple[Scalar, Metrics]:
    """Clipped surrogate policy loss (Schulman et al. 2017, eq. 7), to be minimised.

        L = -1/N sum_t min(r_t A_t, clip(r_t, 1 - clip_range, 1 + clip_range_high) A_t),   r_t = exp(new - old log-prob)

    With ``importance_level`` "sequence" the sum is over responses, with ``r_i = exp(sum_t (new - old log-prob))`` (RLOO,
    bandit PPO); with "sequence-mean" ``r_i = exp(1/|o_i| sum_t (new - old log-prob))`` (Zheng et al. 2025, GSPO, eq.
    7). GRPO's loss (Shao et al. 2024, eq. 3) is this one with ``Reduction("sequence")``, plus ``kl_coef`` times the
    same average of `kl_estimate`.

    Args:
        dual_clip: c > 1; if ``A_t < 0``, the objective is at least ``c A_t`` (Ye et al. 2020, eq. 5).

    Metrics: see `_ratio_metrics`.
    """
    bounds = Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high, dual_clip)
    if importance_level == "token":
        surrogate = clipped_ratio(logprobs, old_logprobs, advantages, response_mask, bounds)
        return _policy_loss(surrogate, reduction.tokens, reduction.num_tokens)
    if importance_level not in ("sequence", "sequence-mean"):
        raise ValueError(
            f"ppo_policy_loss: importance_level is {importance_level!r}; choose 'token', 'sequence' or 'sequence-mean'"
        )
    by_length = importance_level == "sequence-mean"
    surrogate = clipped_sequence_ratio(
        logprobs, old_logprobs, advantages, response_mask, bounds, length_normalise=by_length
    )
    return _policy_loss(surrogate, reduction.sequences, reduction.num_sequences)


def cispo_policy_loss(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    reduction: Reduction = PER_TOKEN,
) -> tuple[Scalar, Metrics]:
    """The clipped ratio as a constant weight of the policy gradient (MiniMax 2025, "MiniMax-M1", eq. 4 and 5).

        L = -1/N sum_t sg(clip(r_t, 1 - clip_range, 1 + clip_range_high)) A_t log pi_t

    Metrics: see `_ratio_metrics`.
    """
    bounds = Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high)
    surrogate = cispo(logprobs, old_logprobs, advantages, response_mask, bounds)
    return _policy_loss(surrogate, reduction.tokens, reduction.num_tokens)


def sao_policy_loss(
    logprobs: Float[Tensor, "*shape"],
    sampler_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    reduction: Reduction = PER_TOKEN,
) -> tuple[Scalar, Metrics]:
    """The ratio to the sampler as a constant weight, 0 outside strict bounds (SAO 2026, arXiv 2607.07508, eq. 3).

        L = -1/N sum_t sg(r_t [1 - clip_range < r_t < 1 + clip_range_high]) A_t log pi_t

    Args:
        sampler_logprobs: log-probs that the sampler recorded, by weights of any age: there is no old pass.
        clip_range, clip_range_high: the bounds; SAO has 0.3 and 5 for reasoning, 0.8 and 3 for code.

    Metrics: see `_ratio_metrics`; ``policy/clip_frac`` is the share of tokens outside the bounds.
    """
    bounds = Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high)
    surrogate = double_sided(logprobs, sampler_logprobs, advantages, response_mask, bounds)
    return _policy_loss(surrogate, reduction.tokens, reduction.num_tokens)


def positive_example_loss(
    logprobs: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
    correct: Bool[Tensor, " batch"],
    *,
    num_tokens: Count | None = None,
) -> tuple[Scalar, Metrics]:
    """Negative log-likelihood of the policy's own correct responses (Yue et al. 2025, VAPO, eq. 11 and 12).

        L = -1/N sum_{i correct} sum_t log pi_t

    Added to the policy loss (VAPO: times 0.1), it imitates what succeeded.

    Args:
        logprobs: as above.
        response_mask: as above.
        correct: True for responses that count.
        num_tokens: N, the number of their tokens in the whole optimizer step; None is that of the call.

    0, with a gradient of 0, if no response is correct.
    """
    one_per_row(correct=correct, response_mask=response_mask)
    mask = response_mask & correct.unsqueeze(1)
    count = mask.sum() if num_tokens is None else torch.as_tensor(num_tokens)
    loss, _ = sft_loss(logprobs, mask, num_tokens=count.clamp(min=1))
    return loss, {"loss/positive": loss.detach()}


def a2c_policy_loss(
    logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    response_mask: Bool[Tensor, "*shape"],
    *,
    importance_level: Literal["token", "sequence"] = "token",
    reduction: Reduction = PER_TOKEN,
) -> tuple[Scalar, Metrics]:
    """Policy gradient loss of advantage actor-critic (Mnih et al. 2016, section 4): ``L = -1/N sum_t A_t log pi_t``.

    With ``importance_level`` "sequence" each response is one action: ``L = -1/N sum_i A_i sum_t log pi_t``.
    """
    if importance_level == "token":
        return _policy_loss(policy_gradient(logprobs, advantages, response_mask), reduction.tokens)
    if importance_level != "sequence":
        raise ValueError(f"a2c_policy_loss: importance_level is {importance_level!r}; choose 'token' or 'sequence'")
    return _policy_loss(sequence_policy_gradient(logprobs, advantages, response_mask), reduction.sequences)


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
        returns: targets of the values.
        clip_range: clip range around the old value, in score units; None is the plain squared error.

    Metric ``value/clip_frac``: the share of tokens whose clipped square is the larger one.
    """
    same_shape(values=values, old_values=old_values, returns=returns, response_mask=response_mask)
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


def _policy_loss(
    surrogate: Surrogate, mean: Callable[[Tensor, Tensor], Tensor], count: Count | None = None
) -> tuple[Scalar, Metrics]:
    """Negative mean objective, and the metrics of its ratio, if any."""
    loss = -mean(surrogate.objective, surrogate.mask)
    return loss, {"loss/policy": loss.detach(), **_ratio_metrics(surrogate, mean, count)}


def _ratio_metrics(surrogate: Surrogate, mean: Callable[[Tensor, Tensor], Tensor], count: Count | None) -> Metrics:
    """Metrics of the probability ratios; empty without a ratio.

    ``policy/clip_frac``: share of actions whose clipped branch is strictly the smaller one; ``_low`` and ``_high``: the
    parts with a ratio below and above 1. ``policy/approx_kl``: mean of ``(r - 1) - log r``, an estimate of the KL to
    the old policy. ``policy/ratio_max``. ``policy/ratio_mean`` and ``_square``: means of ``r`` and ``r^2`` over
    actions.
    """
    log_ratio, mask = surrogate.log_ratio, surrogate.mask
    if log_ratio is None or surrogate.clipped is None:
        return {}
    clipped = surrogate.clipped.to(log_ratio.dtype)
    ratio = torch.where(mask, log_ratio, 0.0).clamp(max=LARGEST_LOG_RATIO).exp()
    return {
        "policy/clip_frac": mean(clipped, mask),
        "policy/approx_kl": mean(ratio_kl(log_ratio), mask),
        "policy/clip_frac_low": mean(clipped * (log_ratio < 0), mask),
        "policy/clip_frac_high": mean(clipped * (log_ratio > 0), mask),
        "policy/ratio_max": torch.where(mask, log_ratio, -torch.inf).max().exp(),
        "policy/ratio_mean": masked_mean(ratio, mask, count=count),
        "policy/ratio_square": masked_mean(ratio.square(), mask, count=count),
    }
