"""`Experience`: all that an update learns from, as tensors; `Counts`: what its losses are divided by."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful import core
from heedful.algorithms.online.advantages import action_mask
from heedful.configs.online import OnlineConfig
from heedful.data.batches import Batch
from heedful.distributed.sharding import Passes
from heedful.engines.teacher_forced import micro_batches
from heedful.types import Completion, MicroBatch


@dataclass(frozen=True)
class Experience:
    """A rollout batch with all that an update holds constant; ``[batch, time]`` unless said."""

    batch: Batch
    rows: Int[Tensor, " batch"]
    """Places of the responses in the rollout batch; those that are masked are not among them."""
    old_logprobs: Float[Tensor, "batch time"] | None
    """None if the update's own pass gives them: it makes one step, before which the policy has not moved."""
    ref_logprobs: Float[Tensor, "batch time"] | None
    """None if the reference is not needed."""
    rewards: Float[Tensor, "batch time"]
    """Score, penalties and KL where they fall; to be looked at."""
    advantages: Float[Tensor, "batch time"]
    old_values: Float[Tensor, "batch time"] | None
    """None without a critic, as are ``returns``."""
    returns: Float[Tensor, "batch time"] | None
    kl: Float[Tensor, " all"]
    """KL to the reference of every response of the rollout batch, `core.response_kl`. Zero if KL has no price or
    ``old_logprobs`` is None."""
    kl_coef: float
    """The coefficient of the KL penalty in this step."""
    entropy_coef: float
    """That of the entropy bonus."""
    completions: list[Completion]
    scores: list[float]
    """As the rewards gave them, before normalisation and penalties."""
    metrics: dict[str, float]
    sampled_tokens: int
    states: Float[Tensor, "batch time hidden"] | None
    """What the policy's value head read; None if it has none."""
    sampler_logprobs: Float[Tensor, "batch time"]
    """What sampling saw; only for metrics."""
    is_finite: Bool[Tensor, " batch"]
    """False where a response's rewards, log-probs or values are not finite; for messages."""

    @property
    def mask(self) -> Bool[Tensor, "batch time"]:
        """True at response tokens."""
        return self.batch.response_mask

    def sources(self, rows: Tensor) -> list[str]:
        """Where the prompts of rows were read; of those that are not finite in their place, if there are any.

        Those may be other rows: advantages that compare responses, or are whitened, spread what is not finite.
        """
        broken = (~self.is_finite).nonzero().squeeze(1)
        return [self.completions[row].prompt.source for row in (broken if len(broken) else rows).tolist()]

    def select(self, rows: Tensor) -> "Experience":
        """The given rows, in the given order, without texts and metrics."""
        tensors: dict[str, Any] = {
            name: x[rows] for name, x in vars(self).items() if isinstance(x, Tensor) and name != "kl"
        }
        return replace(self, batch=self.batch.select(rows), completions=[], scores=[], metrics={}, **tensors)

    def only(self, marked: Tensor) -> "Experience":
        """The marked rows, with their texts and the metrics of all; the others are masked."""
        rows = marked.nonzero().squeeze(1)
        return replace(
            self.select(rows),
            completions=[self.completions[row] for row in rows.tolist()],
            scores=[self.scores[row] for row in rows.tolist()],
            metrics=self.metrics,
        )

    def micro_batches(self, limit: MicroBatch, passes: Passes | None) -> Iterator["Experience"]:
        """Parts of at most ``limit``; of several ranks each has its own (`heedful.engines.teacher_forced.micro_batches`)."""
        for rows, _ in micro_batches(self.batch, limit, passes):
            yield self.select(rows)


def finite_rows(*numbers: Tensor | None) -> Bool[Tensor, " batch"]:
    """Rows in which all numbers ``[batch, time]`` that there are are finite."""
    return torch.stack([x.isfinite().all(dim=1) for x in numbers if x is not None]).all(dim=0)


@dataclass(frozen=True)
class Counts:
    """What the sums of a minibatch are divided by, so that micro-batches add up."""

    reduction: core.Reduction
    """Of what is averaged over tokens, or over responses."""
    tokens: Tensor
    responses: int
    actions: Tensor
    """Of a critic: tokens, or responses."""

    @classmethod
    def of(cls, minibatch: Experience, config: OnlineConfig) -> "Counts":
        """The counts of a whole minibatch."""
        mask, responses = minibatch.mask, len(minibatch.rows)
        tokens = mask.sum()
        reduction = core.Reduction(config.loss_reduction, tokens, responses, config.max_new_tokens)
        return cls(reduction, tokens, responses, action_mask(mask, config).sum())
