"""Hidden tests of lesson 5, GAE."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import first, normal, same, two

NAMES = ("advantages", "returns")


def check_1(answer: Callable[..., Any]) -> None:
    """GAE of one response, with a loop."""
    five = [0.0, 0.0, -0.5, 0.0, 1.0], [0.25, 0.5, 0.5, 0.75, 0.5]
    seven = normal(0, 7).tolist(), normal(1, 7).tolist()
    one = [0.5], [0.25]
    for (rewards, values), gamma, gae_lambda in (
        (five, 1.0, 0.5),
        (five, 0.9, 0.5),
        (seven, 0.95, 0.8),
        (one, 0.9, 0.5),
    ):
        right = core.gae(
            torch.tensor([rewards]),
            torch.tensor([values]),
            torch.ones(1, len(rewards), dtype=torch.bool),
            gamma=gamma,
            gae_lambda=gae_lambda,
        )
        came_out = two(answer(rewards, values, gamma, gae_lambda), "advantages, returns")
        what = "the lesson's five tokens" if rewards is five[0] else f"{len(rewards)} tokens"
        for name, found, expected in zip(NAMES, came_out, right, strict=True):
            same(found, expected[0], f"{name} of {what} at gamma {gamma:g}, lambda {gae_lambda:g}")


def check_2(answer: Callable[..., Any]) -> None:
    """The lambda that keeps a share of the last reward for the first token."""
    for time, kept in ((2, 0.5), (12, 0.57), (101, 0.9), (5, 0.1)):
        right = kept ** (1 / (time - 1))
        same(answer(time, kept), right, f"lambda that keeps {kept:g} over T = {time} tokens", tolerance=1e-6)


def check_3(answer: Callable[..., Any]) -> None:
    """GAE of a batch with padding."""
    for seed, lengths, gamma, gae_lambda in ((0, [2, 4], 0.9, 0.5), (2, [5, 1, 3], 0.95, 0.8)):
        mask = first(lengths, max(lengths))
        rewards, values = normal(seed, *mask.shape), normal(seed + 1, *mask.shape)
        rewards[~mask], values[~mask] = 7.0, torch.nan
        came_out = two(answer(rewards, values, mask, gamma, gae_lambda), "advantages, returns")
        right = core.gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
        for name, found, expected in zip(NAMES, came_out, right, strict=True):
            told = f"rows of {' and '.join(map(str, lengths))} tokens with 7 and NaN in the padding"
            same(found, expected, f"{name} of {told}, at gamma {gamma:g}, lambda {gae_lambda:g}")
