"""Metrics of a rollout batch before the update (defined in docs/metrics.md)."""

import math
import time

import torch
from torch import Tensor

from heedful import core
from heedful.algorithms.online.advantages import Rewards, action_mask, action_rewards, group_size
from heedful.algorithms.online.rollout import ScoredBatch
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.core.policy_losses import Metrics
from heedful.devices import upload
from heedful.models.policy import TokenOutputs
from heedful.training.metric_sums import read

SHOWN = {
    "reward/score_mean": "score",
    "reference/kl": "kl",
    "policy/entropy": "entropy",
    "rollout/response_length": "length",
    "rollout/eos_frac": "eos",
}
"""Metrics of the progress bar, with their labels."""
_MEAN, _SQUARE = "policy/ratio_mean", "policy/ratio_square"


def rollout_metrics(
    scored: ScoredBatch, old: TokenOutputs | None, kl: Tensor | None, *, shaped: Tensor
) -> dict[str, float]:
    """Metrics of scores, lengths and seconds, and of the policy's teacher-forced pass (`pass_metrics`), if there was
    one.

    Args:
        scored: a rollout batch.
        old: teacher-forced pass of the policy that sampled; None before it.
        kl: KL to the reference per response; None without a reference.
        shaped: ``[batch]``, scores from which the advantages were estimated.
    """
    responses, mask = scored.responses, scored.batch.response_mask
    raw, lengths = torch.tensor(scored.scores, dtype=torch.float64), responses.lengths.float()
    said, turn = responses.ids[:, -mask.shape[1] :], core.turn_starts(mask).cumsum(dim=1)
    of_turns = said + turn * (said.max() + 1)  # an answer may well begin as an earlier one
    low, middle, high = lengths.quantile(upload(torch.tensor([0.1, 0.5, 0.9]), lengths.device))
    metrics = {
        "reward/score_mean": raw.mean(),
        "reward/shaped_mean": shaped.mean(),
        "rollout/response_length": lengths.mean(),
        "rollout/length_p10": low,
        "rollout/length_p50": middle,
        "rollout/length_p90": high,
        "rollout/length_max": lengths.max(),
        "rollout/eos_frac": 1 - responses.truncated.float().mean(),
        "rollout/repeated_frac": core.repeated_ngrams(of_turns, mask).mean(),
    }
    if len(raw) > 1:
        metrics["reward/score_std"] = raw.std(correction=0)
    if responses.kept_logprobs is not None:
        metrics["rollout/kept_mass"] = core.masked_mean(responses.kept_logprobs.exp(), mask)
    if old is not None:
        sampler_logprobs = responses.logprobs
        metrics |= pass_metrics(old, sampler_logprobs, kl, mask, num_tokens=mask.sum(), num_responses=len(mask))
    metrics |= episode_metrics(scored)
    seconds = {"time/rollout": scored.sampled.seconds, "time/score": scored.seconds - scored.sampled.seconds}
    return read(metrics) | seconds | scored.sampled.metrics


def episode_metrics(scored: ScoredBatch) -> Metrics:
    """What the policy and its environment did in turns; nothing without one."""
    episodes = [one.episode for one in scored.completions if one.episode is not None]
    if not episodes:
        return {}
    calls = sum(one.calls for one in episodes)
    metrics = {
        "rollout/turns": sum(len(one.ends) for one in episodes) / len(episodes),
        "rollout/cut_by_turns_frac": sum(one.ended == "turns" for one in episodes) / len(episodes),
        "rollout/cut_by_tokens_frac": sum(one.ended == "tokens" for one in episodes) / len(episodes),
        "rollout/tool_calls": calls / len(episodes),
    }
    if calls:
        metrics["rollout/failed_calls_frac"] = sum(one.failed_calls for one in episodes) / calls
    return {name: torch.tensor(value) for name, value in metrics.items()}


def pass_metrics(
    outputs: TokenOutputs,
    sampler_logprobs: Tensor,
    kl: Tensor | None,
    mask: Tensor,
    *,
    num_tokens: Tensor,
    num_responses: int,
) -> Metrics:
    """Metrics of the teacher-forced pass of the policy that sampled: entropy, mismatch with the sampler, KL.

    Each is a sum over these rows divided by a count of the whole rollout batch, so that parts add up.

    Args:
        outputs: outputs of the pass, ``[batch, time]``.
        sampler_logprobs: log-probs recorded during sampling, ``[batch, time]``.
        kl: KL to the reference per response, ``[batch]``; None without a reference.
        mask: True at response tokens, ``[batch, time]``.
        num_tokens: number of response tokens of the rollout batch.
        num_responses: number of responses of the rollout batch.
    """
    mismatch = (sampler_logprobs - outputs.logprobs.detach()).abs()
    metrics = {
        "policy/entropy": core.masked_mean(outputs.entropy.detach(), mask, count=num_tokens),
        "rollout/sampler_mismatch": core.masked_mean(mismatch, mask, count=num_tokens),
    }
    return metrics if kl is None else metrics | {"reference/kl": kl.sum() / num_responses}


