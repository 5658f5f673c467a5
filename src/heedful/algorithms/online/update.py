"""Mechanics of an update around its maths: out of memory, non-finite numbers, several ranks, metrics."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heedful import core
from heedful.algorithms.online.experience import Counts, Experience, TokenNumbers
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.metrics import pass_metrics, with_effective_frac
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.core.policy_losses import Metrics
from heedful.data.batches import Attempt
from heedful.devices import upload
from heedful.distributed import ranks
from heedful.faults import hit
from heedful.models.policy import TokenOutputs
from heedful.training.metric_sums import MetricSums
from heedful.training.non_finite import StepResult
from heedful.training.optimization import mean_norm, optimizer_step, step_metrics
from heedful.training.performance import online_performance
from heedful.types import MicroBatch


class Learned(NamedTuple):
    """Result of an update."""

    metrics: dict[str, float]
    kl: Tensor
    """KL to the reference per response, ``[batch]``."""
    token_numbers: dict[str, TokenNumbers]
    """What the update's own passes gave, by the columns of ``rollouts/``; nothing if these are not kept."""


class Update:
    """The optimizer steps on one rollout batch.

    Args:
        learner: the learner.
        kl: KL to the reference per response, ``[batch]``.
    """

    def __init__(self, learner: Learner[RolloutConfig], kl: Tensor) -> None:
        hit("pass")
        self.learner, self.started = learner, time.perf_counter()
        self.kl = kl.clone()
        """KL per response; `set_kl` fills in rows that only the update's own pass computes."""
        self.sums = MetricSums()
        self.steps: list[StepResult] = []
        self.visited = 0
        """Number of minibatches in the sums."""
        self.approx_kl: float | Tensor = 0.0
        """Sum over the minibatch's micro-batches so far, on this rank."""
        self._before: Metrics = {}
        self._mixed: list[str] = []
        self._read: list[Tensor] = []
        self._keeps_numbers = learner.config.rollouts == "all"
        self._numbers: list[tuple[int, str, TokenNumbers]] = []
        """What passes gave, each with the number of optimizer steps before it."""
        self._ratios: list[tuple[int, str, TokenNumbers]] = []
        """Those of the minibatch that is being learned from."""

    @property
    def has_moved(self) -> bool:
        """Whether the policy has changed since sampling."""
        return any(math.isfinite(step.norm) for step in self.steps)

    def attempts(self, rows: int) -> Iterator[contextlib.AbstractContextManager[MicroBatch]]:
        """Attempts at a minibatch's gradients. Each yields the micro-batch to use, smaller after memory ran out.

        Args:
            rows: number of rows (or pairs) of the minibatch.
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
        self.approx_kl, self._mixed, self._read, self._ratios = 0.0, [], [], []
        with attempt as limit:
            yield limit
            self.sums.add_ranks()

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of a micro-batch."""
        self.sums.add(metrics)
        self.approx_kl = self.approx_kl + metrics.get("policy/approx_kl", 0.0)

    def add_first_pass(self, new: TokenOutputs, part: Experience, counts: Counts) -> None:
        """Add the metrics and the KL of a micro-batch's pass, if the policy has not changed since sampling."""
        kl = None
        if part.ref_logprobs is not None:
            kl = core.response_kl(new.logprobs.detach(), part.ref_logprobs, part.mask)
            self.set_kl(part.rows, kl)
        self.note_first_pass(part.rows, new)
        seen = part.sampler_logprobs
        self.add(pass_metrics(new, seen, kl, part.mask, num_tokens=counts.tokens, num_responses=counts.responses))

    def note_first_pass(self, rows: Tensor, new: TokenOutputs) -> None:
        """Keep what the pass of the policy that sampled gave for some responses, if the settings ask for it."""
        if self._keeps_numbers:
            for name, numbers in {"old_logprobs": new.logprobs, "entropy": new.entropy}.items():
                self._numbers.append((0, name, TokenNumbers(rows.cpu(), numbers.detach().cpu())))

    def note_ratio(self, rows: Tensor, logprobs: Tensor, old_logprobs: Tensor) -> None:
        """Keep the log-ratio of each token of a pass, if the settings ask for it. A step that is left out drops it."""
        if self._keeps_numbers:
            numbers = TokenNumbers(rows.cpu(), (logprobs.detach() - old_logprobs).cpu())
            self._ratios.append((len(self.steps), "log_ratio", numbers))

    def set_kl(self, rows: Tensor, kl: Tensor) -> None:
        """Fill in the KL of some responses."""
        self.kl[rows] = kl
        self._read.append(rows)

    def share_kl(self, among: Tensor | None = None) -> None:
        """Share KL values among ranks: of all rows, or of the rows ``among``."""
        ranks.all_well()
        ranks.put_together(self.kl, self._read, among)

    def is_above(self, approx_kl_limit: float | None) -> bool:
        """Whether the policy has changed and its approx_kl on the minibatch exceeds a limit."""
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
        """Drop a minibatch's gradients."""
        self.learner.optimizer.zero_grad(set_to_none=True)

    def step(self, sources: Sequence[str], *, max_approx_kl: float = math.inf) -> None:
        """One optimizer step on a minibatch's gradients; skipped if a number is not finite.

        Args:
            sources: sources of its prompts.
            max_approx_kl: the step is skipped if approx_kl exceeds it (exploded ratios).
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
        self._numbers += [] if result.is_left_out else self._ratios
        if learner.average is not None and math.isfinite(result.norm):  # else the step was skipped
            learner.average.update()

    def metrics(self) -> dict[str, float]:
        """Means over minibatches, and metrics of the optimizer steps."""
        return self.sums.means(max(1, self.visited)) | step_metrics([step.norm for step in self.steps])

    def taken_frac(self, responses: int) -> float:
        """Share of planned optimizer steps that were taken, for this number of responses."""
        config = self.learner.config
        planned = config.ppo_epochs * math.ceil(max(1, responses) / config.minibatch_size)
        return sum(not step.is_left_out for step in self.steps) / planned

    def end(self, metrics: dict[str, float], learned_tokens: Tensor, sampled_tokens: int) -> Learned:
        """The step's metrics with its seconds and speed, and the KL per response."""
        metrics = with_effective_frac(metrics) | {"time/update": time.perf_counter() - self.started}
        device = self.learner.policy.device
        speed = online_performance(metrics, float(learned_tokens), device, sampled_tokens=sampled_tokens)
        return Learned(metrics | speed, self.kl, self._token_numbers())

    def _token_numbers(self) -> dict[str, TokenNumbers]:
        """What the passes of all ranks gave; of several over the same response the last."""
        if not self._keeps_numbers:
            return {}
        parts = sorted((part for of_rank in ranks.gather(self._numbers) for part in of_rank), key=lambda part: part[0])
        found: dict[str, TokenNumbers] = {}
        for name in dict.fromkeys(name for _, name, _ in parts):
            rows = torch.cat([numbers.rows for _, other, numbers in parts if other == name])
            numbers = torch.cat([numbers.numbers for _, other, numbers in parts if other == name])
            last = {row: place for place, row in enumerate(rows.tolist())}
            found[name] = TokenNumbers(torch.tensor(list(last)), numbers[list(last.values())])
        return found


