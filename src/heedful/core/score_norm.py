"""What becomes of scores before they are rewards: normalisation, clipping, and places for dense ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["SMALLEST_STD", "RunningScoreNorm", "ScoreNorm", "clip_scores", "spread_scores"]

SMALLEST_STD = 1e-8
"""Scores that differ less than this have no scale to divide by."""


@dataclass(frozen=True)
class ScoreNorm:
    """Scores are shifted and scaled by these before they become rewards: ``(score - mean) / std``."""

    mean: float = 0.0
    std: float = 1.0

    def including(self, scores: Sequence[float]) -> "ScoreNorm":  # noqa: ARG002
        """Itself: what was measured before training stays."""
        return self

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "std": self.std}


class RunningScoreNorm:
    """Mean and population standard deviation of all scores so far, merged batch by batch (Chan et al. 1979, eq. 2.1).

        n = n_a + n_b        d = mean_b - mean_a
        mean = mean_a + d n_b / n        M = M_a + M_b + d^2 n_a n_b / n        std = sqrt(M / n)

    n, mean and the sum of squared deviations M are exact for the scores seen, in whatever batches they came; nothing is
    forgotten. While all scores so far are equal the standard deviation is taken as 1, so that they become 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.sum_squares = 0.0

    def including(self, scores: Sequence[float]) -> ScoreNorm:
        """What to normalise a batch by: all scores so far, those of the batch among them."""
        n = len(scores)
        mean = math.fsum(scores) / n
        total, shift = self.count + n, mean - self.mean
        self.sum_squares += math.fsum((s - mean) ** 2 for s in scores) + shift**2 * self.count * n / total
        self.mean += shift * n / total
        self.count = total
        std = math.sqrt(self.sum_squares / total)
        return ScoreNorm(self.mean, std if std >= SMALLEST_STD else 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "sum_squares": self.sum_squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.sum_squares = state["count"], state["mean"], state["sum_squares"]


def clip_scores(scores: Float[Tensor, " batch"], limit: float | None) -> Float[Tensor, " batch"]:
    """Scores within ``[-limit, limit]``; None leaves them as they are."""
    return scores if limit is None else scores.clamp(-limit, limit)


def spread_scores(
    shaped: Float[Tensor, " batch"],
    tokens: Sequence[Sequence[float]] | None,
    response_mask: Bool[Tensor, "batch time"],
    *,
    std: float = 1.0,
) -> Float[Tensor, " batch"] | Float[Tensor, "batch time"]:
    """The dense part of each score at its tokens, over ``std``; all else that makes up ``shaped`` on the last token.

    So each row adds up to its shaped score: scalar rewards, the mean that normalisation takes off, what clipping cut and
    the missing-EOS penalty come at the end. Without dense scores (``tokens`` None) ``shaped`` is returned as it is.
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
