"""Learning from a rollout batch: epochs, minibatches, losses, optimizer steps."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from heedful import core
from heedful.configs.online import OnlineConfig
from heedful.core.policy_losses import Metrics
from heedful.core.surrogates import SURROGATES
from heedful.kernels.packing import scatter
from heedful.models.policy import TokenOutputs
from heedful.models.value_model import ValueHead, ValueModel
from heedful.parallel import ranks
from heedful.parallel.rank_failures import naming_lost_ranks
from heedful.parallel.sharding import Passes, passes
from heedful.sampling.teacher_forced import micro_batches
from heedful.train.metric_sums import MetricSums
from heedful.train.non_finite import StepResult
from heedful.train.online.advantages import action_mask
from heedful.train.online.experience import Experience
from heedful.train.online.learner import Learner
from heedful.train.online.metrics import pass_metrics
from heedful.train.online.minibatch import MOST_APPROX_KL, critic_norm, gradients, shuffled, take_step
from heedful.train.online.ratio_metrics import ratio_metrics, with_effective_frac
from heedful.train.online.respond import response_kl
from heedful.train.optimization import step_metrics
from heedful.train.performance import online_performance
from heedful.types import MicroBatch


def learn(learner: Learner[OnlineConfig], experience: Experience) -> dict[str, float]:
    """``ppo_epochs`` passes over a rollout batch in shuffled minibatches, one optimizer step each. Returns mean metrics.

    The passes end at a minibatch whose approx_kl before its step is above ``approx_kl_limit``: neither it nor any after it is
    learned from. The first, on which the policy has not moved yet, always is. In the first ``critic_warmup_steps`` rollout
    batches only the critic learns, and the KL coefficient stays: a policy that stands still says nothing about it.

    A value head on the policy's trunk has passes of its own before them (`learn_values`). A minibatch whose numbers are
    broken is left out, and its metrics with it (`take_step`).
    """
    config, started = learner.config, time.perf_counter()
    learning_rate = learner.schedule.advance()
    is_warming_up = learner.schedule.done <= config.critic_warmup_steps
    of_values, of_head = ({}, []) if experience.states is None else learn_values(learner, experience)
    experience = replace(experience, states=None)
    sums, taken, visited = MetricSums(), list[StepResult](), 0
    epochs = 0 if is_warming_up and learner.critic is None else config.ppo_epochs
    for rows in _minibatches(experience, epochs, config, learner.generator):
        minibatch, before = experience.select(rows), dict(sums.totals)
        has_moved = any(math.isfinite(step.norm) for step in taken)
        mixed = _gradients(learner, minibatch, sums, is_warming_up=is_warming_up, has_moved=has_moved)
        experience.kl[rows] = minibatch.kl
        visited += 1
        if mixed is None:
            learner.optimizer.zero_grad(set_to_none=True)
            break
        sources = [*experience.sources(rows), *mixed]
        step = take_step(
            learner,
            learner.trained,
            sums,
            before=before,
            update=len(taken) + 1,
            sources=sources,
            # the ratio of a whole response is a product over its tokens, and large sooner
            most_approx_kl=math.inf if config.surrogate[1] == "sequence" else MOST_APPROX_KL,
        )
        taken.append(step)
        visited -= step.is_left_out
        if learner.average is not None and math.isfinite(step.norm):  # else the step was skipped
            learner.average.update()
    learner.skips.count(taken or of_head)
    metrics = with_effective_frac({**experience.metrics, **of_values, **sums.means(max(1, visited))})
    metrics |= step_metrics([step.norm for step in taken]) | critic_norm(of_head, taken)
    metrics |= {"optimizer/learning_rate": learning_rate, "time/update": time.perf_counter() - started}
    if config.kl_coef > 0:
        metrics["reference/kl_coef"] = learner.kl.coef
        if not is_warming_up and math.isfinite(metrics.get("reference/kl", math.nan)):
            learner.kl.update(metrics["reference/kl"], config.rollout_batch_size)
    if config.target_entropy is not None:
        metrics["policy/entropy_coef"] = experience.entropy_coef
        if not is_warming_up and math.isfinite(metrics.get("policy/entropy", math.nan)):
            learner.entropy.update(metrics["policy/entropy"])
    if config.approx_kl_limit is not None:
        minibatches = math.ceil(max(1, len(experience.kl)) / config.minibatch_size)
        made = sum(not step.is_left_out for step in taken)
        metrics["policy/update_frac"] = made / (config.ppo_epochs * minibatches)
    learned, sampled = float(experience.batch.response_mask.sum()), experience.scored.drawn.sampled_tokens
    return metrics | online_performance(metrics, learned, learner.policy.device, sampled_tokens=sampled)


def _gradients(
    learner: Learner[OnlineConfig], minibatch: Experience, sums: MetricSums, *, is_warming_up: bool, has_moved: bool
) -> list[str] | None:
    """Gradients of all that a minibatch's step learns from, as `gradients` gives them."""
    limit = learner.config.approx_kl_limit

    def of_minibatch() -> bool:
        if is_warming_up:
            accumulate_critic(learner, minibatch, sums)
            return True
        approx_kl = accumulate(learner, minibatch, sums)
        return not (has_moved and limit is not None and _of_all_ranks(approx_kl) > limit)

    return gradients(learner, sums, of_minibatch, rows=len(minibatch.kl), mixes=not is_warming_up)


