"""What happens to scores before they become rewards: normalisation, clipping, and placing dense scores on tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["SMALLEST_STD", "ScoreNorm", "clip_scores", "spread_scores"]

SMALLEST_STD = 1e-8
"""Below this standard deviation, scores count as equal and are not divided."""


@dataclass(frozen=True)
class ScoreNorm:
    """A shift and scale of scores before they become rewards: ``(score - mean) / std`` (Ziegler et al. 2019, section 2.2)."""

    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, scores: Float[Tensor, " batch"]) -> "ScoreNorm":
        """Mean and population standard deviation of scores. Raises ValueError if they are all equal: they have no scale."""
        std = float(scores.std(correction=0))
        if std < SMALLEST_STD:
            raise ValueError(f"ScoreNorm.of: all {len(scores)} scores are {float(scores[0])}, so they have no scale")
        return cls(float(scores.mean()), std)

    def __call__(self, scores: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """The scores, shifted and scaled."""
        return (scores - self.mean) / self.std

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "std": self.std}


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
