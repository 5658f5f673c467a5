"""Direct preference losses besides DPO: SimPO and ORPO without a reference, KTO without pairs.

Each returns ``(loss, metrics)`` divided by an explicit count of the whole optimizer step (``num_pairs``,
``num_responses``), so the results of micro-batches add up to those of the whole batch. A count of None is the count of
the call itself. Gradients flow only into the log-probs of the policy in training.

Arguments shared by the pairwise losses:
    chosen, rejected: log-probs of the better and the worse response under the policy, summed over tokens.
    chosen_tokens, rejected_tokens: lengths of the responses in tokens, by which the sums are divided.
    num_pairs: number of pairs of the whole optimizer step.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from heedful.core.masking import Count, at_least_float32, one_number, rightness, same_shape
from heedful.core.policy_losses import Metrics, Scalar

__all__ = ["kto_loss", "orpo_loss", "simpo_loss"]

SMALLEST_REST = 2.0**-23
"""Lower bound of 1 - p in ORPO's odds: the resolution of float32 near 1."""


def simpo_loss(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    chosen_tokens: Int[Tensor, " pairs"],
    rejected_tokens: Int[Tensor, " pairs"],
    *,
    beta: float,
    target_margin: float,
    num_pairs: Count | None = None,
) -> tuple[Scalar, Metrics]:
    """SimPO (Meng et al. 2024, eq. 6): the mean log-prob per token is the reward, and there is no reference.

        r = log pi(y | x) / |y|
        L = -1/N sum log sigmoid(beta (r_chosen - r_rejected - target_margin))

    Args:
        beta: factor of the reward.
        target_margin: wanted lead of the chosen response's mean log-prob over the rejected one's, in nats per token:
            the paper's gamma / beta.

    Metrics: rewards ``beta r`` of both sides, their difference (without the target) and its accuracy.
    """
    same_shape(1, chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)
    one_number(num_pairs=num_pairs)
    chosen_mean, rejected_mean = _per_token(chosen, chosen_tokens), _per_token(rejected, rejected_tokens)
    count = chosen.shape[0] if num_pairs is None else num_pairs
    loss = -logsigmoid(beta * (chosen_mean - rejected_mean - target_margin)).sum() / count
    return loss, {"loss/simpo": loss.detach(), **_pair_metrics(beta * chosen_mean, beta * rejected_mean, count)}


def orpo_loss(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    chosen_tokens: Int[Tensor, " pairs"],
    rejected_tokens: Int[Tensor, " pairs"],
    *,
    beta: float,
    num_pairs: Count | None = None,
) -> tuple[Scalar, Metrics]:
    """The odds-ratio term of ORPO (Hong et al. 2024, eq. 4, 6 and 7); the whole loss adds `sft_loss` of the chosen responses.

        log p = log pi(y | x) / |y|          log odds = log p - log(1 - p)
        L = -beta/N sum log sigmoid(log odds_chosen - log odds_rejected)

    p is a geometric mean over tokens, so the odds do not depend on the length.

    Args:
        beta: weight of the term, the paper's lambda.

    Metrics: the log odds of both sides as their rewards, so ``reward/margin`` is the log odds ratio; and its accuracy.

    1 - p is bounded below by `SMALLEST_REST`, so the odds stay finite as p approaches 1.
    """
    same_shape(1, chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)
    one_number(num_pairs=num_pairs)
    chosen_odds = _log_odds(_per_token(chosen, chosen_tokens))
    rejected_odds = _log_odds(_per_token(rejected, rejected_tokens))
    count = chosen.shape[0] if num_pairs is None else num_pairs
    loss = -beta * logsigmoid(chosen_odds - rejected_odds).sum() / count
    return loss, {"loss/orpo": loss.detach(), **_pair_metrics(chosen_odds, rejected_odds, count)}


def kto_loss(
    logprobs: Float[Tensor, " n"],
    ref_logprobs: Float[Tensor, " n"],
    desirable: Bool[Tensor, " n"],
    *,
    beta: float,
    kl: float | Float[Tensor, ""],
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    num_responses: Count | None = None,
    num_desirable: Count | None = None,
) -> tuple[Scalar, Metrics]:
    """KTO (Ethayarajh et al. 2024, eq. 8): single responses labelled good or bad, without pairs.

        r = log pi(y | x) - log ref(y | x)                           z0 = max(0, kl)
        L = 1/N sum w (1 - sigmoid(s beta (r - z0)))                 s = 1 if desirable, else -1

    The loss raises the log-ratio r of good responses above the reference point z0 and lowers that of bad ones below it.
    The gradient vanishes far from z0 on either side.

    Args:
        logprobs, ref_logprobs: log-probs of the responses, summed over tokens, under the policy and the reference.
        desirable: True for good responses.
        beta: strength of the pull towards the reference.
        kl: estimate of the KL to the reference, in nats per response: the mean of r over the step's prompts, each with
            a response to another prompt. A constant; a negative estimate counts as 0.
        desirable_weight, undesirable_weight: w of good and of bad responses, the paper's lambda_D and lambda_U.
        num_responses: N, number of responses of the whole optimizer step.
        num_desirable: number of good ones among them.

    Metrics: mean implicit reward ``beta r`` of the good responses (``reward/chosen``) and of the bad ones
    (``reward/rejected``), and their difference, each absent in a step without such responses; and
    ``reward/accuracy``, the share of responses on the right side of z0 (exactly at z0 counts half).
    """
    same_shape(1, logprobs=logprobs, ref_logprobs=ref_logprobs, desirable=desirable)
    one_number(kl=kl, num_responses=num_responses, num_desirable=num_desirable)
    ratio = at_least_float32(logprobs) - at_least_float32(ref_logprobs.detach())
    # A number stays on the host, where no device waits for it.
    z0 = torch.as_tensor(kl, dtype=ratio.dtype).detach().clamp_min(0)
    count = ratio.shape[0] if num_responses is None else num_responses
    good = desirable.sum() if num_desirable is None else num_desirable
    gain = torch.where(desirable, ratio - z0, z0 - ratio)
    of_good, of_bad = (ratio.new_full((), weight) for weight in (desirable_weight, undesirable_weight))
    weight = torch.where(desirable, of_good, of_bad)
    loss = (weight * torch.sigmoid(-beta * gain)).sum() / count
    metrics = {"loss/kto": loss.detach(), "reward/accuracy": rightness(gain).sum() / count}
    rewards = beta * ratio.detach()
    if good > 0:
        metrics["reward/chosen"] = torch.where(desirable, rewards, 0.0).sum() / good
    if count > good:
        metrics["reward/rejected"] = torch.where(desirable, 0.0, rewards).sum() / (count - good)
    if count > good > 0:
        metrics["reward/margin"] = metrics["reward/chosen"] - metrics["reward/rejected"]
    return loss, metrics


def _per_token(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return at_least_float32(logprobs) / tokens


def _log_odds(mean_logprobs: Tensor) -> Tensor:
    return mean_logprobs - (-torch.expm1(mean_logprobs)).clamp_min(SMALLEST_REST).log()


def _pair_metrics(chosen: Tensor, rejected: Tensor, count: Count) -> Metrics:
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "reward/chosen": chosen.sum() / count,
        "reward/rejected": rejected.sum() / count,
        "reward/margin": (chosen - rejected).sum() / count,
        "reward/accuracy": rightness(chosen - rejected).sum() / count,
    }
