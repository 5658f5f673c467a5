"""One minibatch, whatever happens: in smaller parts if memory runs out, left out if its numbers are not finite."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from heedful.configs.online import RolloutConfig
from heedful.core.policy_losses import Metrics
from heedful.train.metric_sums import MetricSums
from heedful.train.non_finite import StepResult
from heedful.train.online.learner import Learner
from heedful.train.optimization import mean_norm, optimizer_step
from heedful.types import MicroBatch

MOST_APPROX_KL = 10.0
"""An update is left out if its approx_kl per token is above this: its probability ratios have exploded. (A mean ratio of 10
alone makes 6.7; a policy that learns stays below about 0.05.)"""


def shuffled(count: int, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Numbers of rows in random order, in as few minibatches of at most ``size`` as there can be; none if there are no rows.

    Their sizes differ by one at most, so that none is a small rest, whose step would be as large as that of a whole one.
    """
    order = torch.randperm(count, generator=generator)
    return order.tensor_split(math.ceil(count / size)) if count else ()


def gradients(
    learner: Learner[RolloutConfig],
    sums: MetricSums,
    accumulate: Callable[[], bool],
    *,
    rows: int,
    mixes: bool = True,
) -> list[str] | None:
    """Gradients of a minibatch and of the records mixed in, as many rows at a time as memory has room for.

    Args:
        learner: what learns; its gradients are cleared if memory runs out.
        sums: the step's metrics.
        accumulate: adds the minibatch's own gradients and metrics. It returns False if it is not to be learned from after
            all; then no records are mixed in.
        rows: of the minibatch.
        mixes: whether records are mixed in, if there are any (``--ptx-data``).

    Returns where the mixed-in records were read; None if ``accumulate`` returned False.
    """
    ptx, totals = learner.ptx if mixes else None, dict(sums.totals)
    position = {} if ptx is None else ptx.order.state_dict()

    def work(_limit: MicroBatch) -> list[str] | None:
        sources: list[str] | None = None
        if accumulate():
            sources = [] if ptx is None else ptx.accumulate(learner.policy, sums, learner.micro_batch)
        sums.add_ranks()
        return sources

    def undo() -> None:
        learner.optimizer.zero_grad(set_to_none=True)
        sums.reset(totals)
        if ptx is not None:
            ptx.order.load_state_dict(position)

    return learner.room.run(work, learner.config.micro_batch, rows=rows, undo=undo)


def take_step(
    learner: Learner[RolloutConfig],
    modules: Sequence[nn.Module],
    sums: MetricSums,
    *,
    before: Metrics,
    update: int,
    sources: Sequence[str],
    most_approx_kl: float = math.inf,
) -> StepResult:
    """One optimizer step on the gradients that are there, for all modules or, if a number is broken, for none.

    Args:
        learner: what learns.
        modules: those of its networks that do.
        sums: the step's metrics.
        before: the sums without this minibatch; they are put back if the step is left out.
        update: number of the optimizer step within its rollout batch, from 1.
        sources: where the minibatch's records were read.
        most_approx_kl: above it, ratios have exploded.
    """
    broken, norm, norms = broken_numbers(sums, before, most_approx_kl), math.nan, list[float]()
    if broken:
        learner.optimizer.zero_grad(set_to_none=True)
    else:
        norm = optimizer_step(learner.optimizer, modules, learner.config.max_grad_norm, norms)
        if not math.isfinite(norm) and learner.policy.grad_scaler is None:
            broken = {"gradient norm": norm}
    if broken:
        sums.reset(before)
        learner.skips.leave_out(learner.schedule.done, update, broken, sources)
    return StepResult(norm, bool(broken), norms[-1] if norms and len(modules) > 1 else math.nan)


def critic_norm(of_head: Sequence[StepResult], taken: Sequence[StepResult]) -> dict[str, float]:
    """``value/grad_norm``: mean norm of the critic's own gradient over its steps; nothing if it made none.

    Args:
        of_head: steps of a value head on the policy's trunk.
        taken: steps of the policy, and with it of a critic that has a network of its own.
    """
    norm = mean_norm([step.norm for step in of_head] or [step.critic_norm for step in taken])
    return {} if norm is None else {"value/grad_norm": norm}


def broken_numbers(sums: MetricSums, before: Mapping[str, Tensor], most_approx_kl: float) -> dict[str, float]:
    """The metrics that a minibatch made non-finite; if there are none, its approx_kl if that is above a limit."""
    name = "policy/approx_kl"
    exploded = name in sums.totals and sums.totals[name] - before.get(name, 0.0) > most_approx_kl
    if sums.are_finite() and not exploded:
        return {}
    values = {name: float(total) - float(before.get(name, 0.0)) for name, total in sums.totals.items()}
    return {name: value for name, value in values.items() if not math.isfinite(value)} or {name: values[name]}
