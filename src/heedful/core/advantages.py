"""From scores to per-token rewards, and from rewards to advantages.

No gradient flows through anything here: the losses take rewards, advantages and returns as constants.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heedful.core.logprobs import KLKind, kl_estimate
from heedful.core.masking import at_least_float32, first_in_mask, one_per_row, same_shape

__all__ = [
    "adaptive_lambda",
    "gae",
    "group_advantages",
    "kl_shaped_rewards",
    "others_mean",
    "response_rewards",
    "rewards_to_go",
    "rloo_advantages",
    "tied_groups",
]


@torch.no_grad()
def kl_shaped_rewards(
    scores: Float[Tensor, " batch"] | Float[Tensor, "batch time"],
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
    *,
    kl_coef: float,
    kind: KLKind = "k1",
) -> Float[Tensor, "batch time"]:
    """Per-token rewards: a KL penalty on every token, and the score on the last one (Ouyang et al. 2022, eq. 2).

        r_t = -kl_coef * kl_t + [t is the last response token] * score

    Args:
        scores: one score per response, or dense scores ``[batch, time]``, which are added token by token.
        logprobs: log-probs of the policy that sampled the responses.
        ref_logprobs: log-probs of the same tokens under the reference.
        response_mask: True at response tokens.
        kl_coef: KL penalty coefficient, in score units per nat.
        kind: the estimate of ``kl_t``, see `kl_estimate`. With k1 the expected sum is the score minus kl_coef times the
            KL.

    Returns rewards, zero outside the mask. Raises ValueError if a row has a score but no response token to put it on.
    """
    same_shape(2, logprobs=logprobs, ref_logprobs=ref_logprobs, response_mask=response_mask)
    kl = kl_estimate(logprobs, ref_logprobs, kind=kind)
    if scores.dim() == 2:
        same_shape(scores=scores, response_mask=response_mask)
        placed = at_least_float32(scores)
    else:
        one_per_row(scores=scores, response_mask=response_mask)
        if not bool(response_mask.any(dim=1).all()):
            raise ValueError("kl_shaped_rewards: a row has no response token to put its score on")
        time = torch.arange(response_mask.shape[1], device=response_mask.device)
        last = torch.where(response_mask, time, -1).amax(dim=1, keepdim=True)
        placed = torch.where(time == last, at_least_float32(scores).unsqueeze(1), 0.0)
    return torch.where(response_mask, placed - kl_coef * kl, 0.0)


@torch.no_grad()
def response_rewards(
    rewards: Float[Tensor, "batch time"], response_mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """Rewards for treating the whole response as one action: each row's sum at its first token, zeros elsewhere.

        r_i = sum_t r_{i,t} = score_i - kl_coef * sum_t kl_{i,t}

    Args:
        rewards: per-token rewards, for example from `kl_shaped_rewards`.
        response_mask: True at response tokens.

    With ``first_in_mask(response_mask)`` as its mask, `gae` then has one step per row: ``A_i = r_i - V_i`` and the
    return ``r_i``, where V_i is the value of the prompt. ``gamma`` and ``gae_lambda`` have no effect. This is the
    contextual bandit of Ahmadian et al. 2024.
    """
    same_shape(2, rewards=rewards, response_mask=response_mask)
    total = torch.where(response_mask, at_least_float32(rewards), 0.0).sum(dim=1, keepdim=True)
    return torch.where(first_in_mask(response_mask), total, 0.0)


@torch.no_grad()
def gae(
    rewards: Float[Tensor, "batch time"],
    values: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
    *,
    gamma: float = 1.0,
    gae_lambda: float | Float[Tensor, " batch"] = 0.95,
) -> tuple[Float[Tensor, "batch time"], Float[Tensor, "batch time"]]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), and the returns ``A_t + V_t``.

        delta_t = r_t + gamma V_{t+1} - V_t          V is 0 after the last response token
        A_t = delta_t + gamma gae_lambda A_{t+1} = sum_{k >= t} (gamma gae_lambda)^(k-t) delta_k

    Args:
        rewards: reward of each token.
        values: value of the state *before* each token.
        response_mask: True at response tokens, the time steps. Gaps (tool tokens) are skipped: V and A carry over them.
        gamma: discount factor per token.
        gae_lambda: 0 bootstraps from the critic after one token (low variance, biased by its errors); 1 uses only
            rewards (high variance, unbiased). A tensor has one for each row, such as `adaptive_lambda`.

    Returns unwhitened advantages, and returns; both are zero outside the mask. A response cut at the length limit is
    not bootstrapped.
    """
    same_shape(2, rewards=rewards, values=values, response_mask=response_mask)
    rewards, values = at_least_float32(rewards), at_least_float32(values)
    if isinstance(gae_lambda, Tensor):
        one_per_row(gae_lambda=gae_lambda, response_mask=response_mask)
        gae_lambda = at_least_float32(gae_lambda).unsqueeze(1)
    place = (response_mask.cumsum(dim=1) - 1).clamp(min=0)  # index among the row's response tokens

    def compact(x: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_add(1, place, torch.where(response_mask, x, 0.0))

    v = compact(values)
    advantages = compact(rewards) + gamma * nn.functional.pad(v[:, 1:], (0, 1)) - v
    decay, span = gamma * gae_lambda, 1
    while span < advantages.shape[1]:  # sum over 2 * span steps = sum over span steps + decayed sum over the next span
        advantages[:, :-span] += decay * advantages[:, span:]
        decay, span = decay * decay, 2 * span  # torch rounds powers of a tensor differently by the number of rows
    advantages = torch.where(response_mask, advantages.gather(1, place), 0.0)
    return advantages, torch.where(response_mask, advantages + values, 0.0)


@torch.no_grad()
def adaptive_lambda(lengths: Int[Tensor, " batch"], *, alpha: float) -> Float[Tensor, " batch"]:
    """The lambda of each response by its length (Yue et al. 2025, VAPO, eq. 8), for the advantages of `gae`.

        lambda_i = max(0, 1 - 1 / (alpha l_i))

    The weights ``lambda^k`` of the errors ``delta`` sum to ``1 / (1 - lambda) = alpha l``: each advantage reads a share
    alpha of its response, whatever its length. alpha is 0.05 in VAPO, for answers of hundreds of tokens: 0 up to 20 actions,
    0.8 at 100, 0.95 at 400, 0.98 at 1,000. With 1.5 it is 0.97 at 20.

    Args:
        lengths: number of actions of each response.
        alpha: above 0.

    Returns float32 in [0, 1): 0 for responses of at most ``1 / alpha`` actions. Raises ValueError unless alpha is above 0.
    """
    if not alpha > 0:
        raise ValueError(f"adaptive_lambda: alpha must be above 0, got {alpha}")
    same_shape(1, lengths=lengths)
    return (1 - 1 / (alpha * lengths.clamp(min=1).float())).clamp(min=0)


@torch.no_grad()
def rewards_to_go(
    rewards: Float[Tensor, "batch time"], response_mask: Bool[Tensor, "batch time"], *, gamma: float = 1.0
) -> Float[Tensor, "batch time"]:
    """Monte Carlo returns: the rewards that did come from each token on, which no value is part of.

        G_t = sum_{k >= t} gamma^(k-t) r_k                 the returns of `gae` at lambda 1, whatever the values

    Args:
        rewards: reward of each token.
        response_mask: True at response tokens, the time steps.
        gamma: discount factor per token.

    Returns zero outside the mask.
    """
    nothing = torch.zeros_like(rewards)
    return gae(rewards, nothing, response_mask, gamma=gamma, gae_lambda=1.0)[0]


@torch.no_grad()
def group_advantages(
    scores: Float[Tensor, " batch"],
    *,
    group_size: int,
    scale: Literal["std", "none"] = "std",
    eps: float = 1e-4,
) -> Float[Tensor, " batch"]:
    """Scores relative to their group (Shao et al. 2024, GRPO, section 4.1.2): ``A_i = (s_i - mean) / (std + eps)``.

    Args:
        scores: one score per response; rows ``[k * group_size, (k + 1) * group_size)`` are group k, all of one prompt.
        group_size: number of responses per group, at least 2.
        scale: "std" divides by the sample standard deviation (over group_size - 1); "none" does not divide (Liu et al.
            2025, Dr. GRPO).
        eps: added to the standard deviation.

    A group of equal scores has advantages of exactly 0.

    Raises ValueError if the number of rows is not a multiple of ``group_size``, or ``group_size`` is less than 2.
    """
    groups = _grouped(scores, group_size, "group_advantages")
    centred = groups - groups.mean(dim=1, keepdim=True)
    if scale == "std":
        centred = centred / (groups.std(dim=1, keepdim=True) + eps)
    elif scale != "none":
        raise ValueError(f"group_advantages: scale is {scale!r}; choose 'std' or 'none'")
    return torch.where(_is_tied(groups), 0.0, centred).flatten()


@torch.no_grad()
def rloo_advantages(scores: Float[Tensor, " batch"], *, group_size: int) -> Float[Tensor, " batch"]:
    """Leave-one-out advantages (Ahmadian et al. 2024, RLOO, eq. 8): ``A_i = s_i - mean of its group's other scores``.

    Equal to ``k / (k - 1) * (s_i - mean)`` for groups of k.

    Args:
        scores: one score per response; consecutive rows share a prompt.
        group_size: number of responses per group, at least 2.

    A group of equal scores has advantages of exactly 0.

    Raises ValueError if the number of rows is not a multiple of ``group_size``, or ``group_size`` is less than 2.
    """
    groups = _grouped(scores, group_size, "rloo_advantages")
    others = others_mean(scores, group_size=group_size).view_as(groups)
    return torch.where(_is_tied(groups), 0.0, groups - others).flatten()


@torch.no_grad()
def others_mean(returns: Float[Tensor, " batch"], *, group_size: int) -> Float[Tensor, " batch"]:
    """The mean return of the other responses to the same prompt: what a group predicts without a critic.

    Arguments and errors as in `rloo_advantages`, whose baseline it is.
    """
    groups = _grouped(returns, group_size, "others_mean")
    return ((groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)).flatten()


def tied_groups(scores: Float[Tensor, " batch"], *, group_size: int) -> Bool[Tensor, " groups"]:
    """True for groups of ``group_size`` consecutive scores that are all equal: their advantages are 0."""
    same_shape(1, scores=scores)
    return _is_tied(scores.unflatten(0, (-1, group_size))).squeeze(1)


def _is_tied(groups: Float[Tensor, "groups size"]) -> Bool[Tensor, "groups 1"]:
    """True for groups of equal scores. Compares extremes, since rounding of the mean could leave tiny advantages."""
    return groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)


def _grouped(scores: Tensor, group_size: int, name: str) -> Tensor:
    same_shape(1, scores=scores)
    if group_size < 2:
        raise ValueError(f"{name}: group_size is {group_size}; a group needs at least 2 responses to compare")
    if scores.shape[0] % group_size:
        raise ValueError(f"{name}: {scores.shape[0]} scores cannot be split into groups of {group_size}")
    return at_least_float32(scores).view(-1, group_size)
