"""From prompts to experience: sample, score, shape rewards, estimate advantages."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from heedful import core
from heedful.configs.online import OnlineConfig
from heedful.data.collate import Batch
from heedful.data.loading import EncodedPrompt
from heedful.models.policy import TokenOutputs
from heedful.rewards import score_tokens
from heedful.sampling.teacher_forced import token_outputs, token_values
from heedful.train.online.advantages import ADVANTAGES, Rewards, action_mask, group_size
from heedful.train.online.learner import Learner
from heedful.train.online.metrics import critic_metrics, norm_metrics, rollout_metrics, tied_frac
from heedful.types import Completion


@dataclass(frozen=True)
class Experience:
    """A rollout batch with all that an update holds constant; ``[batch, time]`` unless said."""

    batch: Batch
    old_logprobs: Float[Tensor, "batch time"]
    ref_logprobs: Float[Tensor, "batch time"]
    advantages: Float[Tensor, "batch time"]
    old_values: Float[Tensor, "batch time"] | None
    """None without a critic, as are ``returns``."""
    returns: Float[Tensor, "batch time"] | None
    kl: Float[Tensor, " batch"]
    """KL to the reference of each response: k1 summed over its tokens. Zero if KL has no price: it is not measured then."""
    kl_coef: float
    """The coefficient of the KL penalty in this step."""
    completions: list[Completion]
    scores: list[float]
    """As the rewards gave them, before normalisation and penalties."""
    metrics: dict[str, float]

    def select(self, rows: Tensor) -> "Experience":
        """The given rows, in the given order, without texts and metrics."""
        return replace(
            self,
            batch=Batch(self.batch.ids[rows], self.batch.attention_mask[rows], self.batch.response_mask[rows]),
            old_logprobs=self.old_logprobs[rows],
            ref_logprobs=self.ref_logprobs[rows],
            advantages=self.advantages[rows],
            old_values=None if self.old_values is None else self.old_values[rows],
            returns=None if self.returns is None else self.returns[rows],
            kl=self.kl[rows],
            completions=[],
            scores=[],
            metrics={},
        )


def collect(learner: Learner, prompts: Sequence[EncodedPrompt]) -> Experience:
    """Experience on one batch of prompts.

        prompts -> responses -> scores -> old log-probs and values, reference log-probs -> rewards -> advantages

    Without a price on KL the reference has no part in anything, so its pass is left out and KL is not among the metrics.

    Raises RewardError.
    """
    config, started = learner.config, time.perf_counter()
    rollouts, completions = learner.sampler.respond(learner.policy, prompts, learner.generator)
    sampled = time.perf_counter()
    given = score_tokens(learner.rewards, completions)
    norm = learner.score_norm.including(given.totals)
    batch, mask = rollouts.batch, rollouts.batch.response_mask
    old = token_outputs(
        learner.policy, batch, temperature=config.temperature, micro_batch=config.micro_batch, with_entropy=True
    )
    values = _values(learner, batch, old)
    ref_logprobs = old.logprobs
    if config.kl_coef > 0:
        ref_logprobs = token_outputs(
            learner.reference, batch, temperature=config.temperature, micro_batch=config.micro_batch
        ).logprobs

    raw = torch.tensor(given.totals, device=mask.device)
    clipped = core.clip_scores((raw - norm.mean) / norm.std, config.score_clip)
    scores = penalise_missing_eos(clipped, rollouts.truncated, config)
    placed = core.spread_scores(scores, given.tokens, mask, std=norm.std)
    kl_coef, kind = (learner.kl.coef if config.kl_in == "reward" else 0.0), config.kl_estimate
    penalty = torch.where(mask, core.kl_estimate(old.logprobs, ref_logprobs, kind=kind), 0.0).sum(dim=1)
    rewards = Rewards(
        per_token=core.kl_shaped_rewards(placed, old.logprobs, ref_logprobs, mask, kl_coef=kl_coef, kind=kind),
        per_response=scores - kl_coef * penalty,
        values=values,
        response_mask=mask,
    )
    advantages, returns = ADVANTAGES[config.advantage](rewards, config)
    actions = action_mask(mask, config)
    if config.whiten_advantages:
        advantages = core.whiten(advantages, actions)

    kl = torch.where(mask, core.kl_estimate(old.logprobs, ref_logprobs, kind="k1"), 0.0).sum(dim=1)
    shaped = scores if config.estimator.per_token else rewards.per_response
    metrics = rollout_metrics(rollouts, scores=given.totals, shaped=shaped, old=old, kl=kl if config.kl_coef else None)
    metrics |= norm_metrics(given.totals, norm, clip=config.score_clip, is_running=config.score_norm_running)
    metrics |= {f"reward/{name}": mean for name, mean in given.means.items() if len(given.means) > 1}
    if values is not None and returns is not None:
        metrics |= critic_metrics(values, returns, actions)
    if config.estimator.compares:
        metrics["reward/tied_frac"] = tied_frac(rewards.per_response, group_size(rewards, config))
    metrics |= {"time/rollout": sampled - started, "time/score": time.perf_counter() - sampled}
    return Experience(
        batch=batch,
        old_logprobs=old.logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        old_values=values,
        returns=returns,
        kl=kl,
        kl_coef=learner.kl.coef,
        completions=completions,
        scores=given.totals,
        metrics=metrics,
    )


def penalise_missing_eos(scores: Tensor, truncated: Tensor, config: OnlineConfig) -> Tensor:
    """Scores ``[batch]`` with the penalty of responses that were cut by length, as ``missing_eos`` says.

    "subtract" takes it off the score (as TRL does), "replace" puts minus the penalty in the score's place (Ziegler et al.
    2019, Huang et al. 2023, with a penalty of 1).
    """
    if config.missing_eos == "replace":
        return torch.where(truncated, -config.missing_eos_penalty, scores)
    return scores - config.missing_eos_penalty * truncated


def _values(learner: Learner, batch: Batch, old: TokenOutputs) -> Tensor | None:
    """The critic's values before the update: from the policy's value head or a network of its own; None without one."""
    if learner.critic is None:
        return old.values
    return token_values(learner.critic, batch, micro_batch=learner.config.micro_batch)
