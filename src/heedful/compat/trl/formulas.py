"""The formulas of TRL's PPO that differ from `heedful.core`: pure functions, and one running mean.

Shapes: B responses, T predicted tokens (a sequence's tokens but the first), V vocabulary. Masks are boolean, True at the
response's tokens. Positions outside the mask do not enter means, but some of these formulas compute numbers there too, as
TRL does: the stats show them, and `scaled_rewards` lets them reach advantages.
"""

import torch
from torch import Tensor

from heedful import core

__all__ = ["RunningMoments", "advantages_and_returns", "kl_penalty", "masked_var", "scaled_rewards", "token_rewards"]


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """The KL penalty of each token, in nats, from its log-prob d = policy - reference.

        kl      d                               unbiased, may be negative
        abs     |d|
        mse     d^2 / 2
        full    sum_v p_v (log p_v - log q_v)   the exact KL of the next token, p of the policy and q of the reference

    Args:
        logprobs: [B, T] of the sampled tokens; for "full" [B, T, V] of the whole vocabulary.
        ref_logprobs: the same of the reference.
        kind: the penalty, as above.

    Returns [B, T].
    """
    if kind == "full":
        return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)
    difference = core.kl_estimate(logprobs, ref_logprobs, kind="k2" if kind == "mse" else "k1")
    return difference.abs() if kind == "abs" else difference


def token_rewards(scores: Tensor, penalty: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """``r_t = -kl_coef * penalty_t``, plus the score at each response's last token: the last one inside the mask.

    Zero outside the mask. `heedful.core.kl_shaped_rewards` is the same for the penalties "kl" and "mse".
    """
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
    rewards = torch.where(mask, -kl_coef * penalty, 0.0)
    rewards[torch.arange(len(mask), device=mask.device), last] += scores
    return rewards


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Variance inside the mask with Bessel's correction: ``sum (x - mean)^2 / (n - 1)``. NaN or infinity for n = 1.

    `heedful.core.masked_var` divides by n.
    """
    count = mask.sum()
    return core.masked_var(x, mask) * count / (count - 1)


def scaled_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """``(r - mean) / sqrt(var + 1e-8) + mean``, with mean and variance inside the mask (``whiten_rewards``).

    It is applied outside the mask as well: the rewards of 0 there become ``mean * (1 - 1 / sqrt(var + 1e-8))``, which
    `advantages_and_returns` carries from the padding and the holes into the response's advantages. `heedful.core.rescale`
    leaves 0 there.
    """
    mean = core.masked_mean(rewards, mask)
    return (rewards - mean) * torch.rsqrt(masked_var(rewards, mask) + 1e-8) + mean


def advantages_and_returns(
    values: Tensor, rewards: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over all T positions, where values outside the mask are 0; whitened advantages.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1}
        R_t = A_t + V_t
        whitened: (A_t - mean) / sqrt(var + 1e-8), mean and variance inside the mask, with Bessel's correction

    A hole of a response mask is a step like others, in a state of value 0: the token before it bootstraps from 0, and
    advantages decay by ``gamma lam`` for each token of the hole. `heedful.core.gae` with a mask skips holes: V and A carry
    over them.

    Args:
        values: of the state before each token.
        rewards: of each token.

    Returns advantages and returns, [B, T].
    """
    everywhere = torch.ones_like(mask)
    values = torch.where(mask, values, 0.0)
    advantages, returns = core.gae(rewards, values, everywhere, gamma=gamma, gae_lambda=lam)
    mean, var = core.masked_mean(advantages, mask), masked_var(advantages, mask)
    return (advantages - mean) * torch.rsqrt(var + 1e-8), returns


class RunningMoments:
    """Mean and standard deviation of all scores so far (Chan et al. 1979, the parallel update).

        mean <- mean + delta n_b / (n + n_b)                      delta: mean of the batch - mean
        n var <- n var + n_b var_b + delta^2 n n_b / (n + n_b)

    ``std`` is with Bessel's correction.
    """

    def __init__(self) -> None:
        self.mean, self.std, self.var, self.count = 0.0, 1.0, 1.0, 0

    def update(self, scores: Tensor) -> None:
        """Count a batch of scores, of all processes."""
        count, total = len(scores), self.count + len(scores)
        delta = float(scores.mean()) - self.mean
        square = self.var * self.count + float(scores.var(correction=0)) * count + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.var, self.count = square / total, total
        self.std = (square / (total - 1)) ** 0.5
