"""What happens to scores before they become rewards: normalisation, clipping, and placing dense scores on tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["SMALLEST_STD", "RunningScoreNorm", "ScoreNorm", "clip_scores", "spread_scores"]

SMALLEST_STD = 1e-8
"""Below this standard deviation, scores count as equal and are not divided."""


@dataclass(frozen=True)
class ScoreNorm:
    """A fixed shift and scale of scores before they become rewards: ``(score - mean) / std``."""

    mean: float = 0.0
    std: float = 1.0

    @property
    def current(self) -> "ScoreNorm":
        """This norm."""
        return self

    def including(self, scores: Sequence[float]) -> "ScoreNorm":  # noqa: ARG002  the interface has it
        """The same norm: it was measured before training and does not change."""
        return self

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "std": self.std}


class RunningScoreNorm:
    """Mean and population standard deviation of all scores so far, merged batch by batch (Chan et al. 1979, eq. 2.1).

        n = n_a + n_b        d = mean_b - mean_a
        mean = mean_a + d n_b / n        M = M_a + M_b + d^2 n_a n_b / n        std = sqrt(M / n)

    M is the sum of squared deviations. The result does not depend on how the scores were cut into batches, and nothing
    is forgotten. As long as all scores are equal the standard deviation is taken as 1, so that they become 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.sum_squares = 0.0

    def including(self, scores: Sequence[float]) -> ScoreNorm:
        """Add a batch of scores, and return the norm of all scores so far, including that batch."""
        n = len(scores)
        mean = math.fsum(scores) / n
        total, shift = self.count + n, mean - self.mean
        self.sum_squares += math.fsum((s - mean) ** 2 for s in scores) + shift**2 * self.count * n / total
        self.mean += shift * n / total
        self.count = total
        return self.current

    @property
    def current(self) -> ScoreNorm:
        """The norm of all scores so far. Before the first it leaves scores as they are."""
        std = math.sqrt(self.sum_squares / max(1, self.count))
        return ScoreNorm(self.mean, std if std >= SMALLEST_STD else 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "sum_squares": self.sum_squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.sum_squares = state["count"], state["mean"], state["sum_squares"]


def clip_scores(scores: Float[Tensor, " batch"], limit: float | None) -> Float[Tensor, " batch"]:
    """Limit scores to ``[-limit, limit]``; None leaves them as they are."""
    return scores if limit is None else scores.clamp(-limit, limit)


def spread_scores(
    shaped: Float[Tensor, " batch"],
    tokens: Sequence[Sequence[float]] | None,
    response_mask: Bool[Tensor, "batch time"],
    *,
    std: float = 1.0,
) -> Float[Tensor, " batch"] | Float[Tensor, "batch time"]:
    """Put the dense part of each score on its tokens, and the rest of the score on the last token.

    Args:
        shaped: score of each response after normalisation, clipping and penalties.
        tokens: for each response its dense scores, one per token and possibly fewer; None if there are none, and
            ``shaped`` is returned as it is.
        response_mask: True at response tokens, which start at the first column.
        std: the standard deviation that ``shaped`` was divided by; dense scores are divided by it too.

    Each row adds up to its shaped score. So everything but the dense part lands on the last token: scalar rewards, the
    mean that normalisation subtracts, what clipping removed, and the missing-EOS penalty.
    """
    if tokens is None:
        return shaped
    placed = torch.zeros(response_mask.shape, dtype=shaped.dtype, device=shaped.device)
    for row, numbers in enumerate(tokens):
        placed[row, : len(numbers)] = torch.tensor(numbers, dtype=shaped.dtype, device=shaped.device) / std
    last = response_mask.sum(dim=1) - 1  # responses are padded on the right
    rows = torch.arange(len(tokens), device=shaped.device)
    placed[rows, last] += shaped - placed.sum(dim=1)
    return placed
