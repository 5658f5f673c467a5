"""Losses over preferences: reward models (pairs, rankings, best of K) and direct preference optimisation.

Each returns ``(loss, metrics)`` divided by an explicit count (``num_pairs``, ``num_prompts``) of the whole optimizer
step, so the results of micro-batches add up to those of the whole batch. A count of None is the count of the call
itself. Gradients flow only into the scores or log-probs of the model in training.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from heedful.core.masking import Count, at_least_float32, one_number, rightness, same_shape
from heedful.core.policy_losses import Metrics, Scalar

__all__ = ["dpo_loss", "pairwise_reward_loss", "ranking_reward_loss"]


def pairwise_reward_loss(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    *,
    num_pairs: Count | None = None,
    margin: Float[Tensor, " pairs"] | None = None,
    center_coef: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Scalar, Metrics]:
    """Bradley-Terry loss of a reward model on pairs (Ouyang et al. 2022, eq. 1, for K = 2).

        d = chosen - rejected - margin
        L = 1/N sum [-(1 - label_smoothing) log sigmoid(d) - label_smoothing log sigmoid(-d)
                     + center_coef (chosen + rejected)^2]

    Args:
        chosen, rejected: scores of the better and the worse response of each pair.
        num_pairs: N, number of pairs of the whole optimizer step.
        margin: wanted score difference of each pair (Touvron et al. 2023, Llama 2, eq. 2).
        center_coef: weight of the penalty that centres scores at 0 (Eisenstein et al. 2023).
        label_smoothing: assumed probability that a label is wrong.

    Metrics: ``reward/accuracy`` (strictly greater: a tie is wrong) and ``reward/margin`` (mean of chosen - rejected).
    """
    same_shape(1, chosen=chosen, rejected=rejected, margin=margin)
    one_number(num_pairs=num_pairs)
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    count = chosen.shape[0] if num_pairs is None else num_pairs
    per_pair, difference = _bradley_terry(chosen, rejected, margin, center_coef, label_smoothing)
    loss = per_pair.sum() / count
    return loss, {
        "loss/reward": loss.detach(),
        "reward/accuracy": (difference.detach() > 0).to(loss.dtype).sum() / count,
        "reward/margin": difference.detach().sum() / count,
    }


def ranking_reward_loss(
    scores: Float[Tensor, " n"],
    ranks: Int[Tensor, " n"],
    groups: Int[Tensor, " n"],
    *,
    num_prompts: Count | None = None,
    margin: Float[Tensor, " n"] | None = None,
    center_coef: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Scalar, Metrics]:
    """K-wise reward loss (Ouyang et al. 2022, eq. 1): the mean over each prompt's pairs, then over prompts.

        L = 1/P sum_p 1/|pairs_p| sum_{(w, l) in pairs_p} loss(w, l)

    A pair's loss is that of `pairwise_reward_loss`, by default -log sigmoid(s_w - s_l). With two responses per prompt
    the value is exactly that of `pairwise_reward_loss`.

    Args:
        scores: one score per response.
        ranks: a lower rank is better; equal ranks tie and make no pair. On the host if no device is to be waited for, as are
            ``groups`` and ``margin``.
        groups: index of each response's prompt.
        num_prompts: P, number of prompts of the whole optimizer step with at least one pair.
        margin: for each response, the margin of the pairs in which it is the better one.
        center_coef, label_smoothing: as in `pairwise_reward_loss`.

    Metrics, averaged like the loss: ``reward/accuracy`` (share of pairs in the right order) and ``reward/margin`` (mean
    of s_w - s_l).
    """
    same_shape(1, scores=scores, ranks=ranks, groups=groups, margin=margin)
    one_number(num_prompts=num_prompts)
    scores = at_least_float32(scores)
    better = (groups.unsqueeze(1) == groups.unsqueeze(0)) & (ranks.unsqueeze(1) < ranks.unsqueeze(0))
    _, group_index = groups.unique(return_inverse=True)
    num_groups = int(group_index.max()) + 1 if len(group_index) else 0
    winner, loser = better.nonzero(as_tuple=True)
    pair_group = group_index[winner]
    pairs = torch.bincount(pair_group, minlength=num_groups)
    count = (pairs > 0).sum() if num_prompts is None else num_prompts
    weight = 1.0 / pairs[pair_group].to(scores.dtype)
    margins = None if margin is None else _beside(scores, margin[winner])
    winner, loser, weight = (_beside(scores, x) for x in (winner, loser, weight))
    per_pair, difference = _bradley_terry(scores[winner], scores[loser], margins, center_coef, label_smoothing)
    loss = (weight * per_pair).sum() / count
    return loss, {
        "loss/reward": loss.detach(),
        "reward/accuracy": (weight * (difference.detach() > 0)).sum() / count,
        "reward/margin": (weight * difference.detach()).sum() / count,
    }


def _beside(scores: Tensor, numbers: Tensor) -> Tensor:
    """Numbers on the device of the scores. MPS reads the host's memory later than it says."""
    return numbers.to(scores.device, non_blocking=scores.device.type != "mps")


