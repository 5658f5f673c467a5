"""From prompts to experience: scored responses, rewards, advantages."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful import core
from heedful.configs.online import OnlineConfig
from heedful.data.batches import Batch
from heedful.data.loading import EncodedPrompt
from heedful.sampling.teacher_forced import token_values
from heedful.train.online.advantages import ADVANTAGES, Rewards, action_mask, group_size
from heedful.train.online.importance import weigh
from heedful.train.online.learner import Learner
from heedful.train.online.metrics import critic_metrics, rollout_metrics, score_metrics, tied_frac
from heedful.train.online.respond import Scored, respond
from heedful.types import Completion


@dataclass(frozen=True)
class Experience:
    """A rollout batch with all that an update holds constant; ``[batch, time]`` unless said."""

    batch: Batch
    old_logprobs: Float[Tensor, "batch time"] | None
    """None if the update's own pass gives them: it makes one step, before which the policy has not moved."""
    ref_logprobs: Float[Tensor, "batch time"] | None
    """None if the reference is not needed."""
    advantages: Float[Tensor, "batch time"]
    old_values: Float[Tensor, "batch time"] | None
    """None without a critic, as are ``returns``."""
    returns: Float[Tensor, "batch time"] | None
    kl: Float[Tensor, " batch"]
    """KL to the reference of each response: k1 summed over its tokens. Zero if KL has no price: it is not measured then.
    Without ``old_logprobs`` the update fills it in."""
    kl_coef: float
    """The coefficient of the KL penalty in this step."""
    entropy_coef: float
    """That of the entropy bonus."""
    completions: list[Completion]
    scores: list[float]
    """As the rewards gave them, before normalisation and penalties."""
    metrics: dict[str, float]
    problem: str | None
    """What the rewards had, if it is new."""
    states: Float[Tensor, "batch time hidden"] | None
    """What the policy's value head read; None if it has none."""
    scored: Scored
    """What it was made from, masked responses included. ``scored.kl`` is ``kl``, unless responses are masked."""
    sampler_logprobs: Float[Tensor, "batch time"] | None = None
    """What sampling saw; only for metrics, and only without ``old_logprobs``."""
    is_finite: Bool[Tensor, " batch"] | None = None
    """False where a response's rewards, log-probs or values are not finite; for messages."""

    def sources(self, rows: Tensor) -> list[str]:
        """Where the prompts of rows were read; of those that are not finite in their place, if there are any.

        Those may be other rows: advantages that compare responses, or are whitened, spread what is not finite.
        """
        broken = rows[:0] if self.is_finite is None else (~self.is_finite).nonzero().squeeze(1)
        return [self.completions[row].prompt.source for row in (broken if len(broken) else rows).tolist()]

    def select(self, rows: Tensor) -> "Experience":
        """The given rows, in the given order, without texts and metrics."""
        return replace(
            self,
            batch=self.batch.select(rows),
            old_logprobs=_rows(self.old_logprobs, rows),
            ref_logprobs=_rows(self.ref_logprobs, rows),
            advantages=self.advantages[rows],
            old_values=_rows(self.old_values, rows),
            returns=_rows(self.returns, rows),
            kl=self.kl[rows],
            completions=[],
            scores=[],
            metrics={},
            states=_rows(self.states, rows),
            sampler_logprobs=_rows(self.sampler_logprobs, rows),
            is_finite=None,
        )

    def only(self, marked: Tensor) -> "Experience":
        """The marked rows, with their texts and the metrics of all."""
        rows = marked.nonzero().squeeze(1)
        return replace(
            self.select(rows),
            completions=[self.completions[row] for row in rows.tolist()],
            scores=[self.scores[row] for row in rows.tolist()],
            metrics=self.metrics,
            is_finite=_rows(self.is_finite, rows),
        )


def _rows(numbers: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if numbers is None else numbers[rows]


def _finite_rows(*numbers: Tensor | None) -> Tensor:
    """Rows ``[batch]`` in which all numbers ``[batch, time]`` that there are are finite."""
    return torch.stack([x.isfinite().all(dim=1) for x in numbers if x is not None]).all(dim=0)


def collect(learner: Learner[OnlineConfig], prompts: Sequence[EncodedPrompt]) -> Experience:
    """Experience on one batch of prompts: `respond`, then scores and KL -> rewards -> advantages. Raises RewardError."""
    config, started = learner.config, time.perf_counter()
    scored = respond(learner, prompts)
    old, ref_logprobs, batch = scored.old, scored.ref_logprobs, scored.rollouts.batch
    sampler_logprobs = scored.rollouts.sampler_logprobs
    mask, actions = batch.response_mask, action_mask(batch.response_mask, config)
    values = None if old is None else old.values
    if learner.critic is not None:
        values = token_values(learner.critic, batch, micro_batch=config.scoring_micro_batch, room=learner.sampler.room)

    kl_coef, kind = (learner.kl.coef if config.kl_in == "reward" else 0.0), config.kl_estimate
    placed = core.spread_scores(scored.shaped, scored.given.tokens, mask, std=scored.norm.std)
    logprobs = references = torch.zeros_like(sampler_logprobs)  # where neither is needed: the reward has no penalty
    if old is not None:
        logprobs, references = old.logprobs, old.logprobs if ref_logprobs is None else ref_logprobs
    penalty = torch.where(mask, core.kl_estimate(logprobs, references, kind=kind), 0.0).sum(dim=1)
    rewards = Rewards(
        per_token=core.kl_shaped_rewards(placed, logprobs, references, mask, kl_coef=kl_coef, kind=kind),
        per_response=scored.shaped - kl_coef * penalty,
        values=values,
        response_mask=mask,
    )
    advantages, returns = ADVANTAGES[config.advantage](rewards, config)
    if config.whiten_advantages:
        advantages = core.whiten(advantages, actions)
    advantages, of_weights = weigh(advantages, scored, config)

    metrics = rollout_metrics(scored, shaped=scored.shaped if config.estimator.per_token else rewards.per_response)
    metrics |= score_metrics(scored, config) | of_weights
    if values is not None and returns is not None:
        metrics |= critic_metrics(values, returns, actions)
    if config.estimator.compares:
        metrics["reward/tied_frac"] = tied_frac(rewards.per_response, group_size(rewards, config))
    if config.mask_truncated:
        metrics["rollout/masked_frac"] = float(scored.rollouts.truncated.float().mean())
    metrics["time/score"] = time.perf_counter() - started - metrics["time/rollout"]
    experience = Experience(
        batch=batch,
        old_logprobs=None if old is None else old.logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        old_values=values,
        returns=returns,
        kl=scored.kl,
        kl_coef=learner.kl.coef,
        entropy_coef=learner.entropy.coef,
        completions=scored.completions,
        scores=scored.scores,
        metrics=metrics,
        problem=scored.given.note,
        states=None if old is None else old.states,
        scored=scored,
        sampler_logprobs=sampler_logprobs if old is None else None,
        is_finite=_finite_rows(rewards.per_token, logprobs, ref_logprobs, values),
    )
    return experience.only(~scored.rollouts.truncated) if config.mask_truncated else experience
