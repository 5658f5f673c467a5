"""Exercises of lesson 7: advantages, loss and ratios of whole responses."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same

MASK = torch.tensor([[True, True, True], [False, True, True], [True, False, True]])


def check_1(answer: Callable[..., Any]) -> None:
    rewards = torch.tensor([[-0.1, -0.2, 1.0], [9.0, 0.5, -0.3], [0.25, 7.0, 0.5]])
    values = torch.tensor([[0.4, 0.6, 0.9], [5.0, 0.1, 0.2], [-0.5, 0.0, 0.3]])
    total = core.response_rewards(rewards, MASK)
    expected = core.gae(total, values, core.first_in_mask(MASK))[0].sum(dim=1)
    asked = "the advantage of three responses, one of which begins in the second column and one of which has a hole"
    same(answer(rewards, values, MASK), expected, asked)


def check_2(answer: Callable[..., Any]) -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-9.0, -3.0, -1.0], [-0.5, -9.0, -0.25]])
    rewards = torch.tensor([[-0.1, -0.2, 1.0], [9.0, 0.5, -0.3], [0.25, 7.0, 0.5]])
    values = torch.tensor([[0.4, 0.6, 0.9], [5.0, 0.1, 0.2], [-0.5, 0.0, 0.3]])
    advantages, _ = core.gae(rewards, values, MASK, gamma=1.0, gae_lambda=1.0)
    expected, _ = core.a2c_policy_loss(logprobs, advantages, MASK)
    same(
        answer(logprobs, rewards, values, MASK), expected, "the loss of seven tokens, without what is outside the mask"
    )


def check_3(answer: Callable[..., Any]) -> None:
    old = torch.full((2, 6), -1.0)
    drift = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.1, 9.0], [0.19, -0.3, 0.11, 0.0, 0.0, 0.0]])
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 5] = False
    came_out = answer(old + drift, old, mask, 0.2)
    is_pair = isinstance(came_out, tuple | list) and len(came_out) == 2
    assert is_pair, f"return two numbers, the share of tokens and that of responses; {came_out!r:.40} came out"
    same(
        [float(x) for x in came_out], [2 / 11, 1 / 2], "shares of tokens and of responses, of 11 tokens and 2 responses"
    )