def _bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None, center_coef: float, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """The loss of each pair as in `pairwise_reward_loss`, and chosen - rejected."""
    difference = chosen - rejected
    logit = difference if margin is None else difference - margin.detach()
    per_pair = -(1 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)
    return per_pair + center_coef * (chosen + rejected).square(), difference


def dpo_loss(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    ref_chosen: Float[Tensor, " pairs"],
    ref_rejected: Float[Tensor, " pairs"],
    *,
    beta: float,
    kind: Literal["sigmoid", "robust", "ipo", "hinge"] = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_tokens: Int[Tensor, " pairs"] | None = None,
    rejected_tokens: Int[Tensor, " pairs"] | None = None,
    num_pairs: Count | None = None,
) -> tuple[Scalar, Metrics]:
    """Direct preference optimisation on response log-probs *summed* over tokens (Rafailov et al. 2023, eq. 7).

        h = (chosen - ref_chosen) / chosen_tokens - (rejected - ref_rejected) / rejected_tokens
        "sigmoid"  -(1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h)
        "robust"   (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)    e = label_smoothing
        "ipo"      (h - 1 / (2 beta))^2                        (Azar et al. 2023, eq. 17)
        "hinge"    max(0, 1 - beta h)                          (Zhao et al. 2023, SLiC, as in TRL)

    Without ``chosen_tokens`` and ``rejected_tokens`` log-ratios are not divided: h is DPO's.

    Args:
        chosen, rejected: summed log-probs of the better and the worse response under the policy.
        ref_chosen, ref_rejected: the same under the reference.
        beta: strength of the pull towards the reference.
        kind: the loss. The IPO paper does not divide by lengths; its authors' code, TRL, `heedful.train_dpo` and
            `heedful.train_online_dpo` do.
        label_smoothing: assumed probability that a label is wrong. "sigmoid" smooths the target (conservative DPO,
            Mitchell 2023). "robust" is unbiased: its expectation over such label noise is the loss of the true labels
            (Chowdhury et al. 2024); needs a value below 1/2.
        chosen_tokens, rejected_tokens: lengths by which the log-ratios are divided, for length-normalised DPO (Lambert
            et al. 2024, "Tulu 3"). Long responses then have no larger weight than short ones.
        num_pairs: number of pairs of the whole optimizer step.

    Metrics: implicit rewards ``beta * (policy - reference)`` of both sides, their difference and its accuracy
    (a tie counts half, as all pairs do before the first update).

    Raises ValueError for any other ``kind``, for label smoothing with a kind other than "sigmoid" and "robust" or too
    large for the latter, or if only one of ``chosen_tokens`` and ``rejected_tokens`` is given.
    """
    same_shape(1, chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    same_shape(chosen=chosen, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)
    one_number(num_pairs=num_pairs)
    chosen_ratio = at_least_float32(chosen) - at_least_float32(ref_chosen.detach())
    rejected_ratio = at_least_float32(rejected) - at_least_float32(ref_rejected.detach())
    if (chosen_tokens is None) != (rejected_tokens is None):
        raise ValueError("dpo_loss: chosen_tokens and rejected_tokens go together, got one of the two")
    if chosen_tokens is not None and rejected_tokens is not None:
        chosen_ratio, rejected_ratio = chosen_ratio / chosen_tokens, rejected_ratio / rejected_tokens
    h = chosen_ratio - rejected_ratio
    if label_smoothing and kind not in ("sigmoid", "robust"):
        raise ValueError(f"dpo_loss: label_smoothing belongs to kind 'sigmoid' or 'robust', got kind {kind!r}")
    if kind == "sigmoid":
        per_pair = -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)
    elif kind == "robust":
        if label_smoothing >= 0.5:
            raise ValueError(f"dpo_loss: kind 'robust' needs label_smoothing below 0.5, got {label_smoothing}")
        hedged = -(1 - label_smoothing) * logsigmoid(beta * h) + label_smoothing * logsigmoid(-beta * h)
        per_pair = hedged / (1 - 2 * label_smoothing)
    elif kind == "ipo":
        per_pair = (h - 1 / (2 * beta)).square()
    elif kind == "hinge":
        per_pair = torch.relu(1 - beta * h)
    else:
        raise ValueError(f"dpo_loss: kind is {kind!r}; choose 'sigmoid', 'robust', 'ipo' or 'hinge'")
    count = h.shape[0] if num_pairs is None else num_pairs
    loss = per_pair.sum() / count
    return loss, {
        "loss/dpo": loss.detach(),
        "reward/chosen": beta * chosen_ratio.detach().sum() / count,
        "reward/rejected": beta * rejected_ratio.detach().sum() / count,
        "reward/margin": beta * h.detach().sum() / count,
        "reward/accuracy": rightness(h).sum() / count,
    }
