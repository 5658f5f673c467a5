"""Hidden tests of lesson 5, GAE."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    """GAE of one response, with a loop."""
    for gamma, gae_lambda in ((1.0, 0.5), (0.9, 0.5), (0.9, 1.0)):
        rewards, values = [0.0, 0.0, -0.5, 0.0, 1.0], [0.25, 0.5, 0.5, 0.75, 0.5]
        advantages, returns = core.gae(
            torch.tensor([rewards]),
            torch.tensor([values]),
            torch.ones(1, 5, dtype=torch.bool),
            gamma=gamma,
            gae_lambda=gae_lambda,
        )
        came_out = answer(rewards, values, gamma, gae_lambda)
        is_pair = isinstance(came_out, list | tuple) and len(came_out) == 2
        assert is_pair, "return two lists: advantages, returns"
        at = f"of the lesson's five tokens at gamma {gamma:g}, lambda {gae_lambda:g}"
        same(came_out[0], advantages[0].tolist(), f"advantages {at}")
        same(came_out[1], returns[0].tolist(), f"returns {at}")


def check_2(answer: Callable[..., Any]) -> None:
    """The lambda that keeps a share of the last reward for the first token."""
    for time, kept in ((2, 0.5), (12, 0.57), (101, 0.9)):
        right = kept ** (1 / (time - 1))
        same(answer(time, kept), right, f"lambda that keeps {kept:g} over T = {time} tokens", tolerance=1e-6)


def check_3(answer: Callable[..., Any]) -> None:
    """GAE of a batch with padding."""
    rewards = torch.tensor([[0.0, 1.0, 7.0, 7.0], [0.5, 0.0, 0.0, -1.0]])
    values = torch.tensor([[0.5, 0.25, 3.0, 3.0], [0.25, 0.5, 0.5, 0.25]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    came_out = answer(rewards.clone(), values.clone(), mask.clone(), 0.9, 0.5)
    is_pair = isinstance(came_out, list | tuple) and len(came_out) == 2
    assert is_pair, "return two tensors: advantages, returns"
    for name, found, right in zip(
        ("advantages", "returns"), came_out, core.gae(rewards, values, mask, gamma=0.9, gae_lambda=0.5), strict=True
    ):
        same(found, right, f"{name} of a row of 2 tokens with padding, and one of 4")
