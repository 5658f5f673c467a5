"""Groups of responses to one prompt, some of which may have no score: mean, deviation, ties.

``groups`` is ``[groups, size]``, and ``kept`` marks what has a score; None is all of it.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["tied_groups"]


def tied_groups(
    scores: Float[Tensor, " batch"], *, group_size: int, valid: Bool[Tensor, " batch"] | None = None
) -> Bool[Tensor, " groups"]:
    """Marks groups of consecutive scores that are all equal, or of which fewer than two are valid: they teach nothing.

    Args:
        scores: one score per response; consecutive rows share a prompt.
        group_size: number of responses per group.
        valid: which responses have a score; None is all of them.
    """
    groups = scores.unflatten(0, (-1, group_size))
    return is_tied(groups, None if valid is None else valid.view_as(groups)).squeeze(1)


def in_groups(scores: Float[Tensor, " batch"], valid: Bool[Tensor, " sampled"] | None) -> Float[Tensor, " sampled"]:
    """Put scores at their places among all responses that were sampled, of which ``valid`` marks them; zeros elsewhere."""
    return scores if valid is None else scores.new_zeros(len(valid)).masked_scatter(valid, scores)


def group_mean(groups: Tensor, kept: Tensor | None) -> Tensor:
    """Mean of each group's kept scores, ``[groups, 1]``; 0 if there are none."""
    if kept is None:
        return groups.mean(dim=1, keepdim=True)
    return torch.where(kept, groups, 0.0).sum(dim=1, keepdim=True) / kept.sum(dim=1, keepdim=True).clamp_min(1)


def group_std(groups: Tensor, kept: Tensor | None) -> Tensor:
    """Sample standard deviation of each group's kept scores, ``[groups, 1]``; 0 if there are fewer than two."""
    if kept is None:
        return groups.std(dim=1, keepdim=True)
    squares = torch.where(kept, groups - group_mean(groups, kept), 0.0).square().sum(dim=1, keepdim=True)
    return (squares / (kept.sum(dim=1, keepdim=True) - 1).clamp_min(1)).sqrt()


def is_tied(groups: Tensor, kept: Tensor | None) -> Tensor:
    """Marks groups whose kept scores are all equal, ``[groups, 1]``; rounding must not make a difference between them."""
    if kept is None:
        return groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    largest = torch.where(kept, groups, -torch.inf).amax(dim=1, keepdim=True)
    return largest <= torch.where(kept, groups, torch.inf).amin(dim=1, keepdim=True)


def zero_where(tied: Tensor, advantages: Tensor, kept: Tensor | None) -> Tensor:
    """Advantages that are 0 in tied groups and where nothing was kept."""
    return torch.where(tied if kept is None else tied | ~kept, 0.0, advantages)
