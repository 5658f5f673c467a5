"""Hidden tests of lesson 2, demonstrations, masks, the end token."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import first, normal, numbers, same, two


def check_1(answer: Callable[..., Any]) -> None:
    """Each token is predicted by the logits before it; the mean is over learned tokens, not over all entries or texts."""
    for seed, lengths in ((3, [6, 4]), (4, [3, 7, 5])):
        logits = normal(seed, len(lengths), 7, 9)
        ids = normal(seed + 9, len(lengths), 7).mul(100).long() % 9
        mask = first(lengths, 7) & ~first([2] * len(lengths), 7)
        came_out = answer(logits, ids, mask)
        unshifted = -core.token_logprobs(logits, ids)[mask].mean()
        if isinstance(came_out, torch.Tensor) and came_out.numel() == 1:
            assert not abs(numbers(came_out) - unshifted) < 1e-6, (
                "the token at position t is predicted by the logits at t - 1, but you use those at t"
            )
        right = -core.token_logprobs(logits[:, :-1], ids[:, 1:])[mask[:, 1:]].mean()
        learned = " and ".join(str(length - 2) for length in lengths)
        same(came_out, right, f"the loss of texts with {learned} learned tokens")


def check_2(answer: Callable[..., Any]) -> None:
    """The end token is learned unless the response was cut."""
    for prompt, response, end_id in (([5, 6, 7], [8, 9], 2), ([4], [3, 3, 5, 6], 1), ([7, 8], [9], 0)):
        for truncated in (False, True):
            ids, learned = two(answer(prompt, response, end_id, truncated), "all ids, and which are learned")
            end = [] if truncated else [end_id]
            asked = f"prompt {prompt}, response {response}, end {end_id}, truncated {truncated}"
            same(ids, [*prompt, *response, *end], f"ids of {asked}")
            same(learned, [False] * len(prompt) + [True] * len(response + end), f"learned tokens of {asked}")


def check_3(answer: Callable[..., Any]) -> None:
    """Parts of different sizes."""
    for seed, lengths in ((0, [[4], [2]]), (1, [[3, 1], [4, 4], [2, 1]]), (2, [[5, 2, 1]])):
        parts = [(-normal(seed + 3 * i, len(of), 5).exp(), first(of, 5)) for i, of in enumerate(lengths)]
        expected = -torch.cat([logprobs[mask] for logprobs, mask in parts]).mean()
        learned = ", ".join(str(sum(of)) for of in lengths)
        same(answer(parts), expected, f"the loss of {len(parts)} parts, learned tokens: {learned}")
