"""Mechanics of an update around its maths: out of memory, non-finite numbers, optimizer steps."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from heedful.algorithms.online.experience import Experience
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.recorder import Recorder
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.core.policy_losses import Metrics
from heedful.devices import upload
from heedful.distributed import ranks
from heedful.faults import hit
from heedful.training.metric_sums import MetricSums
from heedful.training.non_finite import StepResult
from heedful.training.optimization import optimizer_step, step_metrics
from heedful.types import MicroBatch


class Update:
    """The optimizer steps on one rollout batch.

    Args:
        learner: the learner.
        recorder: records the passes.
    """

    def __init__(self, learner: Learner[RolloutConfig], recorder: Recorder) -> None:
        hit("pass")
        self.learner, self.recorder = learner, recorder
        self.steps: list[StepResult] = []
        self._mixed: list[str] = []

    @property
    def has_moved(self) -> bool:
        """Whether the policy has changed since sampling."""
        return any(math.isfinite(step.norm) for step in self.steps)

    def retry_on_oom(self, rows: int) -> Iterator[contextlib.AbstractContextManager[MicroBatch]]:
        """Attempts at a minibatch's gradients. Each yields the micro-batch to use, smaller after memory ran out.

        Args:
            rows: number of rows (or pairs) of the minibatch.
        """
        learner = self.learner
        self.recorder.begin_minibatch()
        mixed_before = None if learner.ptx is None else learner.ptx.order.state_dict()

        def undo() -> None:
            self.skip()
            if learner.ptx is not None and mixed_before is not None:
                learner.ptx.order.load_state_dict(mixed_before)

        for attempt in learner.adaptive.retry_on_oom(learner.config.micro_batch, rows=rows, undo=undo):
            yield self.recorder.attempt(attempt)

    def is_above(self, approx_kl_limit: float | None) -> bool:
        """Whether the policy has changed and its approx_kl on the minibatch exceeds a limit."""
        if not self.has_moved or approx_kl_limit is None:
            return False
        approx_kl = self.recorder.approx_kl
        if ranks.size() > 1:
            ranks.raise_peer_errors()
            return ranks.total(float(approx_kl)) > approx_kl_limit
        return bool(approx_kl > approx_kl_limit)

    def mix_in(self, limit: MicroBatch) -> None:
        """Add the gradients of demonstrations (``--ptx-data``), if there are any."""
        if self.learner.ptx is not None:
            self._mixed = self.learner.ptx.accumulate(self.learner.policy, self.recorder.sums, limit)

    def skip(self) -> None:
        """Drop a minibatch's gradients."""
        self.learner.optimizer.zero_grad(set_to_none=True)

    def step(self, sources: Sequence[str], *, max_approx_kl: float = math.inf) -> None:
        """One optimizer step on a minibatch's gradients; skipped if a number is not finite.

        Args:
            sources: sources of its prompts.
            max_approx_kl: the step is skipped if approx_kl exceeds it (exploded ratios).
        """
        learner, recorder = self.learner, self.recorder
        result = take_step(
            learner,
            learner.policy,
            recorder.sums,
            before=recorder.sums_before,
            update=len(self.steps) + 1,
            sources=[*sources, *self._mixed],
            max_approx_kl=max_approx_kl,
        )
        self.steps.append(result)
        recorder.end_minibatch(is_skipped=result.is_skipped)
        if learner.average is not None and math.isfinite(result.norm):  # else the step was skipped
            learner.average.update()

    def metrics(self, of_critic: Sequence[StepResult] = ()) -> dict[str, float]:
        """Means over minibatches, and metrics of the optimizer steps, those of a critic of which some may be skipped."""
        norms, others = ([step.norm for step in steps] for steps in (self.steps, of_critic))
        return self.recorder.means() | step_metrics(norms, others)

    def taken_frac(self, responses: int) -> float:
        """Share of planned optimizer steps that were taken, for this number of responses."""
        config = self.learner.config
        planned = config.ppo_epochs * math.ceil(max(1, responses) / config.minibatch_size)
        return sum(not step.is_skipped for step in self.steps) / planned


def shuffled(count: int, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Row indices in random order, in the fewest minibatches of at most ``size``; none without rows.

    Sizes differ by at most one: a small last minibatch would take a step as large as a full one.
    """
    order = torch.randperm(count, generator=generator)
    return order.tensor_split(math.ceil(count / size)) if count else ()


def minibatches(
    experience: Experience, epochs: int, learner: Learner[OnlineConfig], generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Rows of every minibatch of every epoch; masked and failed responses shrink all of them evenly.

    They are in the order of a generator; None is the learner's."""
    for _ in range(epochs):
        for rows in shuffled(len(experience.rows), learner.config.minibatch_size, generator or learner.generator):
            yield upload(rows, experience.rows.device)


def take_step(
    learner: Learner[RolloutConfig],
    module: nn.Module,
    sums: MetricSums,
    *,
    before: Metrics,
    update: int,
    sources: Sequence[str],
    max_approx_kl: float = math.inf,
) -> StepResult:
    """One optimizer step on a module's accumulated gradients; skipped if a number is not finite.

    Args:
        learner: the learner.
        module: the network.
        sums: the step's metrics.
        before: the sums without this minibatch, restored if the step is skipped.
        update: number of the optimizer step within its rollout batch, from 1.
        sources: sources of the minibatch's records.
        max_approx_kl: the step is skipped if approx_kl exceeds it (exploded ratios).
    """
    broken, norm = broken_numbers(sums, before, max_approx_kl), math.nan
    if broken:
        learner.optimizer.zero_grad(set_to_none=True)
    else:
        norm = optimizer_step(learner.optimizer, module, learner.config.max_grad_norm)
        if not math.isfinite(norm) and learner.policy.grad_scaler is None:
            broken = {"gradient norm": norm}
    if broken:
        sums.reset(before)
        learner.non_finite_guard.skip(learner.schedule.done, update, broken, sources)
    return StepResult(norm, bool(broken))


def broken_numbers(sums: MetricSums, before: Mapping[str, Tensor], max_approx_kl: float) -> dict[str, float]:
    """Metrics that this minibatch made non-finite; if none, its approx_kl if above the limit."""
    name = "policy/approx_kl"
    moved = [sums.totals[name] - before.get(name, 0.0) <= max_approx_kl] if name in sums.totals else []
    if sums.are_finite(*moved):
        return {}
    values = {name: float(total) - float(before.get(name, 0.0)) for name, total in sums.totals.items()}
    return {name: value for name, value in values.items() if not math.isfinite(value)} or {name: values[name]}
