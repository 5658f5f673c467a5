"""Advantage estimators: from a rollout batch's rewards to one advantage per token.

`ADVANTAGES` is the table that ``--advantage`` chooses from. An entry is a function of `Rewards` and the settings, made of
pure functions of `heedful.core`; what it needs is written in `heedful.configs.online.ESTIMATORS`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful import core, user_code
from heedful.configs.online import OnlineConfig
from heedful.engines.rollouts import Rollouts
from heedful.errors import ConfigError

FLAG = "--advantage"


class Rewards(NamedTuple):
    """What an estimator sees of a rollout batch. Rows that share a prompt are consecutive; none is without a score.

    If responses to a prompt are compared, all ``samples_per_prompt`` of each are there."""

    per_token: Float[Tensor, "batch time"]
    """Score, penalties and KL where they fall."""
    per_response: Float[Tensor, " batch"]
    """The same as one number per response."""
    values: Float[Tensor, "batch time"] | None
    """The critic's values of the states before each token; None without a critic."""
    response_mask: Bool[Tensor, "batch time"]


class Estimate(NamedTuple):
    """Advantages ``[batch, time]``, and what the critic should have said; zero outside the response mask."""

    advantages: Float[Tensor, "batch time"]
    returns: Float[Tensor, "batch time"] | None = None


def gae(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """Rewards per token against a critic's values (`core.gae`); or with one step per response."""
    assert rewards.values is not None
    actions = action_mask(rewards.response_mask, config)
    per_token = rewards.per_token
    if config.has_response_actions:
        per_token = core.response_rewards(per_token, rewards.response_mask)
    if config.whiten_rewards:
        per_token = core.rescale(per_token, actions)
    return Estimate(*core.gae(per_token, rewards.values, actions, gamma=config.gamma, gae_lambda=config.gae_lambda))


def grpo(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """Score minus the mean of its prompt's responses, over their standard deviation (`core.group_advantages`)."""
    size = group_size(rewards, config)
    return _spread(core.group_advantages(rewards.per_response, group_size=size), rewards)


def dr_grpo(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """Score minus the mean of its group: the responses to its prompt, or with reinforce the whole rollout batch."""
    size = group_size(rewards, config)
    return _spread(core.group_advantages(rewards.per_response, group_size=size, scale="none"), rewards)


def rloo(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """Score minus the mean of its prompt's other responses (`core.rloo_advantages`)."""
    size = group_size(rewards, config)
    return _spread(core.rloo_advantages(rewards.per_response, group_size=size), rewards)


def reinforce_plus_plus(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """The rewards to come, without a critic (Hu 2025, section 3.1; ``whiten_advantages`` is its normalisation).

        A_t = sum_{k >= t} gamma^(k - t) r_k           r holds the score at the last token and -kl_coef kl_k at each

    It is `core.gae` with values of 0 and lambda 1. With a fixed price on KL and gamma 1 that is the score minus the KL that
    the rest of the response costs.
    """
    per_token = rewards.per_token
    if config.whiten_rewards:
        per_token = core.rescale(per_token, rewards.response_mask)
    to_come, _ = core.gae(
        per_token, torch.zeros_like(per_token), rewards.response_mask, gamma=config.gamma, gae_lambda=1.0
    )
    return Estimate(to_come)


ADVANTAGES: dict[str, Callable[[Rewards, OnlineConfig], Estimate]] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": dr_grpo,
    "reinforce++": reinforce_plus_plus,
}


def estimate_advantages(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """Advantages by the entry of `ADVANTAGES`, or the user's own function, that ``--advantage`` names.

    Raises ConfigError if a user's function raises, or returns neither a number per token nor one per response.
    """
    if not user_code.is_named(config.advantage):
        return ADVANTAGES[config.advantage](rewards, config)
    found = user_code.call(FLAG, config.advantage, rewards, config)
    shape = None if not isinstance(found, Tensor) else found.shape
    if shape == rewards.per_response.shape:
        return _spread(found, rewards)
    if shape == rewards.response_mask.shape:
        return Estimate(torch.where(rewards.response_mask, found, 0.0))
    wanted = f"advantages of shape {list(rewards.response_mask.shape)} or {list(rewards.per_response.shape)}"
    got = type(found).__name__ if shape is None else f"a tensor of shape {list(shape)}"
    raise ConfigError(f"{FLAG} {config.advantage} returned {got}, not {wanted}")


def group_size(rewards: Rewards, config: OnlineConfig) -> int:
    """How many consecutive responses are compared with each other."""
    return len(rewards.per_response) if config.estimator.compares == "batch" else config.samples_per_prompt


def action_mask(response_mask: Tensor, config: OnlineConfig) -> Tensor:
    """``[batch, time]``, True where an action begins: at every response token, or only at the first."""
    return core.first_in_mask(response_mask) if config.has_response_actions else response_mask


def _spread(advantages: Float[Tensor, " batch"], rewards: Rewards) -> Estimate:
    """A response's advantage at each of its tokens."""
    return Estimate(torch.where(rewards.response_mask, advantages.unsqueeze(1), 0.0))


def weigh(
    advantages: Tensor, old_logprobs: Tensor | None, rollouts: Rollouts, config: OnlineConfig
) -> tuple[Tensor, dict[str, float]]:
    """Advantages ``[batch, time]`` times importance weights (``--importance``), and the weights' metrics.

    A token's weight is the ratio of the policy's probability to the sampler's. Every surrogate is proportional to the
    advantage, so this weighs each token's objective and gradient; entropy bonus and KL penalty are not weighed.
    """
    if config.importance == "none":
        return advantages, {}
    assert old_logprobs is not None
    mask = rollouts.batch.response_mask
    if config.mask_truncated:  # the weights are those of what is learned from
        mask = mask & ~rollouts.truncated.unsqueeze(1)
        if not mask.any():
            return advantages, {}
    level: Literal["token", "sequence"] = "token" if config.importance.startswith("token") else "sequence"
    found = core.importance_weights(
        old_logprobs,
        rollouts.drawn_logprobs,
        mask,
        level=level,
        bound="truncate" if config.importance.endswith("truncate") else "mask",
        low=config.importance_low,
        high=config.importance_high,
        normalise=config.importance_normalise,
    )
    actions = mask if level == "token" else core.first_in_mask(mask)
    metrics = {
        "importance/weight_mean": core.masked_mean(found.weights, actions),
        "importance/weight_max": found.weights.max(),
        "importance/log_ratio_max": torch.where(actions, found.log_ratio, -torch.inf).max(),
        "importance/bounded_frac": core.masked_mean(found.bounded.to(found.weights.dtype), actions),
        "importance/effective_frac": core.effective_sample_size(found.weights, actions),
    }
    return advantages * found.weights, {name: float(value) for name, value in metrics.items()}