def _of_all_ranks(share: Tensor) -> float | Tensor:
    """The sum of what each rank has of a minibatch; the number itself in one process."""
    if ranks.size() == 1:
        return share
    ranks.all_well()
    return ranks.total(float(share))


def learn_values(learner: Learner[OnlineConfig], experience: Experience) -> tuple[dict[str, float], list[StepResult]]:
    """``value_epochs`` passes of the policy's value head over the states that it read when the responses were scored.

    They cost next to nothing, as the trunk has no pass, and the value loss does not pull it away from the policy's.
    Returns mean metrics and the head's steps.
    """
    config, head, states = learner.config, learner.policy.value_head, experience.states
    assert head is not None
    assert states is not None
    sums, taken = MetricSums(), list[StepResult]()
    for rows in _minibatches(experience, config.value_epochs, config, learner.generator):
        minibatch, before = experience.select(rows), dict(sums.totals)
        num_actions = action_mask(minibatch.batch.response_mask, config).sum()
        first = states[rows[:1]], minibatch.batch.response_mask[:1]
        with naming_lost_ranks():
            for part, batch in micro_batches(minibatch.batch, MicroBatch(len(rows)), _through_head(head, *first)):
                mask = batch.response_mask
                values = scatter(head(states[rows[part]], mask), mask)
                loss, metrics = value_loss(values, minibatch.select(part), config, num_actions)
                sums.add(metrics)
                loss.backward()
        sums.add_ranks()
        sources = experience.sources(rows)
        taken.append(take_step(learner, [head], sums, before=before, update=len(taken) + 1, sources=sources))
    return sums.means(max(1, sum(not step.is_left_out for step in taken))), taken


def _through_head(head: ValueHead, states: Tensor, mask: Tensor) -> Passes | None:
    """Passes through a value head; a rank that has no rows left makes one over these."""
    return passes((head, lambda: 0.0 * head(states, mask).sum()))


def _minibatches(
    experience: Experience, epochs: int, config: OnlineConfig, generator: torch.Generator
) -> Iterator[Tensor]:
    """Rows of every minibatch of every epoch; masked and failed responses leave all of them smaller."""
    for _ in range(epochs):
        for rows in shuffled(len(experience.kl), config.minibatch_size, generator):
            yield rows.to(experience.kl.device)


def accumulate(learner: Learner[OnlineConfig], minibatch: Experience, sums: MetricSums) -> Tensor:
    """Gradients of one minibatch's loss, a micro-batch at a time. Returns the minibatch's approx_kl.

        L = L_policy + L_value                  a critic of its own
        L = L_policy + value_coef * L_value     a value head, whose value loss pulls the trunk only by this

    Every term is divided by the minibatch's count of tokens (or of responses, if these are the actions): the micro-batch size
    does not change the gradient.

    Without old log-probs the minibatch is the whole rollout batch and the policy is the one that sampled it, so this pass
    gives them, and with them the metrics and the KL that a pass before the update would have given.
    """
    config, counts = learner.config, Counts.of(minibatch, learner.config)
    pulls = config.estimator.critic and learner.critic is None and config.value_coef > 0
    approx_kl, read = torch.zeros((), device=minibatch.kl.device), list[Tensor]()
    step = passes((learner.policy, lambda: learner.policy.zero(with_values=pulls)), *_through(learner.critic))
    for rows, batch in micro_batches(minibatch.batch, learner.micro_batch, step):
        part = minibatch.select(rows)
        read.append(rows)
        outputs = learner.policy(
            batch.ids,
            batch.attention_mask,
            batch.response_mask,
            temperature=config.temperature,
            with_entropy=part.entropy_coef > 0 or part.old_logprobs is None,
            with_values=pulls,
        )
        if part.old_logprobs is None:
            part = replace(part, old_logprobs=outputs.logprobs.detach())
            minibatch.kl[rows] = _read_at_once(outputs, part, counts, sums)
        loss, metrics = policy_loss(outputs, part, config, counts)
        sums.add(metrics)
        approx_kl = approx_kl + metrics.get("policy/approx_kl", 0.0)
        if pulls:
            loss = loss + config.value_coef * value_loss(outputs.values, part, config, counts.actions)[0]
        loss.backward()  # now, so that what it needed is free before a critic's pass
        if learner.critic is not None:
            _accumulate_values(learner.critic, part, config, counts, sums)
    if minibatch.old_logprobs is None:
        ranks.all_well()
        ranks.put_together(minibatch.kl, read)
    return approx_kl


