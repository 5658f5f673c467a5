"""From scores to rewards: normalisation, clipping, and dense scores per token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.core.masking import at_least_float32, one_per_row, same_shape

__all__ = ["SMALLEST_STD", "ScoreNorm", "clip_scores", "spread_scores"]

SMALLEST_STD = 1e-8
"""Smallest standard deviation; below it scores count as equal and are not normalised."""


@dataclass(frozen=True)
class ScoreNorm:
    """Normalisation of scores: ``(score - mean) / std`` (Ziegler et al. 2019, section 2.2)."""

    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, scores: Float[Tensor, " batch"]) -> "ScoreNorm":
        """Mean and population standard deviation of scores. Raises ValueError if all are equal."""
        same_shape(1, scores=scores)
        scores = at_least_float32(scores)
        std = float(scores.std(correction=0))
        if std < SMALLEST_STD:
            raise ValueError(f"ScoreNorm.of: all {len(scores)} scores are {float(scores[0])}; they need a spread")
        return cls(float(scores.mean()), std)

    def __call__(self, scores: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Normalise scores."""
        same_shape(1, scores=scores)
        scores = at_least_float32(scores)
        return (scores - self.mean) / self.std

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "std": self.std}


def clip_scores(scores: Float[Tensor, " batch"], limit: float | None) -> Float[Tensor, " batch"]:
    """Clip scores to ``[-limit, limit]``; None returns them unchanged."""
    same_shape(1, scores=scores)
    return scores if limit is None else at_least_float32(scores).clamp(-limit, limit)


def spread_scores(
    shaped: Float[Tensor, " batch"],
    tokens: Sequence[Sequence[float]] | None,
    response_mask: Bool[Tensor, "batch time"],
    *,
    std: float = 1.0,
) -> Float[Tensor, " batch"] | Float[Tensor, "batch time"]:
    """Place dense scores on their tokens, and the rest of each response's score on its last token.

    Args:
        shaped: score of each response after normalisation, clipping and penalties.
        tokens: dense scores of each response, at most one per token; None returns ``shaped`` unchanged.
        response_mask: True at response tokens.
        std: standard deviation that normalised ``shaped``; dense scores are divided by it too.

    Each row sums to its shaped score. So the last token gets everything but the dense scores: scalar rewards, the mean
    subtracted by normalisation, the part removed by clipping, and the missing-EOS penalty.
    """
    one_per_row(shaped=shaped, response_mask=response_mask)
    if tokens is None:
        return shaped
    if len(tokens) != len(shaped):
        raise ValueError(f"spread_scores: tokens has {len(tokens)} responses, but shaped has {len(shaped)}")
    shaped = at_least_float32(shaped)
    placed = torch.zeros(response_mask.shape, dtype=shaped.dtype, device=shaped.device)
    places = [own.nonzero().squeeze(1) for own in response_mask.cpu()]
    for row, numbers in enumerate(tokens):
        there = places[row][: len(numbers)].to(shaped.device)
        placed[row, there] = torch.tensor(numbers, dtype=shaped.dtype, device=shaped.device) / std
    last = torch.tensor([own[-1] if len(own) else 0 for own in places], device=shaped.device)
    rows = torch.arange(len(tokens), device=shaped.device)
    placed[rows, last] += shaped - placed.sum(dim=1)
    return placed
