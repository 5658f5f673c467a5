"""PPO and its relatives on one page, from prompts to the optimizer's step, in the order of the papers.

    o ~ pi_old(. | q)                                 responses                      rollout
    s = r(q, o)                                       scores, normalised, shaped     rollout
    r_t = -beta kl_t + [t is the last token] s        rewards                        core.kl_shaped_rewards
    A_t, R_t                                          advantages and returns         core.gae, or another of `ADVANTAGES`
    L = -E[min(r A, clip(r) A)] + c_V L_V - c_H H     losses                         `POLICY_LOSSES`, core.value_loss

PPO (Schulman et al. 2017; Ouyang et al. 2022), A2C (Mnih et al. 2016), GRPO (Shao et al. 2024) and by settings RLOO (Ahmadian
et al. 2024), Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025), GSPO (Zheng et al. 2025) and REINFORCE (Williams 1992) are
the same page with other entries of two tables, `ADVANTAGES` and `POLICY_LOSSES`. Shapes: B responses, T tokens. What can go
wrong on the way (memory, numbers that are not finite, other ranks) is in `heedful.algorithms.online.update`.

Where it departs from common implementations (docs/numerics.md has all): the score is on the last token, not on the one after
it; nothing is bootstrapped after a cut; by default the value loss leaves the trunk as it is; with a single update its own
pass gives the old log-probs.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from heedful import core
from heedful.algorithms.online.advantages import Rewards, action_mask, estimate_advantages, weigh
from heedful.algorithms.online.evaluation import evaluate, sample_rows
from heedful.algorithms.online.experience import Counts, Experience
from heedful.algorithms.online.in_memory import described
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.metrics import (
    SHOWN,
    experience_metrics,
    note_of,
    pass_metrics,
    rollout_metrics,
    score_metrics,
    with_effective_frac,
)
from heedful.algorithms.online.policy_losses import objective_loss
from heedful.algorithms.online.rollout import ScoredBatch, rollout
from heedful.algorithms.online.rollout_files import forget_rollouts, write_rollouts
from heedful.algorithms.online.start import start
from heedful.algorithms.online.update import Learned, Update, critic_norm, shuffled, take_step
from heedful.configs.online import GRPOConfig, OnlineConfig, PPOConfig
from heedful.core.policy_losses import Metrics
from heedful.data.in_memory import Records
from heedful.distributed.rank_failures import naming_lost_ranks
from heedful.distributed.sharding import passes
from heedful.kernels.packing import scatter
from heedful.models.policy import Policy, TokenOutputs
from heedful.rewards.resolve import AnyReward
from heedful.training.callbacks import NO_CALLBACKS, Callbacks
from heedful.training.from_python import Objects, in_files
from heedful.training.metric_sums import MetricSums
from heedful.training.non_finite import StepResult
from heedful.training.result import TrainingResult
from heedful.training.run import Run
from heedful.types import MicroBatch


def train_online(
    config: OnlineConfig, rewards: Sequence[AnyReward] = (), callbacks: Callbacks = NO_CALLBACKS
) -> TrainingResult:
    """Optimise a policy against rewards and write a run folder.

    Args:
        config: the settings; their class is the preset.
        rewards: added to the config's: functions, `Reward` objects or strings.
        callbacks: functions of the user's to call.

    Raises ConfigError, DataError, CheckpointError before anything is written; RewardError, TrainingError during training.
    """
    config, learner, held_out, about = start(config, rewards)
    with Run(
        config,
        learner,
        config.algorithm,
        config.steps,
        objective=config.best_metric,
        higher_is_better=True,
        shown=SHOWN,
        can_evaluate=bool(held_out),
        callbacks=callbacks,
        **about,
    ) as run:
        forget_rollouts(config, after=run.done)
        for step in run.steps():
            if run.needs_update(step):
                scored = rollout(learner, next(learner.prompts))
                experience = make_experience(learner, scored)
                with run.update():
                    metrics, kl = learn(learner, experience)
                    write_rollouts(config, step, scored, kl)
                    run.log(step, metrics, note=note_of(metrics, config.samples_per_prompt, scored.given.note))
                    if run.samples_due(step):
                        run.show_samples(step, sample_rows(scored, kl, config))
                    learner.check(metrics)
            if run.evaluation_due(step):
                run.evaluate(step, evaluate(learner, held_out))
        learner.health.tell_end(config.learning_rate)
        run.summary["score_norm"] = learner.score_norm.state_dict()
    return TrainingResult(run.path, run.summary, config)


def train_ppo(config: PPOConfig, rewards: Sequence[AnyReward] = (), **objects: Unpack[Objects]) -> TrainingResult:
    """PPO, or A2C if given an `A2CConfig`: `train_online` under the name that people look for.

    Args:
        config: the settings.
        rewards: added to the config's: functions, `Reward` objects or strings.
        objects: ``model``, ``tokenizer``, ``data``, ``eval_data`` in memory; ``on_step``, ``on_evaluation``, ``on_save``
            to be called (`Objects`).
    """
    with in_files(config, **objects) as (settings, callbacks):
        return train_online(settings, rewards, callbacks)


def train_grpo(config: GRPOConfig, rewards: Sequence[AnyReward] = (), **objects: Unpack[Objects]) -> TrainingResult:
    """GRPO and its relatives: `train_online` under the name that people look for. It takes what `train_ppo` takes."""
    with in_files(config, **objects) as (settings, callbacks):
        return train_online(settings, rewards, callbacks)


def ppo_steps(
    config: OnlineConfig, policy: Policy, prompts: Records | str | Path, rewards: Sequence[AnyReward] = ()
) -> Iterator[tuple[int, Experience, dict[str, float]]]:
    """The steps of `train_online` one at a time, on a policy that is in memory and is trained in place.

    >>> for step, experience, metrics in heedful.ppo_steps(config, policy, prompts, rewards=[brevity]):
    ...     if metrics["reference/kl"] > 5: break

    Nothing is written, held out or evaluated. After each step, also the last before a ``break``, the policy is what it has
    learned. The numbers are those of `train_online` with the same settings and ``eval_fraction=0``.

    Args:
        config: the settings, without ``model`` and ``data``; their class is the preset.
        policy: what is trained, with its tokenizer; it gets a value head if the settings want one.
        prompts: a `datasets.Dataset`, a list of texts, conversations or dicts with the columns of a file, or a file's path.
        rewards: added to the config's: functions, `Reward` objects or strings.

    Yields the number of the step, what it learned from, and its metrics (docs/metrics.md).

    Raises ConfigError, DataError, CheckpointError, RewardError, TrainingError.
    """
    with described(config, policy, prompts) as settings:
        learner = start(settings, rewards, policy).learner
    for step in range(1, config.steps + 1):
        experience = make_experience(learner, rollout(learner, next(learner.prompts)))
        metrics = learn(learner, experience).metrics
        yield step, experience, metrics
        learner.check(metrics)


def make_experience(learner: Learner[OnlineConfig], scored: ScoredBatch) -> Experience:
    """From scored responses to advantages: log-probs and values ``[B, T]``, KL-shaped rewards, advantages. No gradient."""
    cfg, batch, started = learner.config, scored.batch, time.perf_counter()
    mask, actions = batch.response_mask, action_mask(batch.response_mask, cfg)

    policy, reference, sampler_logprobs = learner.policy, learner.reference, scored.rollouts.sampler_logprobs
    old = ref_logprobs = kl = None
    if cfg.needs_old_pass:
        old = learner.read(policy, batch, with_entropy=True, with_states=policy.value_head is not None)
    if cfg.needs_reference:
        ref_logprobs = learner.read(reference, batch).logprobs
    if old is not None and ref_logprobs is not None:
        kl = core.response_kl(old.logprobs, ref_logprobs, mask)
    values = learner.read_critic(batch) if learner.critic is not None else None if old is None else old.values

    # without a pass of both there is no KL in the rewards
    logprobs = torch.zeros_like(sampler_logprobs) if old is None else old.logprobs
    references = logprobs if kl is None or ref_logprobs is None else ref_logprobs
    kl_coef = learner.kl.coef if cfg.kl_in == "reward" else 0.0
    placed = core.spread_scores(scored.shaped, scored.given.tokens, mask, std=scored.norm.std)
    rewards = Rewards(
        per_token=core.kl_shaped_rewards(placed, logprobs, references, mask, kl_coef=kl_coef, kind=cfg.kl_estimate),
        per_response=scored.shaped - kl_coef * core.response_kl(logprobs, references, mask, kind=cfg.kl_estimate),
        values=values,
        response_mask=mask,
    )
    advantages, returns = estimate_advantages(rewards, cfg)
    if cfg.whiten_advantages:
        advantages = core.whiten(advantages, actions)
    advantages, weight_metrics = weigh(advantages, None if old is None else old.logprobs, scored.rollouts, cfg)

    metrics = rollout_metrics(
        scored, old, kl, shaped=scored.shaped if cfg.estimator.per_token else rewards.per_response
    )
    metrics |= score_metrics(scored, cfg) | weight_metrics | experience_metrics(rewards, returns, actions, cfg)
    if cfg.mask_truncated:
        metrics["rollout/masked_frac"] = float(scored.rollouts.truncated.float().mean())
    metrics["time/score"] = scored.seconds + time.perf_counter() - started - metrics["time/rollout"]
    experience = Experience(
        batch=batch,
        rows=torch.arange(len(mask), device=mask.device),
        old_logprobs=None if old is None else old.logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        old_values=values,
        returns=returns,
        kl=(scored.shaped if ref_logprobs is None else ref_logprobs).new_zeros(len(mask)) if kl is None else kl,
        kl_coef=learner.kl.coef,
        entropy_coef=learner.entropy.coef,
        completions=scored.completions,
        scores=scored.scores,
        metrics=metrics,
        sampled_tokens=scored.sampled.sampled_tokens,
        states=None if old is None else old.states,
        sampler_logprobs=sampler_logprobs,
        is_finite=finite_rows(rewards.per_token, logprobs, ref_logprobs, values),
    )
    return experience.only(~scored.rollouts.truncated) if cfg.mask_truncated else experience


def finite_rows(*numbers: Tensor | None) -> Tensor:
    """Rows ``[B]`` in which all numbers ``[B, T]`` that there are are finite."""
    return torch.stack([x.isfinite().all(dim=1) for x in numbers if x is not None]).all(dim=0)


def learn(learner: Learner[OnlineConfig], experience: Experience) -> Learned:
    """``ppo_epochs`` passes over a rollout batch in shuffled minibatches, one optimizer step each.

    The passes end at a minibatch whose approx_kl before its step is above ``approx_kl_limit``: neither it nor any after it is
    learned from. The first, on which the policy has not moved yet, always is. In the first ``critic_warmup_steps`` rollout
    batches only the critic learns, and the KL coefficient stays: a policy that stands still says nothing about it.
    """
    cfg, update, learning_rate = learner.config, Update(learner, experience.kl), learner.schedule.advance()
    is_warming_up = learner.schedule.done <= cfg.critic_warmup_steps
    value_metrics, head_steps = ({}, []) if experience.states is None else learn_values(learner, experience)
    experience = replace(experience, states=None)

    epochs = 0 if is_warming_up and learner.critic is None else cfg.ppo_epochs
    for rows in minibatches(experience, epochs, learner):
        minibatch, is_too_far = experience.select(rows), False
        for attempt in update.attempts(len(rows)):
            with attempt as limit:
                backward_minibatch(learner, minibatch, update, limit, is_warming_up=is_warming_up)
                is_too_far = update.is_above(cfg.approx_kl_limit)
                if not (is_too_far or is_warming_up):
                    update.mix_in(limit)
        if is_too_far:
            update.leave_out()
            break
        update.step(experience.sources(rows), max_approx_kl=cfg.exploded_approx_kl)
    learner.skips.count(update.steps or head_steps)

    metrics = with_effective_frac({**experience.metrics, **value_metrics, **update.metrics()})
    metrics |= critic_norm(head_steps, update.steps) | {"optimizer/learning_rate": learning_rate}
    metrics |= steer(learner, metrics, is_warming_up=is_warming_up)
    if cfg.approx_kl_limit is not None:
        planned = cfg.ppo_epochs * math.ceil(max(1, len(experience.rows)) / cfg.minibatch_size)
        metrics["policy/update_frac"] = sum(not step.is_left_out for step in update.steps) / planned
    learned_tokens = float(experience.mask.sum())
    metrics = update.end(metrics, learned_tokens=learned_tokens, sampled_tokens=experience.sampled_tokens)
    return Learned(metrics, update.kl)


def steer(learner: Learner[OnlineConfig], metrics: Mapping[str, float], *, is_warming_up: bool) -> dict[str, float]:
    """Move the KL coefficient and that of the entropy bonus; returns those of this step."""
    cfg, kl, entropy = learner.config, metrics.get("reference/kl", math.nan), metrics.get("policy/entropy", math.nan)
    used: dict[str, float] = {}
    if cfg.kl_coef > 0:
        used["reference/kl_coef"] = learner.kl.coef
        if not is_warming_up and math.isfinite(kl):
            learner.kl.update(kl, cfg.rollout_batch_size)
    if cfg.target_entropy is not None:
        used["policy/entropy_coef"] = learner.entropy.coef
        if not is_warming_up and math.isfinite(entropy):
            learner.entropy.update(entropy)
    return used


def backward_minibatch(
    learner: Learner[OnlineConfig],
    minibatch: Experience,
    update: Update,
    limit: MicroBatch,
    *,
    is_warming_up: bool = False,
) -> None:
    """Gradients of a minibatch's losses, a micro-batch at a time. While it warms up, only those of the critic.

    Every term is divided by the minibatch's count of tokens (or of responses, if these are the actions): the micro-batch size
    does not change the gradient.
    """
    counts = Counts.of(minibatch, learner.config)
    for part in minibatch.micro_batches(limit, learner.passes(is_warming_up=is_warming_up)):
        if not is_warming_up:
            policy_loss(learner, part, counts, update).backward()  # now, so that the critic's pass has the memory
        if learner.critic is not None:
            critic_loss(learner, part, counts, update).backward()
    if minibatch.old_logprobs is None:
        update.share_kl()


def policy_loss(learner: Learner[OnlineConfig], part: Experience, counts: Counts, update: Update) -> Tensor:
    """The loss of a micro-batch, after one pass of the policy over it.

        L = -J - entropy_coef H + kl_coef KL + value_coef L_V

    J is the surrogate that ``policy_loss`` and ``importance_level`` choose; KL is here only with ``kl_in`` loss, L_V only
    for a value head whose loss is to pull the trunk.
    """
    cfg, batch, mask = learner.config, part.batch, part.mask
    new = learner.policy(
        batch.ids,
        batch.attention_mask,
        mask,
        temperature=cfg.temperature,
        with_entropy=part.entropy_coef > 0 or part.old_logprobs is None,
        with_values=learner.pulls_trunk,
    )
    old_logprobs = first_pass(new, part, counts, update) if part.old_logprobs is None else part.old_logprobs
    loss, metrics = objective_loss(
        new.logprobs, old_logprobs, part.advantages, mask, config=cfg, reduction=counts.reduction
    )
    if part.entropy_coef > 0:
        loss = loss - part.entropy_coef * counts.reduction.tokens(new.entropy, mask)
    if cfg.kl_in == "loss" and cfg.kl_coef > 0:
        assert part.ref_logprobs is not None
        sampled_by = old_logprobs if cfg.is_kl_weighted else None
        kl = core.kl_estimate(new.logprobs, part.ref_logprobs, kind=cfg.kl_estimate, old_logprobs=sampled_by)
        penalty = part.kl_coef * counts.reduction.tokens(kl, mask)
        loss, metrics = loss + penalty, metrics | {"loss/kl": penalty.detach()}
    update.add(metrics)
    if learner.pulls_trunk:
        loss = loss + cfg.value_coef * value_loss(new.values, part, counts, cfg)[0]
    return loss


def critic_loss(learner: Learner[OnlineConfig], part: Experience, counts: Counts, update: Update) -> Tensor:
    """The value loss of a micro-batch, after one pass of a critic with its own network."""
    assert learner.critic is not None
    values = learner.critic(part.batch.ids, part.batch.attention_mask, part.mask)
    loss, metrics = value_loss(values, part, counts, learner.config)
    update.add(metrics)
    return loss


def value_loss(values: Tensor | None, part: Experience, counts: Counts, cfg: OnlineConfig) -> tuple[Tensor, Metrics]:
    """`core.value_loss` where actions begin: before every token, or only after the prompt."""
    assert values is not None
    assert part.old_values is not None
    assert part.returns is not None
    actions, clip_range = action_mask(part.mask, cfg), cfg.value_clip_range
    return core.value_loss(
        values, part.old_values, part.returns, actions, clip_range=clip_range, num_tokens=counts.actions
    )


def learn_values(learner: Learner[OnlineConfig], experience: Experience) -> tuple[dict[str, float], list[StepResult]]:
    """``value_epochs`` passes of the policy's value head over the states that it read when the responses were scored.

    They cost next to nothing, as the trunk has no pass, and the value loss does not pull it away from the policy's.
    Returns mean metrics and the head's steps.
    """
    cfg, head, states = learner.config, learner.policy.value_head, experience.states
    assert head is not None
    assert states is not None
    sums, steps = MetricSums(), list[StepResult]()
    step = passes((head, lambda: 0.0 * head(states[:1], experience.mask[:1]).sum()))  # of a rank that has no rows
    for rows in minibatches(experience, cfg.value_epochs, learner):
        minibatch, before = experience.select(rows), dict(sums.totals)
        counts = Counts.of(minibatch, cfg)
        with naming_lost_ranks():
            for part in minibatch.micro_batches(MicroBatch(len(rows)), step):
                assert part.states is not None
                values = scatter(head(part.states, part.mask), part.mask)
                loss, metrics = value_loss(values, part, counts, cfg)
                sums.add(metrics)
                loss.backward()
        sums.add_ranks()
        sources = experience.sources(rows)
        steps.append(take_step(learner, [head], sums, before=before, update=len(steps) + 1, sources=sources))
    return sums.means(max(1, sum(not step.is_left_out for step in steps))), steps


def minibatches(experience: Experience, epochs: int, learner: Learner[OnlineConfig]) -> Iterator[Tensor]:
    """Rows of every minibatch of every epoch; masked and failed responses leave all of them smaller."""
    for _ in range(epochs):
        for rows in shuffled(len(experience.rows), learner.config.minibatch_size, learner.generator):
            yield rows.to(experience.rows.device)


def first_pass(new: TokenOutputs, part: Experience, counts: Counts, update: Update) -> Tensor:
    """Old log-probs ``[b, T]`` from the update's own pass; adds the metrics and the KL of a pass before the update.

    The minibatch is the whole rollout batch, and the policy is still the one that sampled it.
    """
    kl = None
    if part.ref_logprobs is not None:
        kl = core.response_kl(new.logprobs.detach(), part.ref_logprobs, part.mask)
    if kl is not None:
        update.set_kl(part.rows, kl)
    seen = part.sampler_logprobs
    update.add(pass_metrics(new, seen, kl, part.mask, num_tokens=counts.tokens, num_responses=counts.responses))
    return new.logprobs.detach()
