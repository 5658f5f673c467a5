"""PPO and its relatives on one page, from scored responses to the optimizer's step, in the order of the papers.

    o ~ pi_old(. | q)                                 responses                      rollout
    s = r(q, o)                                       scores, normalised, shaped     rollout
    r_t = -beta kl_t + [t is the last token] s        rewards                        core.kl_shaped_rewards
    A_t, R_t                                          advantages and returns         core.gae, or another of `ADVANTAGES`
    L = -E[min(r A, clip(r) A)] + c_V L_V - c_H H     losses                         core.ppo_policy_loss, core.value_loss

PPO (Schulman et al. 2017; Ouyang et al. 2022), A2C (Mnih et al. 2016), GRPO (Shao et al. 2024) and by settings RLOO (Ahmadian
et al. 2024), Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025), GSPO (Zheng et al. 2025) and REINFORCE (Williams 1992) are
this page with another advantage (`ADVANTAGES`) and another policy loss (`objective_loss`). Shapes: B responses, T tokens. The
loop over steps is `run_online`; what can fail on the way (memory, numbers that are not finite, other ranks) is in `Update`.

Where it departs from common implementations (docs/numerics.md has all): the score is on the last token, not on the one after
it; nothing is bootstrapped after a cut; by default the value loss leaves the trunk as it is; with a single update its own
pass gives the old log-probs.
"""

import math
import time
from typing import Unpack

import torch
from torch import Tensor

from heedful import core
from heedful.algorithms.online.advantages import (
    Rewards,
    action_mask,
    apply_importance_weights,
    estimate_advantages,
    of_all_tokens,
)
from heedful.algorithms.online.experience import Counts, Experience, finite_rows
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.loop import run_online
from heedful.algorithms.online.metrics import SHOWN, experience_metrics
from heedful.algorithms.online.policy_losses import objective_loss
from heedful.algorithms.online.recorder import Learned, Recorder
from heedful.algorithms.online.rollout import ScoredBatch
from heedful.algorithms.online.update import Update, minibatches
from heedful.algorithms.online.values import learn_values, value_loss
from heedful.configs.online import GRPOConfig, OnlineConfig, PPOConfig
from heedful.devices import upload
from heedful.rewards.resolve import AnyRewards
from heedful.training.from_python import Objects, check_kind, spill_to_files
from heedful.training.result import TrainingResult
from heedful.types import MicroBatch


def train_ppo(config: OnlineConfig, rewards: AnyRewards = (), **objects: Unpack[Objects]) -> TrainingResult:
    """Optimise a policy against rewards and write a run folder: PPO, A2C, GRPO or a relative, as the config's class says.

    Args:
        config: the settings; their class is the preset.
        rewards: added to the config's: functions, `Reward` objects or strings.
        objects: ``model``, ``tokenizer``, ``data``, ``eval_data`` in memory; ``on_step``, ``on_evaluation``, ``on_save``
            to be called (`Objects`).

    Raises ConfigError, DataError, CheckpointError before anything is written; RewardError, TrainingError during training.
    """
    with spill_to_files(config, PPOConfig, GRPOConfig, **objects) as (settings, callbacks):
        return run_online(settings, rewards, callbacks, make_experience=make_experience, learn=learn, shown=SHOWN)


def train_grpo(config: GRPOConfig, rewards: AnyRewards = (), **objects: Unpack[Objects]) -> TrainingResult:
    """`train_ppo` under the name that people look for: GRPO and its relatives, without a critic."""
    check_kind(config, GRPOConfig)
    return train_ppo(config, rewards, **objects)


def make_experience(learner: Learner[OnlineConfig], scored: ScoredBatch) -> Experience:
    """From scored responses to advantages: log-probs and values ``[B, T]``, KL-shaped rewards, advantages. No gradient."""
    cfg, batch, started = learner.config, scored.batch, time.perf_counter()
    policy, mask = learner.policy, batch.response_mask

    old = ref_logprobs = kl = None
    if cfg.needs_old_pass or learner.is_warming_up:
        old = learner.token_outputs(policy, batch, with_entropy=True, with_states=policy.value_head is not None)
    if cfg.needs_reference:
        ref_logprobs = learner.token_outputs(learner.reference, batch).logprobs
    if old is not None and ref_logprobs is not None:
        kl = core.response_kl(old.logprobs, ref_logprobs, mask)
    values = learner.critic_values(batch) if learner.critic is not None else None if old is None else old.values

    # without a pass of both there is no KL in the rewards
    logprobs = torch.zeros_like(scored.responses.logprobs) if old is None else old.logprobs
    references = logprobs if kl is None or ref_logprobs is None else ref_logprobs
    kl_coef = learner.kl.coef if cfg.kl_in == "reward" else 0.0
    placed = core.spread_scores(scored.shaped, scored.reward_scores.tokens, mask, std=scored.norm.std)
    rewards = Rewards(
        per_token=core.kl_shaped_rewards(placed, logprobs, references, mask, kl_coef=kl_coef, kind=cfg.kl_estimate),
        per_response=scored.shaped - kl_coef * core.response_kl(logprobs, references, mask, kind=cfg.kl_estimate),
        values=values,
        response_mask=mask,
        prompts=[completion.prompt for completion in scored.completions],
        policy=policy,
    )
    advantages, returns = estimate_advantages(rewards, cfg)
    if cfg.whiten_advantages:
        advantages = core.whiten(advantages, action_mask(mask, cfg))
    advantages = of_all_tokens(advantages, mask, cfg)
    advantages, weight_metrics = apply_importance_weights(
        advantages, None if old is None else old.logprobs, scored.responses, cfg
    )

    experience = Experience(
        batch=batch,
        rows=upload(torch.arange(len(mask)), mask.device),
        old_logprobs=None if old is None else old.logprobs,
        ref_logprobs=ref_logprobs,
        rewards=rewards.per_token,
        advantages=advantages,
        old_values=values,
        returns=returns,
        kl=torch.full(mask.shape[:1], math.nan, dtype=logprobs.dtype, device=mask.device) if kl is None else kl,
        kl_coef=learner.kl.coef,
        entropy_coef=learner.entropy.coef,
        completions=scored.completions,
        scores=scored.scores,
        metrics=experience_metrics(scored, old, kl, rewards, config=cfg, started=started) | weight_metrics,
        sampled_tokens=scored.sampled.sampled_tokens,
        states=None if old is None else old.states,
        sampler_logprobs=scored.responses.logprobs,
        drawn_logprobs=scored.responses.drawn_logprobs,
        correct=upload(torch.tensor(scored.scores) >= cfg.correct_from, mask.device) if cfg.positive_coef else None,
        is_finite=finite_rows(rewards.per_token, logprobs, ref_logprobs, values),
        entropy=None if old is None else old.entropy,
        temperature=cfg.temperature,
    )
    return experience.only(~scored.responses.truncated) if cfg.mask_truncated else experience


