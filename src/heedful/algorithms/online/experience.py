"""`Experience`: an update's data as tensors; `Counts`: the divisors of its losses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful import core
from heedful.algorithms.online.advantages import action_mask
from heedful.configs.online import OnlineConfig
from heedful.data.batches import Batch, shapes
from heedful.devices import on_host, upload
from heedful.distributed.sharding import LockstepForwards
from heedful.engines.teacher_forced import micro_batches
from heedful.types import Completion, MicroBatch


class TokenNumbers(NamedTuple):
    """A number for each token of some responses of a rollout batch, to be written down (``--rollouts all``)."""

    rows: Int[Tensor, " some"]
    """Places of the responses in the rollout batch."""
    numbers: Float[Tensor, "some time"]


@dataclass(frozen=True)
class Experience:
    """A rollout batch with all constants of an update; shapes are ``[batch, time]`` unless noted."""

    batch: Batch
    rows: Int[Tensor, " batch"]
    """Indices of the responses in the rollout batch, without masked responses."""
    old_logprobs: Float[Tensor, "batch time"] | None
    """None if the update's own pass is the first (`makes_first_pass`)."""
    ref_logprobs: Float[Tensor, "batch time"] | None
    """None if the reference is not needed."""
    rewards: Float[Tensor, "batch time"]
    """Score, penalties and KL per token; for inspection."""
    advantages: Float[Tensor, "batch time"]
    old_values: Float[Tensor, "batch time"] | None
    """None without a critic, as are ``returns``."""
    returns: Float[Tensor, "batch time"] | None
    kl: Float[Tensor, " all"]
    """KL to the reference of every response of the rollout batch, `core.response_kl`. NaN where no pass has
    measured it."""
    kl_coef: float
    """The coefficient of the KL penalty in this step."""
    entropy_coef: float
    """The coefficient of the entropy bonus."""
    completions: Sequence[Completion]
    scores: list[float]
    """Raw scores, before normalisation and penalties."""
    metrics: dict[str, float]
    sampled_tokens: int
    states: dict[int, Float[Tensor, "tokens hidden"]] | None
    """Inputs of the policy's value head by row of the rollout batch, of those that this rank has read; None without one."""
    sampler_logprobs: Float[Tensor, "batch time"]
    """Log-probs recorded during sampling, of the policy before top-k and top-p; only for metrics."""
    drawn_logprobs: Float[Tensor, "batch time"]
    """Log-probs recorded during sampling, of the distribution that was drawn from (``policy_loss`` sao)."""
    is_finite: Bool[Tensor, " batch"]
    """False where a response's rewards, log-probs or values are not finite; for messages."""
    correct: Bool[Tensor, " batch"] | None = None
    """True for responses with a score of at least ``correct_from``; None without ``positive_coef``."""
    entropy: Float[Tensor, "batch time"] | None = None
    """Of the policy that sampled, in nats; for inspection; None without ``old_logprobs``."""
    temperature: float = 1.0
    """Sampling temperature, also of the log-probs."""

    def __repr__(self) -> str:
        """A line for each field: the shape and type of a tensor, the number of texts."""
        return shapes("Experience", vars(self))

    @property
    def makes_first_pass(self) -> bool:
        """Whether the update's pass over the policy is the first over these responses: entropy, KL and mismatch are its."""
        return self.old_logprobs is None

    @property
    def mask(self) -> Bool[Tensor, "batch time"]:
        """True at response tokens."""
        return self.batch.response_mask

    def sources(self, rows: Tensor) -> list[str]:
        """Sources of the rows' prompts; if any rows of the batch are not finite, theirs instead.

        These may be other rows: comparing or whitening advantages spreads non-finite values over rows.
        """
        broken = (~on_host(self.is_finite)).nonzero().squeeze(1)
        return [self.completions[row].prompt.source for row in (broken if len(broken) else on_host(rows)).tolist()]

    def token_numbers(self) -> dict[str, TokenNumbers]:
        """What the update holds constant, by the names of the columns of ``rollouts/``; without what there is not."""
        numbers = {
            "old_logprobs": self.old_logprobs,
            "ref_logprobs": self.ref_logprobs,
            "values": self.old_values,
            "token_rewards": self.rewards,
            "advantages": self.advantages,
            "returns": self.returns,
            "entropy": self.entropy,
        }
        return {name: TokenNumbers(self.rows, one) for name, one in numbers.items() if one is not None}

    def select(self, rows: Tensor) -> "Experience":
        """The rows in the given order, without texts and metrics."""
        tensors: dict[str, Any] = {
            name: x[rows] for name, x in vars(self).items() if isinstance(x, Tensor) and name != "kl"
        }
        return replace(self, batch=self.batch.select(rows), completions=[], scores=[], metrics={}, **tensors)

    def only(self, marked: Tensor) -> "Experience":
        """The marked rows with their texts, and the metrics of all; other rows are masked."""
        rows = upload(on_host(marked).nonzero().squeeze(1), marked.device)
        return replace(
            self.select(rows),
            completions=[self.completions[row] for row in on_host(rows).tolist()],
            scores=[self.scores[row] for row in on_host(rows).tolist()],
            metrics=self.metrics,
        )

    def micro_batches(self, limit: MicroBatch, lockstep: LockstepForwards | None) -> Iterator["Experience"]:
        """Micro-batches of at most ``limit``; each rank has its own
        (`heedful.engines.teacher_forced.micro_batches`)."""
        for rows, _ in micro_batches(self.batch, limit, lockstep):
            yield self if len(rows) == len(self.rows) else self.select(rows)


def finite_rows(*numbers: Tensor | None) -> Bool[Tensor, " batch"]:
    """True for rows whose numbers are all finite; None is skipped."""
    return torch.stack([x.isfinite().all(dim=1) for x in numbers if x is not None]).all(dim=0)


@dataclass(frozen=True)
class Counts:
    """Divisors of a minibatch's sums, so that micro-batches add up."""

    reduction: core.Reduction
    """Divisors of means over tokens, or over responses."""
    tokens: Tensor
    responses: int
    actions: Tensor
    """Number of the critic's actions: tokens, or responses."""
    positive: Tensor | None = None
    """Number of tokens of correct responses; None without ``positive_coef``."""

    @classmethod
    def of(cls, minibatch: Experience, config: OnlineConfig) -> "Counts":
        """The counts of a whole minibatch."""
        mask, responses = minibatch.mask, len(minibatch.rows)
        tokens = mask.sum()
        reduction = core.Reduction(config.loss_reduction, tokens, responses, config.max_new_tokens)
        correct = minibatch.correct
        positive = None if correct is None else (mask & correct.unsqueeze(1)).sum()
        return cls(reduction, tokens, responses, action_mask(mask, config).sum(), positive)