def score_metrics(scored: ScoredBatch, config: RolloutConfig) -> dict[str, float]:
    """Mean of each reward if there are several, and metrics of normalisation and clipping if they are on."""
    given, norm, clip = scored.reward_scores, scored.norm, config.score_clip
    metrics = {f"reward/{name}": mean for name, mean in given.means.items() if len(given.means) > 1}
    if given.unread:
        metrics["reward/unread_frac"] = len(given.unread) / len(given.totals)
    failed, sampled = len(scored.sampled.reward_scores.failed), len(scored.sampled.reward_scores.totals)
    if failed:
        metrics["reward/failed_frac"] = failed / sampled
    if failed and config.compares == "prompt":
        metrics["reward/dropped_frac"] = 1 - len(scored.completions) / sampled
    metrics |= given.measured
    if clip is not None:
        clipped = sum(abs(score - norm.mean) / norm.std > clip for score in given.totals)
        metrics["reward/clip_frac"] = clipped / len(given.totals)
    return metrics


def experience_metrics(
    scored: ScoredBatch,
    old: TokenOutputs | None,
    kl: Tensor | None,
    rewards: Rewards,
    *,
    config: OnlineConfig,
    started: float,
) -> dict[str, float]:
    """All metrics before an update: `rollout_metrics`, `score_metrics`, `critic_metrics`, ties.

    Args:
        scored, old, kl: as in `rollout_metrics`.
        rewards: input of the advantage estimator.
        config: the settings.
        started: start time of the passes over scored responses (`time.perf_counter`).
    """
    shaped = scored.shaped if config.estimator.per_token else rewards.per_response
    metrics = rollout_metrics(scored, old, kl, shaped=shaped) | score_metrics(scored, config)
    if rewards.values is not None and config.estimator.critic:
        metrics |= critic_metrics(rewards, config)
    if config.compares:
        metrics["reward/tied_frac"] = tied_frac(rewards.per_response, group_size(rewards, config))
    if config.mask_truncated:
        metrics["rollout/masked_frac"] = float(scored.responses.truncated.float().mean())
    metrics["time/score"] = scored.seconds + time.perf_counter() - started - metrics["time/rollout"]
    return metrics


def critic_metrics(rewards: Rewards, config: OnlineConfig) -> dict[str, float]:
    """What the critic knows of the Monte Carlo returns G (`core.rewards_to_go`), and the lambdas of `--gae-lambda-alpha`.

        explained variance = 1 - var(G - V) / var(G)                              `core.explained_variance`

    ``_first``: at the first action of each response. ``_prompt``: at all actions, if the value of the first one, which
    knows the prompt only, stood at each: what lies above it is what the critic reads in the answer. Absent where returns do
    not vary. Of responses that are single actions there is only the first.
    """
    values, actions = rewards.values, action_mask(rewards.response_mask, config)
    assert values is not None
    to_go = core.rewards_to_go(action_rewards(rewards, config), actions, gamma=config.gamma)
    metrics = {
        "value/mean": core.masked_mean(values, actions),
        "value/explained_variance": core.explained_variance(values, to_go, actions),
    }
    if not config.has_response_actions:
        first = core.first_values(values, actions)
        metrics["value/explained_variance_first"] = core.explained_variance(values, to_go, core.first_in_mask(actions))
        metrics["value/explained_variance_prompt"] = core.explained_variance(first, to_go, actions)
    if config.gae_lambda_alpha is not None:
        lambdas = core.adaptive_lambda(actions.sum(dim=1), alpha=config.gae_lambda_alpha)
        metrics |= {"value/lambda_mean": lambdas.mean(), "value/lambda_zero_frac": (lambdas == 0).float().mean()}
    return without_undefined(read(metrics))


def without_undefined(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics without explained variances that there are not, because the returns do not vary."""
    return {name: x for name, x in metrics.items() if not ("explained_variance" in name and math.isnan(x))}


def tied_frac(scores: Tensor, group_size: int) -> float:
    """Share of groups of ``group_size`` consecutive responses whose scores all tie."""
    return float(core.tied_groups(scores, group_size=group_size).float().mean())


def with_effective_frac(metrics: dict[str, float]) -> dict[str, float]:
    """A step's metrics with ``policy/effective_frac``, ``mean(r)^2 / mean(r^2)``, in place of the two means.

    A user's policy loss may have only one of them, which stays.
    """
    if not {_MEAN, _SQUARE} <= metrics.keys():
        return metrics
    rest = {name: value for name, value in metrics.items() if name not in (_MEAN, _SQUARE)}
    return rest | {"policy/effective_frac": metrics[_MEAN] ** 2 / metrics[_SQUARE]}
