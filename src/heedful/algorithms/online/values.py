"""The critic's epochs on a rollout batch: of a value head on the policy's trunk, or of a network of its own."""

from collections.abc import Sequence, Set
from functools import partial

import torch
from torch import Tensor

from heedful import core
from heedful.algorithms.online.advantages import action_mask
from heedful.algorithms.online.experience import Counts, Experience
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.update import minibatches, take_step
from heedful.configs.online import OnlineConfig
from heedful.core.policy_losses import Metrics
from heedful.data.batches import in_step
from heedful.devices import on_host, upload
from heedful.distributed import ranks
from heedful.distributed.rank_failures import naming_lost_ranks
from heedful.distributed.sharding import lockstep_forwards
from heedful.kernels.packing import scatter
from heedful.models.value_model import ValueHead, ValueModel
from heedful.training.metric_sums import MetricSums
from heedful.training.non_finite import StepResult
from heedful.training.optimization import mean_norm


def value_loss(values: Tensor | None, part: Experience, counts: Counts, cfg: OnlineConfig) -> tuple[Tensor, Metrics]:
    """`core.value_loss` where actions begin: before every token, or only after the prompt."""
    assert values is not None
    assert part.old_values is not None
    assert part.returns is not None
    actions, clip_range = action_mask(part.mask, cfg), cfg.value_clip
    return core.value_loss(
        values, part.old_values, part.returns, actions, clip_range=clip_range, num_tokens=counts.actions
    )


def learn_values(learner: Learner[OnlineConfig], experience: Experience) -> tuple[dict[str, float], list[StepResult]]:
    """``critic_epochs`` passes of the critic over a rollout batch in shuffled minibatches, one optimizer step each.

    The steps are its own: what ends the policy's passes does not end them. A critic of its own sees the minibatches that
    the policy will see, and more if it has more epochs.

    Returns mean metrics, and the steps; empty without a critic.
    """
    trained: ValueModel | ValueHead
    order, backward = learner.generator, backward_critic
    if learner.critic is not None:
        trained, order = learner.critic, torch.Generator()
        order.set_state(learner.generator.get_state())
    elif learner.policy.value_head is not None and experience.states is not None:
        readers = [set(read) for read in ranks.gather(list(experience.states))]
        trained, backward = learner.policy.value_head, partial(backward_head, readers=readers)
    else:
        return {}, []
    sums, steps = MetricSums(), list[StepResult]()
    for rows in minibatches(experience, learner.config.critic_epochs, learner, order):
        before = dict(sums.totals)
        backward(learner, experience, rows, sums)
        sources = experience.sources(rows)
        steps.append(take_step(learner, trained, sums, before=before, update=len(steps) + 1, sources=sources))
    norm = mean_norm([step.norm for step in steps])
    means = sums.means(max(1, sum(not step.is_skipped for step in steps)))
    return means if norm is None else means | {"value/grad_norm": norm}, steps


def backward_critic(learner: Learner[OnlineConfig], experience: Experience, rows: Tensor, sums: MetricSums) -> None:
    """Gradients of the value loss of some rows for a critic of its own, a micro-batch at a time."""
    critic, cfg, before, minibatch = learner.critic, learner.config, dict(sums.totals), experience.select(rows)
    counts = Counts.of(minibatch, cfg)
    assert critic is not None

    def undo() -> None:
        learner.optimizer.zero_grad(set_to_none=True)
        sums.reset(before)

    for attempt in learner.adaptive.retry_on_oom(cfg.micro_batch, rows=len(minibatch.rows), undo=undo):
        with attempt as limit:
            for part in minibatch.micro_batches(limit, lockstep_forwards((critic, critic.dummy_loss))):
                values = critic(part.batch.ids, part.batch.attention_mask, part.mask)
                loss, metrics = value_loss(values, part, counts, cfg)
                loss.backward()
                sums.add(metrics)
            sums.add_ranks()


def backward_head(
    learner: Learner[OnlineConfig],
    experience: Experience,
    rows: Tensor,
    sums: MetricSums,
    *,
    readers: Sequence[Set[int]],
) -> None:
    """Gradients of the value loss of some rows for a head on the policy's trunk, from the stored hidden states.

    This is cheap, as the trunk is not run, and the value loss does not change the trunk. Each rank learns from the rows whose
    states it has: ``readers`` are those of all ranks.
    """
    cfg, device, head, states = learner.config, rows.device, learner.policy.value_head, experience.states
    counts = Counts.of(experience.select(rows), cfg)
    assert head is not None
    assert states is not None
    nothing, one = torch.zeros(1, head.in_features, device=device), torch.ones(1, 1, dtype=torch.bool, device=device)
    step = lockstep_forwards((head, lambda: 0.0 * head(nothing, one).sum()))  # for a rank without rows
    numbers = on_host(experience.rows).tolist()
    shares = [[place for place in on_host(rows).tolist() if numbers[place] in read] for read in readers]
    divided = [[share] if share else [] for share in shares]
    with naming_lost_ranks():
        for own in divided[ranks.rank()] if step is None else in_step(divided, step):
            part = experience.select(upload(torch.tensor(own), device))
            values = scatter(head(torch.cat([states[numbers[place]] for place in own]), part.mask), part.mask)
            loss, metrics = value_loss(values, part, counts, cfg)
            sums.add(metrics)
            loss.backward()
    sums.add_ranks()
