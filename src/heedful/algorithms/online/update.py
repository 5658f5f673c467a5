"""What surrounds the mathematics of an update: memory that runs out, numbers that are not finite, several ranks, metrics."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heedful import core
from heedful.algorithms.online.experience import Counts, Experience
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.metrics import pass_metrics, with_effective_frac
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.core.policy_losses import Metrics
from heedful.data.batches import Attempt
from heedful.distributed import ranks
from heedful.faults import hit
from heedful.models.policy import TokenOutputs
from heedful.training.metric_sums import MetricSums
from heedful.training.non_finite import StepResult
from heedful.training.optimization import mean_norm, optimizer_step, step_metrics
from heedful.training.performance import online_performance
from heedful.types import MicroBatch


class Learned(NamedTuple):
    """What came of an update."""

    metrics: dict[str, float]
    kl: Tensor
    """To the reference, of each response ``[batch]``."""


class Update:
    """The optimizer steps on one rollout batch.

    Args:
        learner: what learns.
        kl: to the reference, of each response ``[batch]``.
    """

    def __init__(self, learner: Learner[RolloutConfig], kl: Tensor) -> None:
        hit("pass")
        self.learner, self.started = learner, time.perf_counter()
        self.kl = kl.clone()
        """KL of each response; `set_kl` fills in what the update's own pass is the first to know."""
        self.sums = MetricSums()
        self.steps: list[StepResult] = []
        self.visited = 0
        """Minibatches whose metrics are in the sums."""
        self.approx_kl: float | Tensor = 0.0
        """Of the minibatch's micro-batches so far, on this rank."""
        self._before: Metrics = {}
        self._mixed: list[str] = []
        self._read: list[Tensor] = []

    @property
    def has_moved(self) -> bool:
        """Whether the policy is no longer the one that sampled."""
        return any(math.isfinite(step.norm) for step in self.steps)

    def attempts(self, rows: int) -> Iterator[contextlib.AbstractContextManager[MicroBatch]]:
        """Attempts at the gradients of a minibatch: each gives the micro-batch to use, smaller if memory has run out.

        Args:
            rows: of the minibatch (pairs, if these are what is learned from).
        """
        learner, self._before = self.learner, dict(self.sums.totals)
        mixed_before = None if learner.ptx is None else learner.ptx.order.state_dict()

        def undo() -> None:
            learner.optimizer.zero_grad(set_to_none=True)
            self.sums.reset(self._before)
            if learner.ptx is not None and mixed_before is not None:
                learner.ptx.order.load_state_dict(mixed_before)

        for attempt in learner.adaptive.attempts(learner.config.micro_batch, rows=rows, undo=undo):
            yield self._attempt(attempt)
        self.visited += 1

    @contextlib.contextmanager
    def _attempt(self, attempt: Attempt) -> Iterator[MicroBatch]:
        self.approx_kl, self._mixed, self._read = 0.0, [], []
        with attempt as limit:
            yield limit
            self.sums.add_ranks()

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of a micro-batch."""
        self.sums.add(metrics)
        self.approx_kl = self.approx_kl + metrics.get("policy/approx_kl", 0.0)

    def add_first_pass(self, new: TokenOutputs, part: Experience, counts: Counts) -> None:
        """Add the metrics and the KL of a micro-batch's pass before the update, whose policy is the one that sampled."""
        kl = None
        if part.ref_logprobs is not None:
            kl = core.response_kl(new.logprobs.detach(), part.ref_logprobs, part.mask)
            self.set_kl(part.rows, kl)
        seen = part.sampler_logprobs
        self.add(pass_metrics(new, seen, kl, part.mask, num_tokens=counts.tokens, num_responses=counts.responses))

    def set_kl(self, rows: Tensor, kl: Tensor) -> None:
        """Fill in the KL of some responses."""
        self.kl[rows] = kl
        self._read.append(rows)

    def share_kl(self, among: Tensor | None = None) -> None:
        """Have on each rank the KL that all have filled in: of all rows, or of those ``among`` which they read."""
        ranks.all_well()
        ranks.put_together(self.kl, self._read, among)

    def is_above(self, approx_kl_limit: float | None) -> bool:
        """Whether the policy has moved, and its approx_kl on the minibatch is above a limit."""
        if not self.has_moved or approx_kl_limit is None:
            return False
        if ranks.size() > 1:
            ranks.all_well()
            return ranks.total(float(self.approx_kl)) > approx_kl_limit
        return bool(self.approx_kl > approx_kl_limit)

    def mix_in(self, limit: MicroBatch) -> None:
        """Add the gradients of demonstrations (``--ptx-data``), if there are any."""
        if self.learner.ptx is not None:
            self._mixed = self.learner.ptx.accumulate(self.learner.policy, self.sums, limit)

    def leave_out(self) -> None:
        """Forget a minibatch's gradients."""
        self.learner.optimizer.zero_grad(set_to_none=True)

    def step(self, sources: Sequence[str], *, max_approx_kl: float = math.inf) -> None:
        """One optimizer step on the gradients of a minibatch, or none if a number of it is not finite.

        Args:
            sources: where its prompts were read.
            max_approx_kl: above it, ratios have exploded.
        """
        learner = self.learner
        result = take_step(
            learner,
            learner.trained,
            self.sums,
            before=self._before,
            update=len(self.steps) + 1,
            sources=[*sources, *self._mixed],
            max_approx_kl=max_approx_kl,
        )
        self.steps.append(result)
        self.visited -= result.is_left_out
        if learner.average is not None and math.isfinite(result.norm):  # else the step was skipped
            learner.average.update()

    def metrics(self) -> dict[str, float]:
        """Means over the minibatches, and what the steps were like."""
        return self.sums.means(max(1, self.visited)) | step_metrics([step.norm for step in self.steps])

    def taken_frac(self, responses: int) -> float:
        """Share of the planned optimizer steps on so many responses that were taken."""
        config = self.learner.config
        planned = config.ppo_epochs * math.ceil(max(1, responses) / config.minibatch_size)
        return sum(not step.is_left_out for step in self.steps) / planned

    def end(self, metrics: dict[str, float], learned_tokens: Tensor, sampled_tokens: int) -> Learned:
        """A step's metrics with its seconds and speed, and the KL of each response."""
        metrics = with_effective_frac(metrics) | {"time/update": time.perf_counter() - self.started}
        device = self.learner.policy.device
        speed = online_performance(metrics, float(learned_tokens), device, sampled_tokens=sampled_tokens)
        return Learned(metrics | speed, self.kl)


