"""The critic's part of an update: its loss, and the epochs of a value head on the policy's trunk."""

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
from heedful.training.metric_sums import MetricSums
from heedful.training.non_finite import StepResult


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
    """Train the policy's value head for ``value_epochs`` epochs on the stored hidden states.

    This is cheap, as the trunk is not run, and the value loss does not change the trunk. Each rank learns from the rows whose
    states it has.

    Returns mean metrics and the head's steps; empty without such a head.
    """
    cfg, head, states = learner.config, learner.policy.value_head, experience.states
    if head is None or states is None:
        return {}, []
    sums, steps, device = MetricSums(), list[StepResult](), experience.rows.device
    nothing, one = torch.zeros(1, head.in_features, device=device), torch.ones(1, 1, dtype=torch.bool, device=device)
    step = lockstep_forwards((head, lambda: 0.0 * head(nothing, one).sum()))  # for a rank without rows
    numbers, readers = on_host(experience.rows).tolist(), [set(read) for read in ranks.gather(list(states))]
    for rows in minibatches(experience, cfg.value_epochs, learner):
        before, counts = dict(sums.totals), Counts.of(experience.select(rows), cfg)
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
        sources = experience.sources(rows)
        steps.append(take_step(learner, [head], sums, before=before, update=len(steps) + 1, sources=sources))
    return sums.means(max(1, sum(not step.is_skipped for step in steps))), steps