def learn(learner: Learner[OnlineConfig], experience: Experience) -> Learned:
    """The critic's epochs, then ``ppo_epochs`` passes over a rollout batch in shuffled minibatches, one optimizer step each.

    The passes end at a minibatch whose approx_kl before its step is above ``approx_kl_limit``: neither it nor any after it is
    learned from. The first, on which the policy has not moved yet, always is. In the first ``critic_warmup_steps`` rollout
    batches only the critic learns, and the KL coefficient stays: a policy that stands still says nothing about it.
    """
    cfg, is_warming_up = learner.config, learner.is_warming_up
    learning_rate = learner.schedule.advance()
    recorder = Recorder(learner, experience.kl)
    update = Update(learner, recorder)
    value_metrics, value_steps = learn_values(learner, experience)

    for rows in minibatches(experience, 0 if is_warming_up else cfg.ppo_epochs, learner):
        minibatch, is_too_far = experience.select(rows), False
        for attempt in update.retry_on_oom(len(rows)):
            with attempt as limit:
                backward_minibatch(learner, minibatch, recorder, limit)
                is_too_far = update.is_above(cfg.approx_kl_limit)
                if not is_too_far:
                    update.mix_in(limit)
        if is_too_far:
            update.skip()
            break
        update.step(experience.sources(rows), max_approx_kl=cfg.exploded_approx_kl)

    learner.non_finite_guard.count(update.steps, value_steps)
    metrics = experience.metrics | value_metrics | update.metrics(value_steps)
    metrics["optimizer/learning_rate"] = learning_rate
    metrics |= learner.update_coefficients(metrics, is_warming_up=is_warming_up)
    if cfg.approx_kl_limit is not None:
        metrics["policy/update_frac"] = update.taken_frac(len(experience.rows))
    return recorder.end(metrics, experience.mask.sum(), experience.sampled_tokens)


def backward_minibatch(
    learner: Learner[OnlineConfig], minibatch: Experience, recorder: Recorder, limit: MicroBatch
) -> None:
    """Gradients of a minibatch's loss, a micro-batch at a time.

    Every term is divided by the minibatch's count of tokens (or of responses, if these are the actions): the micro-batch size
    does not change the gradient.
    """
    counts = Counts.of(minibatch, learner.config)
    for part in minibatch.micro_batches(limit, learner.lockstep_forwards()):
        policy_loss(learner, part, counts, recorder).backward()
    if minibatch.makes_first_pass:
        recorder.share_kl(minibatch.rows)


def policy_loss(learner: Learner[OnlineConfig], part: Experience, counts: Counts, recorder: Recorder) -> Tensor:
    """The loss of a micro-batch, after one pass of the policy over it.

        L = -J - entropy_coef H + kl_coef KL + positive_coef L_+ + value_coef L_V

    J is the surrogate that ``policy_loss`` and ``importance_level`` choose; KL is here only with ``kl_in`` loss, L_+ is
    `core.positive_example_loss`, L_V only for a value head whose loss is to pull the trunk.
    """
    cfg, batch, mask = learner.config, part.batch, part.mask
    new = learner.policy(
        batch.ids,
        batch.attention_mask,
        mask,
        temperature=cfg.temperature,
        with_entropy=part.entropy_coef > 0 or part.makes_first_pass,
        with_values=learner.pulls_trunk,
    )
    if part.makes_first_pass:
        recorder.add_first_pass(new, part, counts)
    if cfg.policy_loss == "sao":
        old_logprobs = part.drawn_logprobs
    else:  # without a pass before it the policy is still the one that sampled
        old_logprobs = new.logprobs.detach() if part.old_logprobs is None else part.old_logprobs
    recorder.record_log_ratio(part.rows, new.logprobs, old_logprobs)
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
    if part.correct is not None:
        imitation, of_imitation = core.positive_example_loss(
            new.logprobs, mask, part.correct, num_tokens=counts.positive
        )
        loss, metrics = loss + cfg.positive_coef * imitation, metrics | of_imitation
    recorder.add(metrics)
    if learner.pulls_trunk:
        loss = loss + cfg.value_coef * value_loss(new.values, part, counts, cfg)[0]
    return loss
