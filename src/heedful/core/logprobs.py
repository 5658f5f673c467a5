"""Log-probabilities, entropy and KL estimates, computed in at least float32 for logits of any dtype."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.core.masking import at_least_float32, one_per_row, same_shape

__all__ = ["entropy", "kl_estimate", "response_kl", "token_logprobs"]

KLKind = Literal["k1", "k2", "k3"]


def token_logprobs(
    logits: Float[Tensor, "*shape vocab"], ids: Int[Tensor, "*shape"], *, temperature: float = 1.0
) -> Float[Tensor, "*shape"]:
    """Log-probability of each token in nats: ``log softmax(logits / temperature)[ids]``.

    Args:
        logits: ``logits[..., t, :]`` must be the prediction *for* ``ids[..., t]``. A model outputs it one position
            earlier, so shift before calling.
        ids: the tokens.
        temperature: part of the policy; use the same one for sampling and for old, new and reference log-probs.
    """
    one_per_row(ids=ids, logits=logits)
    scaled = at_least_float32(logits) / temperature
    return scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def entropy(logits: Float[Tensor, "*shape vocab"], *, temperature: float = 1.0) -> Float[Tensor, "*shape"]:
    """Entropy of each next-token distribution in nats: ``-sum_v p_v log p_v``, ``p = softmax(logits / temperature)``.

    Logits of ``-inf`` (masked vocabulary) contribute 0; value and gradient stay finite.
    """
    logp = torch.log_softmax(at_least_float32(logits) / temperature, dim=-1)
    p = logp.exp()
    return -(p * torch.where(p > 0, logp, 0.0)).sum(-1)


def kl_estimate(
    logprobs: Float[Tensor, "*shape"],
    ref_logprobs: Float[Tensor, "*shape"],
    *,
    kind: KLKind,
    old_logprobs: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Single-sample estimate of ``KL(policy || reference)`` per token, in nats.

    With ``d = logprobs - ref_logprobs`` (Schulman 2020, "Approximating KL Divergence"):

        k1 = d                  unbiased, may be negative
        k2 = d^2 / 2            biased, low variance
        k3 = exp(-d) - 1 + d    unbiased, never negative

    With ``old_logprobs`` the estimate is multiplied by the ratio ``exp(logprobs - old_logprobs)``, gradient included.
    This corrects for tokens that an older policy sampled (DeepSeek-AI 2025, "DeepSeek-V3.2", "unbiased KL estimate",
    with k3).

    Args:
        logprobs: log-probs under the policy of tokens that it sampled.
        ref_logprobs: log-probs of the same tokens under the reference.
        kind: the estimate, as above.
        old_logprobs: log-probs of the same tokens under the policy that sampled them; constants.

    The table is about values. As losses, the estimates differ in their expected gradients: 0 for k1, the gradient of
    ``KL(policy || reference)`` for k2, and that of ``KL(reference || policy)`` for k3. k3 times the ratio has the
    gradient ``ratio * d * grad(logprobs)`` at each token: equal to k2's on policy, and in expectation the gradient of
    ``KL(policy || reference)`` also off policy.

    Raises ValueError for any other ``kind``.
    """
    same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, old_logprobs=old_logprobs)
    d = at_least_float32(logprobs) - at_least_float32(ref_logprobs)
    if old_logprobs is not None:
        ratio = (at_least_float32(logprobs) - at_least_float32(old_logprobs.detach())).exp()
        return ratio * kl_estimate(logprobs, ref_logprobs, kind=kind)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"kl_estimate: kind is {kind!r}; choose 'k1', 'k2' or 'k3'")


def response_kl(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
    *,
    kind: KLKind = "k1",
) -> Float[Tensor, " batch"]:
    """KL to the reference of each response, in nats: `kl_estimate` summed over its tokens.

    With k1, its mean over responses sampled from the policy is an unbiased estimate of the KL between the distributions
    of whole responses (chain rule). Raises ValueError for any other ``kind``.
    """
    same_shape(2, logprobs=logprobs, ref_logprobs=ref_logprobs, response_mask=response_mask)
    return torch.where(response_mask, kl_estimate(logprobs, ref_logprobs, kind=kind), 0.0).sum(dim=1)
