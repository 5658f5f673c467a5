"""Hidden tests of lesson 2, demonstrations, masks, the end token."""

from collections.abc import Callable
from typing import Any

import torch

from heedful.course.checks import same

LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, 0.0, 0.0]])
MASK = torch.tensor([[True, True, True, True], [True, True, False, False]])


def check_1(answer: Callable[..., Any]) -> None:
    """Mean over the learned tokens, not over all entries and not over responses."""
    same(answer(LOGPROBS[:1], MASK[:1]), 2.5, "four learned tokens with log-probs -1, -2, -3, -4")
    same(answer(LOGPROBS, MASK), 2.0, "six learned tokens whose log-probs add up to -12, and two of padding")
    padded = torch.where(MASK, LOGPROBS, -9.0)
    same(answer(padded, MASK), 2.0, "the same with -9 in the padding")


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
