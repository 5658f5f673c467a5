"""Statistics of single responses: length penalty and repeated n-grams."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.core.masking import same_shape

__all__ = ["overlong_penalty", "repeated_ngrams"]


def overlong_penalty(lengths: Int[Tensor, " batch"], *, max_new_tokens: int, buffer: int) -> Float[Tensor, " batch"]:
    """Soft penalty for responses near the length limit (Yu et al. 2025, DAPO, eq. 13).

        0                              if n <= max - buffer
        (max - buffer - n) / buffer    if max - buffer < n <= max
        -1                             if n > max

    Args:
        lengths: n, tokens of each response, stop token included.
        max_new_tokens: length limit; a response cut there has a penalty of -1.
        buffer: number of tokens over which the penalty falls from 0 to -1, at least 1.

    Raises ValueError if ``buffer`` is not between 1 and ``max_new_tokens``.
    """
    same_shape(1, lengths=lengths)
    if not 1 <= buffer <= max_new_tokens:
        raise ValueError(f"overlong_penalty: buffer must be 1 to max_new_tokens {max_new_tokens}, got {buffer}")
    return ((max_new_tokens - buffer - lengths) / buffer).clamp(-1.0, 0.0)


@torch.no_grad()
def repeated_ngrams(
    ids: Int[Tensor, "batch time"], response_mask: Bool[Tensor, "batch time"], *, n: int = 4
) -> Float[Tensor, " batch"]:
    """Share of a response's n-grams that repeat an earlier one (Welleck et al. 2020, seq-rep-n).

        1 - (number of distinct n-grams) / (number of n-grams)

    Args:
        ids: response tokens.
        response_mask: True at response tokens; an n-gram counts if all of its tokens do.
        n: tokens per n-gram.

    0 for a response without repetition, or with fewer than n tokens; near 1 for a response that loops.
    """
    same_shape(2, ids=ids, response_mask=response_mask)
    places = ids.shape[1] - n + 1
    if places < 1:
        return torch.zeros(len(ids), device=ids.device)
    keys, vocabulary = ids, ids.max() + 1
    for length in range(1, n):  # a key per distinct n-gram, from its prefix's key and last token
        keys = _ranks(keys[:, :-1]) * vocabulary + ids[:, length:]
    inside = response_mask.unfold(1, n, 1).all(dim=-1)
    place = torch.arange(places, device=ids.device)
    ordered = torch.where(inside, keys, -1 - place).sort(dim=1).values  # outside the mask all keys differ
    repeated = (ordered[:, 1:] == ordered[:, :-1]).sum(dim=1)
    return repeated / inside.sum(dim=1).clamp_min(1)


def _ranks(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Index of each number among the distinct ones in order, as from `torch.unique`, which would wait for a GPU."""
    ordered, order = x.flatten().sort()
    rank = (ordered.diff(prepend=ordered[:1]) != 0).cumsum(0)
    return torch.empty_like(rank).scatter_(0, order, rank).view(x.shape)
