"""Hidden tests of lesson 2, demonstrations, masks, the end token."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same

LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -9.0, -9.0]])  # -9 in the padding
MASK = torch.tensor([[True, True, True, True], [True, True, False, False]])


def check_1(answer: Callable[..., Any]) -> None:
    """Each token is predicted by the logits before it; the mean is over learned tokens, not over all entries or texts."""
    logits = torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 5, 4, 3, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0]], dtype=torch.bool)
    came_out = answer(logits.clone(), ids.clone(), mask.clone())
    unshifted = -core.token_logprobs(logits, ids)[mask].mean()
    if isinstance(came_out, torch.Tensor) and came_out.numel() == 1:
        assert not abs(float(came_out) - float(unshifted)) < 1e-6, (
            "the token at position t is predicted by the logits at t - 1, but you use those at t"
        )
    right = -core.token_logprobs(logits[:, :-1], ids[:, 1:])[mask[:, 1:]].mean()
    same(came_out, right, "the loss of two texts with 4 and 2 learned tokens")


def check_2(answer: Callable[..., Any]) -> None:
    """The end token is learned unless the response was cut."""
    for truncated in (False, True):
        came_out = answer([5, 6, 7], [8, 9], 2, truncated)
        is_pair = isinstance(came_out, tuple | list) and len(came_out) == 2
        ids, learned = came_out if is_pair else (came_out, came_out)
        end = [] if truncated else [2]
        asked = f"prompt [5, 6, 7], response [8, 9], end 2, truncated {truncated}"
        same(ids, [5, 6, 7, 8, 9, *end], f"ids of {asked}")
        same(learned, [False] * 3 + [True] * (2 + len(end)), f"learned tokens of {asked}")


def check_3(answer: Callable[..., Any]) -> None:
    """Parts of different sizes."""
    parts = [(LOGPROBS[:1], MASK[:1]), (LOGPROBS[1:], MASK[1:])]
    same(answer(parts), 2.0, "two parts of 4 and 2 learned tokens, 12 nats together")
    same(answer([(LOGPROBS, MASK)]), 2.0, "the same batch in one part")
