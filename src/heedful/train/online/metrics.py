"""Metrics of a rollout batch before the update (docs/metrics.md defines each)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from heedful import core
from heedful.sampling.rollouts import Rollouts
from heedful.sampling.teacher_forced import TokenOutputs


def rollout_metrics(
    rollouts: Rollouts, *, scores: Sequence[float], shaped: Tensor, old: TokenOutputs, kl: Tensor | None
) -> dict[str, float]:
    """Scores, entropy, lengths, and how far sampling and the teacher-forced pass are apart; KL if it was measured.

    Args:
        scores: one per response, as the rewards gave them.
        shaped: ``[batch]``, what the advantages were estimated from.
        old: the teacher-forced pass of the policy that sampled.
        kl: ``[batch]``, nats per response.
    """
    mask = rollouts.batch.response_mask
    raw = torch.tensor(scores, dtype=torch.float64)
    metrics = {
        "reward/score_mean": raw.mean(),
        "reward/score_std": raw.std(correction=0),
        "reward/shaped_mean": shaped.mean(),
        "policy/entropy": core.masked_mean(old.entropy, mask),
        "rollout/response_length": rollouts.lengths.float().mean(),
        "rollout/eos_frac": 1 - rollouts.truncated.float().mean(),
        "rollout/sampler_mismatch": core.masked_mean((rollouts.sampler_logprobs - old.logprobs).abs(), mask),
    }
    if kl is not None:
        metrics["reference/kl"] = kl.mean()
    return {name: float(value) for name, value in metrics.items()}


def critic_metrics(values: Tensor, returns: Tensor, actions: Tensor) -> dict[str, float]:
    """Mean value, and the share of the returns' variance that the values explain.

        explained variance = 1 - var(returns - values) / var(returns)

    It is absent if the returns hardly vary: there is nothing to explain.
    """
    metrics = {"value/mean": float(core.masked_mean(values, actions))}
    returns_var = core.masked_var(returns, actions)
    if returns_var > 1e-8:
        metrics["value/explained_variance"] = float(1 - core.masked_var(returns - values, actions) / returns_var)
    return metrics


def tied_frac(scores: Tensor, group_size: int) -> float:
    """Share of groups of ``group_size`` consecutive scores that are all equal."""
    groups = scores.view(-1, group_size)
    return float((groups.amax(dim=1) == groups.amin(dim=1)).float().mean())


def norm_metrics(
    scores: Sequence[float], norm: core.ScoreNorm, *, clip: float | None, is_running: bool
) -> dict[str, float]:
    """What normalisation and clipping did to a batch of scores, if they are on."""
    metrics: dict[str, float] = {}
    if is_running:
        metrics |= {"reward/norm_mean": norm.mean, "reward/norm_std": norm.std}
    if clip is not None:
        clipped = sum(abs(score - norm.mean) / norm.std > clip for score in scores)
        metrics["reward/clip_frac"] = clipped / len(scores)
    return metrics
