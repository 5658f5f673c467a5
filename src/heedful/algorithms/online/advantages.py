"""Advantage estimators: from a rollout batch's rewards to one advantage per token.

``--advantage`` selects from the table `ADVANTAGES`. An entry is a function of `Rewards` and the settings, composed of
pure functions of `heedful.core`; `heedful.configs.online.ESTIMATORS` lists its requirements.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful import core, user_code
from heedful.configs.online import OnlineConfig
from heedful.data.batches import shapes
from heedful.engines.responses import Responses
from heedful.errors import ConfigError
from heedful.models.policy import Policy
from heedful.training.metric_sums import read
from heedful.types import Prompt

FLAG = "--advantage"


class Rewards(NamedTuple):
    """An estimator's input from a rollout batch. Rows of one prompt are consecutive; every row has a score.

    For estimators that compare responses, each prompt has all of its ``samples_per_prompt`` rows."""

    per_token: Float[Tensor, "batch time"]
    """Rewards per token: score, penalties and KL."""
    per_response: Float[Tensor, " batch"]
    """Rewards summed per response."""
    values: Float[Tensor, "batch time"] | None
    """The critic's values of the states before each token; None without a critic."""
    response_mask: Bool[Tensor, "batch time"]
    prompts: Sequence[Prompt] = ()
    """The prompt of each row, for a baseline of your own, such as the score of a greedy response."""
    policy: Policy | None = None
    """The policy that sampled, without a gradient."""

    def __repr__(self) -> str:
        """A line for each field: the shape and type of a tensor, the number of prompts."""
        return shapes("Rewards", self._asdict())


class Estimate(NamedTuple):
    """Advantages ``[batch, time]``, and the critic's targets (returns); zero outside the response mask."""

    advantages: Float[Tensor, "batch time"]
    returns: Float[Tensor, "batch time"] | None = None