def _read_at_once(outputs: TokenOutputs, part: Experience, counts: "Counts", sums: MetricSums) -> Tensor:
    """Add the metrics of the policy that sampled, from the update's own pass. Returns the KL of each response."""
    assert part.sampler_logprobs is not None
    mask, kl = part.batch.response_mask, None
    if part.ref_logprobs is not None:
        kl = response_kl(outputs.logprobs.detach(), part.ref_logprobs, mask)
    seen = part.sampler_logprobs
    sums.add(pass_metrics(outputs, seen, kl, mask, num_tokens=counts.tokens, num_responses=counts.responses))
    return part.kl if kl is None else kl


def accumulate_critic(learner: Learner[OnlineConfig], minibatch: Experience, sums: MetricSums) -> None:
    """Gradients of only the value loss of one minibatch, for a critic of its own."""
    assert learner.critic is not None
    config, counts = learner.config, Counts.of(minibatch, learner.config)
    for rows, _ in micro_batches(minibatch.batch, learner.micro_batch, passes(*_through(learner.critic))):
        _accumulate_values(learner.critic, minibatch.select(rows), config, counts, sums)


def _through(critic: ValueModel | None) -> list[tuple[nn.Module, Callable[[], Tensor]]]:
    """A critic of its own for `passes`."""
    return [] if critic is None else [(critic, critic.zero)]


def _accumulate_values(
    critic: ValueModel, part: Experience, config: OnlineConfig, counts: "Counts", sums: MetricSums
) -> None:
    values = critic(part.batch.ids, part.batch.attention_mask, part.batch.response_mask)
    loss, metrics = value_loss(values, part, config, counts.actions)
    sums.add(metrics)
    loss.backward()


@dataclass(frozen=True)
class Counts:
    """What the sums of a minibatch are divided by, so that micro-batches add up."""

    config: OnlineConfig
    tokens: Tensor
    responses: int
    actions: Tensor

    @classmethod
    def of(cls, minibatch: Experience, config: OnlineConfig) -> "Counts":
        """The counts of a whole minibatch."""
        mask = minibatch.batch.response_mask
        return cls(config, mask.sum(), len(minibatch.kl), action_mask(mask, config).sum())

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """The minibatch's mean of numbers per response, or of numbers per token averaged as ``aggregate`` says."""
        if x.dim() == 1:
            return core.masked_mean(x, mask, count=self.responses)
        return core.aggregate(
            x,
            mask,
            self.config.aggregate,
            num_tokens=self.tokens,
            num_sequences=self.responses,
            max_new_tokens=self.config.max_new_tokens,
        )


def policy_loss(
    outputs: TokenOutputs, part: Experience, config: OnlineConfig, counts: Counts
) -> tuple[Tensor, Metrics]:
    """``L = -J - entropy_coef H + kl_coef KL``, the last only with ``kl_in`` loss.

    J is the surrogate that ``policy_loss``, ``ratio`` and ``action`` choose; each term is averaged by ``counts``.
    """
    assert part.old_logprobs is not None
    mask = part.batch.response_mask
    high = config.clip_range if config.clip_range_high is None else config.clip_range_high
    bounds = core.Bounds(config.clip_range, high, config.dual_clip)
    surrogate = SURROGATES[config.surrogate](outputs.logprobs, part.old_logprobs, part.advantages, mask, bounds)
    loss = -counts.mean(surrogate.objective, surrogate.mask)
    num_actions = counts.tokens if surrogate.mask.dim() == 2 else counts.responses
    metrics = {"loss/policy": loss.detach(), **ratio_metrics(surrogate, counts.mean, num_actions)}
    if part.entropy_coef > 0:
        loss = loss - part.entropy_coef * counts.mean(outputs.entropy, mask)
    if config.kl_in == "loss" and config.kl_coef > 0:
        assert part.ref_logprobs is not None
        sampled_by = part.old_logprobs if config.is_kl_weighted else None
        kl = core.kl_estimate(outputs.logprobs, part.ref_logprobs, kind=config.kl_estimate, old_logprobs=sampled_by)
        penalty = part.kl_coef * counts.mean(kl, mask)
        loss, metrics = loss + penalty, metrics | {"loss/kl": penalty.detach()}
    return loss, metrics


def value_loss(
    values: Tensor | None, part: Experience, config: OnlineConfig, num_actions: Tensor
) -> tuple[Tensor, Metrics]:
    """`core.value_loss` where actions begin: before every token, or only after the prompt."""
    assert values is not None
    assert part.old_values is not None
    assert part.returns is not None
    return core.value_loss(
        values,
        part.old_values,
        part.returns,
        action_mask(part.batch.response_mask, config),
        clip_range=config.value_clip_range,
        num_tokens=num_actions,
    )
