"""From prompts to experience: sample, score, shape rewards, estimate advantages."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful import core
from heedful.configs.ppo import PPOConfig
from heedful.core.score_norm import SMALLEST_STD, Norm, RunningScoreNorm, ScoreNorm, clip_scores, spread_scores
from heedful.data.collate import Batch
from heedful.data.loading import EncodedPrompt
from heedful.errors import RewardError
from heedful.models.policy import Policy
from heedful.models.value_model import ValueModel
from heedful.rewards import Completion, Reward, score, score_tokens
from heedful.sampling.rollouts import Rollouts
from heedful.sampling.sampler import Sampler
from heedful.sampling.teacher_forced import token_outputs, token_values
from heedful.train.online.shared import norm_metrics, penalise_missing_eos, rollout_metrics

KLControl = core.FixedKL | core.AdaptiveKL


@dataclass(frozen=True)
class Models:
    """The networks of PPO. ``value_model`` is None where the policy carries the value head."""

    policy: Policy
    reference: Policy
    value_model: ValueModel | None

    @property
    def trained(self) -> list[nn.Module]:
        return [self.policy] if self.value_model is None else [self.policy, self.value_model]


@dataclass(frozen=True)
class Experience:
    """A rollout batch with all that the losses hold constant; ``[batch, time]`` unless said."""

    batch: Batch
    old_logprobs: Float[Tensor, "batch time"]
    ref_logprobs: Float[Tensor, "batch time"]
    old_values: Float[Tensor, "batch time"]
    advantages: Float[Tensor, "batch time"]
    returns: Float[Tensor, "batch time"]
    kl: Float[Tensor, " batch"]
    """KL to the reference of each response: k1 summed over its tokens."""
    completions: list[Completion]
    scores: list[float]
    """As the rewards gave them, before normalisation and penalties."""
    kl_coef: float
    """The coefficient of the KL penalty in this step."""

    def select(self, rows: Tensor | slice) -> "Experience":
        """The given rows, in the given order, without their texts."""
        return replace(
            self,
            batch=Batch(self.batch.ids[rows], self.batch.attention_mask[rows], self.batch.response_mask[rows]),
            old_logprobs=self.old_logprobs[rows],
            ref_logprobs=self.ref_logprobs[rows],
            old_values=self.old_values[rows],
            advantages=self.advantages[rows],
            returns=self.returns[rows],
            kl=self.kl[rows],
            completions=[],
            scores=[],
        )


def action_mask(response_mask: Tensor, config: PPOConfig) -> Tensor:
    """``[batch, time]``, True where an action begins: at every response token, or at the first alone."""
    return response_mask if config.action == "token" else core.first_in_mask(response_mask)


def collect(
    models: Models,
    prompts: Sequence[EncodedPrompt],
    *,
    rewards: Sequence[Reward],
    sampler: Sampler,
    score_norm: Norm,
    kl_coef: float,
    config: PPOConfig,
    generator: torch.Generator,
) -> tuple[Experience, dict[str, float]]:
    """Experience on one batch of prompts, and its metrics.

    prompts -> responses -> scores -> old log-probs and values, reference log-probs -> per-token rewards -> advantages

    With ``action`` response, rewards are summed and advantages, returns and values count at the first token alone.

    Raises RewardError.
    """
    started = time.perf_counter()
    rollouts, completions = sampler.respond(models.policy, prompts, generator)
    sampled = time.perf_counter()
    given = score_tokens(rewards, completions)
    scores, norm = given.totals, score_norm.including(given.totals)
    batch = rollouts.batch
    old_logprobs, old_values, entropy = _old_outputs(models, batch, config)
    ref_logprobs = token_outputs(
        models.reference, batch, temperature=config.temperature, micro_batch=config.micro_batch
    ).logprobs
    shaped = _shaped_scores(scores, rollouts, norm, config)
    mask = batch.response_mask
    placed = spread_scores(shaped, given.tokens, mask, std=norm.std)
    rewards_coef = kl_coef if config.kl_in == "reward" else 0.0
    token_rewards = core.kl_shaped_rewards(
        placed, old_logprobs, ref_logprobs, mask, kl_coef=rewards_coef, kind=config.kl_kind
    )
    actions = action_mask(mask, config)
    if config.action == "response":
        token_rewards = core.response_rewards(token_rewards, mask)
    if config.whiten_rewards:
        token_rewards = core.rescale(token_rewards, actions)
    advantages, returns = core.gae(token_rewards, old_values, actions, gamma=config.gamma, gae_lambda=config.gae_lambda)
    kl = core.kl_estimate(old_logprobs, ref_logprobs, kind="k1")
    experience = Experience(
        batch=batch,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        old_values=old_values,
        advantages=core.whiten(advantages, actions),
        returns=returns,
        kl=torch.where(mask, kl, 0.0).sum(dim=1),
        completions=completions,
        scores=scores,
        kl_coef=kl_coef,
    )
    metrics = {
        **_metrics(experience, rollouts, entropy, shaped, actions),
        **norm_metrics(scores, norm, clip=config.score_clip, is_running=config.score_norm_running),
        **{f"reward/{name}": mean for name, mean in given.means.items() if len(given.means) > 1},
        "time/rollout": sampled - started,
        "time/score": time.perf_counter() - sampled,
    }
    return experience, metrics


def make_score_norm(
    models: Models,
    prompts: Sequence[EncodedPrompt],
    *,
    rewards: Sequence[Reward],
    sampler: Sampler,
    config: PPOConfig,
    generator: torch.Generator,
) -> Norm:
    """The normalisation that the settings ask for: of the scores so far, of reference samples, or none."""
    if config.score_norm_running:
        return RunningScoreNorm()
    chosen = [prompts[i % len(prompts)] for i in range(config.score_norm_samples)]
    return reference_score_norm(models, chosen, rewards=rewards, sampler=sampler, generator=generator)


def reference_score_norm(
    models: Models,
    prompts: Sequence[EncodedPrompt],
    *,
    rewards: Sequence[Reward],
    sampler: Sampler,
    generator: torch.Generator,
) -> ScoreNorm:
    """Mean and population standard deviation of the scores of fresh reference samples (Ziegler et al. 2019, section 2.2).

    Without prompts nothing is sampled and scores stay as they are.

    Raises RewardError, also where all scores are equal and so have no scale.
    """
    if not prompts:
        return ScoreNorm()
    _, completions = sampler.respond(models.reference, prompts, generator)
    scores = torch.tensor(score(rewards, completions)[0], dtype=torch.float64)
    std = float(scores.std(correction=0))
    if std < SMALLEST_STD:
        raise RewardError(
            f"all {len(completions)} reference samples got the score {float(scores[0])}, so there is no scale to normalise "
            "by; use --score-norm-samples 0 or a reward that tells responses apart"
        )
    return ScoreNorm(float(scores.mean()), std)


def _old_outputs(models: Models, batch: Batch, config: PPOConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Old log-probs, values and entropy from the modules in training, as they are before the update."""
    outputs = token_outputs(
        models.policy,
        batch,
        temperature=config.temperature,
        micro_batch=config.micro_batch,
        with_entropy=True,
    )
    values = outputs.values
    if models.value_model is not None:
        values = token_values(models.value_model, batch, micro_batch=config.micro_batch)
    assert values is not None
    return outputs.logprobs, values, outputs.entropy


def _shaped_scores(scores: list[float], rollouts: Rollouts, norm: ScoreNorm, config: PPOConfig) -> Tensor:
    """Normalised and clipped scores with the penalty of responses without an end."""
    raw = torch.tensor(scores, device=rollouts.truncated.device)
    clipped = clip_scores((raw - norm.mean) / norm.std, config.score_clip)
    return penalise_missing_eos(clipped, rollouts.truncated, config)


def _metrics(
    experience: Experience, rollouts: Rollouts, entropy: Tensor, shaped: Tensor, actions: Tensor
) -> dict[str, float]:
    metrics = rollout_metrics(
        rollouts,
        scores=experience.scores,
        shaped=shaped,
        old_logprobs=experience.old_logprobs,
        entropy=entropy,
        kl=experience.kl,
    )
    metrics["value/mean"] = float(core.masked_mean(experience.old_values, actions))
    returns_var = core.masked_var(experience.returns, actions)
    if returns_var > 1e-8:  # without variance there is nothing to explain
        residual_var = core.masked_var(experience.returns - experience.old_values, actions)
        metrics["value/explained_variance"] = float(1 - residual_var / returns_var)
    return metrics
