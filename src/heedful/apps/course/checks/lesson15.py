"""Hidden tests of lesson 15, critics."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import first, normal, same


def check_1(answer: Callable[..., Any]) -> None:
    """Explained variance against Monte Carlo returns."""
    for seed, lengths, constant in ((0, [4, 4, 4], 0.0), (2, [5, 1, 3], 0.0), (4, [6, 2, 4, 3], 5.0)):
        mask = first(lengths, max(lengths))
        rewards = normal(seed, *mask.shape)
        returns = core.rewards_to_go(rewards, mask)
        values = 0.7 * returns + 0.4 * normal(seed + 1, *mask.shape) + constant
        told = f"rows of {', '.join(map(str, lengths))} tokens" + " and values that are 5 too high" * bool(constant)
        same(answer(values, rewards, mask), core.explained_variance(values, returns, mask), told)


def check_2(answer: Callable[..., Any]) -> None:
    """The alpha that keeps a share of the last reward for the first token."""
    for length, kept in ((20, 0.5), (400, 0.5), (2, 0.25), (100, 0.1)):
        right = 1 / (length * (1 - kept ** (1 / (length - 1))))
        same(answer(length, kept), right, f"alpha that keeps {kept:g} over {length} tokens")


def check_3(answer: Callable[..., Any]) -> None:
    """What the mean of a group's other scores explains."""
    for scores, group_size in (
        (normal(0, 4).repeat_interleave(4) + 0.3 * normal(1, 16), 4),
        (normal(2, 12), 2),
        (torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0]), 3),
    ):
        others = core.others_mean(scores, group_size=group_size)
        right = core.explained_variance(others, scores, torch.ones(len(scores), dtype=torch.bool))
        same(answer(scores, group_size), right, f"{len(scores)} scores in groups of {group_size}")