def shuffled(count: int, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Numbers of rows in random order, in as few minibatches of at most ``size`` as there can be; none if there are no rows.

    Their sizes differ by one at most, so that none is a small rest, whose step would be as large as that of a whole one.
    """
    order = torch.randperm(count, generator=generator)
    return order.tensor_split(math.ceil(count / size)) if count else ()


def minibatches(experience: Experience, epochs: int, learner: Learner[OnlineConfig]) -> Iterator[Tensor]:
    """Rows of every minibatch of every epoch; masked and failed responses leave all of them smaller."""
    for _ in range(epochs):
        for rows in shuffled(len(experience.rows), learner.config.minibatch_size, learner.generator):
            yield rows.to(experience.rows.device)


def take_step(
    learner: Learner[RolloutConfig],
    modules: Sequence[nn.Module],
    sums: MetricSums,
    *,
    before: Metrics,
    update: int,
    sources: Sequence[str],
    max_approx_kl: float = math.inf,
) -> StepResult:
    """One optimizer step on the gradients that are there, for all modules or, if a number is not finite, for none.

    Args:
        learner: what learns.
        modules: those of its networks that do.
        sums: the step's metrics.
        before: the sums without this minibatch; they are put back if the step is left out.
        update: number of the optimizer step within its rollout batch, from 1.
        sources: where the minibatch's records were read.
        max_approx_kl: above it, ratios have exploded.
    """
    broken, norm, norms = broken_numbers(sums, before, max_approx_kl), math.nan, list[float]()
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


def broken_numbers(sums: MetricSums, before: Mapping[str, Tensor], max_approx_kl: float) -> dict[str, float]:
    """The metrics that a minibatch made non-finite; if there are none, its approx_kl if that is above a limit."""
    name = "policy/approx_kl"
    exploded = name in sums.totals and sums.totals[name] - before.get(name, 0.0) > max_approx_kl
    if sums.are_finite() and not exploded:
        return {}
    values = {name: float(total) - float(before.get(name, 0.0)) for name, total in sums.totals.items()}
    return {name: value for name, value in values.items() if not math.isfinite(value)} or {name: values[name]}


def critic_norm(of_head: Sequence[StepResult], taken: Sequence[StepResult]) -> dict[str, float]:
    """``value/grad_norm``: mean norm of the critic's own gradient over its steps; nothing if it made none.

    Args:
        of_head: steps of a value head on the policy's trunk.
        taken: steps of the policy, and with it of a critic that has a network of its own.
    """
    norm = mean_norm([step.norm for step in of_head] or [step.critic_norm for step in taken])
    return {} if norm is None else {"value/grad_norm": norm}