def gae(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """GAE with a critic (`core.gae`), with one step per token, turn or response; the critic's targets have a lambda of their
    own. Advantages of turns and responses stand at their first tokens (`of_all_tokens`)."""
    assert rewards.values is not None
    actions, alpha = action_mask(rewards.response_mask, config), config.gae_lambda_alpha
    given = action_rewards(rewards, config), rewards.values, actions
    policy_lambda = config.gae_lambda if alpha is None else core.adaptive_lambda(actions.sum(dim=1), alpha=alpha)
    advantages, returns = core.gae(*given, gamma=config.gamma, gae_lambda=policy_lambda)
    if alpha is not None or config.critic_lambda != policy_lambda:
        _, returns = core.gae(*given, gamma=config.gamma, gae_lambda=config.critic_lambda)
    return Estimate(advantages, returns)


def grpo(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """Score minus the mean over its prompt's responses, divided by their standard deviation
    (`core.group_advantages`)."""
    size = group_size(rewards, config)
    return _spread(core.group_advantages(rewards.per_response, group_size=size), rewards)


def dr_grpo(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """Score minus the mean of its group: its prompt's responses, or for reinforce the whole rollout batch."""
    size = group_size(rewards, config)
    return _spread(core.group_advantages(rewards.per_response, group_size=size, scale="none"), rewards)


def rloo(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """Score minus the mean of its prompt's other responses (`core.rloo_advantages`)."""
    size = group_size(rewards, config)
    return _spread(core.rloo_advantages(rewards.per_response, group_size=size), rewards)


def reinforce_plus_plus(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """Reward-to-go, without a critic (Hu 2025, section 3.1; ``whiten_advantages`` is its normalisation).

        A_t = sum_{k >= t} gamma^(k - t) r_k           r holds the score at the last token and -kl_coef kl_k at each

    These are `core.rewards_to_go`. With gamma 1 it is the score minus the KL penalty of the response from t on.
    """
    per_token = rewards.per_token
    if config.whiten_rewards:
        per_token = core.rescale(per_token, rewards.response_mask)
    return Estimate(core.rewards_to_go(per_token, rewards.response_mask, gamma=config.gamma))


ADVANTAGES: dict[str, Callable[[Rewards, OnlineConfig], Estimate]] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": dr_grpo,
    "reinforce++": reinforce_plus_plus,
}


def estimate_advantages(rewards: Rewards, config: OnlineConfig) -> Estimate:
    """Advantages by the entry of `ADVANTAGES` or the user's function selected by ``--advantage``.

    Raises ConfigError if a user's function raises, returns neither a number per token nor one per response, or returns
    numbers that are not finite for finite rewards and values.
    """
    if isinstance(config.advantage, str) and config.advantage in ADVANTAGES:
        return ADVANTAGES[config.advantage](rewards, config)
    found = user_code.call(FLAG, config.advantage, rewards, config)
    shape = None if not isinstance(found, Tensor) else found.shape
    if shape in (rewards.per_response.shape, rewards.response_mask.shape):
        estimate = (
            _spread(found, rewards) if found.ndim == 1 else Estimate(torch.where(rewards.response_mask, found, 0.0))
        )
        broken = ~estimate.advantages.isfinite().all(dim=1)
        given = (rewards.per_response, rewards.values)
        if broken.any() and all(x is None or x.isfinite().all() for x in given):
            raise ConfigError(
                f"{config.advantage_flag} returned numbers that are not finite for {int(broken.sum())} of {len(broken)} "
                "responses, whose rewards are finite; does it divide by 0?"
            )
        return estimate
    wanted = f"advantages of shape {list(rewards.response_mask.shape)} or {list(rewards.per_response.shape)}"
    got = type(found).__name__ if shape is None else f"a tensor of shape {list(shape)}"
    raise ConfigError(f"{config.advantage_flag} returned {got}, not {wanted}")


def group_size(rewards: Rewards, config: OnlineConfig) -> int:
    """Number of consecutive responses that are compared."""
    return len(rewards.per_response) if config.estimator.compares == "batch" else config.samples_per_prompt


def action_rewards(rewards: Rewards, config: OnlineConfig) -> Float[Tensor, "batch time"]:
    """The rewards that a critic's values predict: those of each token, or their sum at the first token of an action."""
    per_token, mask = rewards.per_token, rewards.response_mask
    if config.action_size == "response":
        per_token = core.response_rewards(per_token, mask)
    elif config.action_size == "turn":
        per_token = core.action_rewards(per_token, mask, core.turn_starts(mask))
    return core.rescale(per_token, action_mask(mask, config)) if config.whiten_rewards else per_token


def action_mask(response_mask: Tensor, config: OnlineConfig) -> Tensor:
    """``[batch, time]``, True at the first token of each action: of every token, of the turns, or of the response."""
    if config.action_size == "turn":
        return core.turn_starts(response_mask)
    return core.first_in_mask(response_mask) if config.action_size == "response" else response_mask


def _spread(advantages: Float[Tensor, " batch"], rewards: Rewards) -> Estimate:
    """Copy each response's advantage to all of its tokens."""
    return Estimate(torch.where(rewards.response_mask, advantages.unsqueeze(1), 0.0))


def of_all_tokens(advantages: Tensor, response_mask: Tensor, config: OnlineConfig) -> Tensor:
    """Advantages ``[batch, time]`` with those of each action at all of its tokens, for ratios per token. A ratio of a whole
    response reads its advantage at the first token, as it is."""
    if config.action_size == "token" or config.importance_level != "token":
        return advantages
    return core.spread_over_actions(advantages, response_mask, action_mask(response_mask, config))


def apply_importance_weights(
    advantages: Tensor, old_logprobs: Tensor | None, responses: Responses, config: OnlineConfig
) -> tuple[Tensor, dict[str, float]]:
    """Advantages ``[batch, time]`` times importance weights (``--importance``), and the weights' metrics.

    A token's weight is the ratio of the policy's probability to the sampler's. Surrogates are proportional to the
    advantage, so this weights each token's objective and gradient; entropy bonus and KL penalty are not weighted.
    """
    if config.importance == "none":
        return advantages, {}
    assert old_logprobs is not None
    mask = responses.mask
    if config.mask_truncated:  # masked responses get no weight
        mask = mask & ~responses.truncated.unsqueeze(1)
        if not mask.any():
            return advantages, {}
    level: Literal["token", "sequence"] = "token" if config.importance.startswith("token") else "sequence"
    found = core.importance_weights(
        old_logprobs,
        responses.drawn_logprobs,
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
    return advantages * found.weights, read(metrics)