def shuffled(count: int, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Row indices in random order, in the fewest minibatches of at most ``size``; none without rows.

    Sizes differ by at most one: a small last minibatch would take a step as large as a full one.
    """
    order = torch.randperm(count, generator=generator)
    return order.tensor_split(math.ceil(count / size)) if count else ()


def minibatches(experience: Experience, epochs: int, learner: Learner[OnlineConfig]) -> Iterator[Tensor]:
    """Rows of every minibatch of every epoch; masked and failed responses shrink all of them evenly."""
    for _ in range(epochs):
        for rows in shuffled(len(experience.rows), learner.config.minibatch_size, learner.generator):
            yield upload(rows, experience.rows.device)


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
    """One optimizer step on the accumulated gradients of all modules; skipped for all if a number is not finite.

    Args:
        learner: the learner.
        modules: its networks in this step.
        sums: the step's metrics.
        before: the sums without this minibatch, restored if the step is skipped.
        update: number of the optimizer step within its rollout batch, from 1.
        sources: sources of the minibatch's records.
        max_approx_kl: the step is skipped if approx_kl exceeds it (exploded ratios).
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
    """Metrics that this minibatch made non-finite; if none, its approx_kl if above the limit."""
    name = "policy/approx_kl"
    moved = [sums.totals[name] - before.get(name, 0.0) <= max_approx_kl] if name in sums.totals else []
    if sums.are_finite(*moved):
        return {}
    values = {name: float(total) - float(before.get(name, 0.0)) for name, total in sums.totals.items()}
    return {name: value for name, value in values.items() if not math.isfinite(value)} or {name: values[name]}


def critic_norm(of_head: Sequence[StepResult], taken: Sequence[StepResult]) -> dict[str, float]:
    """``value/grad_norm``: mean norm of the critic's own gradient over its steps; nothing if it made none.

    Args:
        of_head: steps of a value head on the policy's trunk.
        taken: steps of the policy and a separate critic.
    """
    norm = mean_norm([step.norm for step in of_head] or [step.critic_norm for step in taken])
    return {} if norm is None else {"value/grad_norm": norm}
