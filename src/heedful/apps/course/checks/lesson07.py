"""Exercises of lesson 7: advantages, loss and ratios of whole responses."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import first, normal, same, two

MASKS = (
    torch.tensor([[True, True, True], [False, True, True], [True, False, True]]),
    torch.tensor([[False, True, True, True, False], [True, True, True, True, True]]),
)


def check_1(answer: Callable[..., Any]) -> None:
    for seed, mask in enumerate(MASKS):
        rewards, values = normal(seed, *mask.shape), normal(seed + 2, *mask.shape)
        total = core.response_rewards(rewards, mask)
        expected = core.gae(total, values, core.first_in_mask(mask))[0].sum(dim=1)
        asked = f"the advantages of {len(mask)} responses, one of which begins in the second column"
        same(answer(rewards, values, mask), expected, asked)


def check_2(answer: Callable[..., Any]) -> None:
    for seed, mask in enumerate(MASKS):
        logprobs, rewards, values = (
            -normal(seed, *mask.shape).exp(),
            normal(seed + 2, *mask.shape),
            normal(9, *mask.shape),
        )
        advantages, _ = core.gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
        expected, _ = core.a2c_policy_loss(logprobs, advantages, mask)
        asked = f"the loss of {mask.sum()} tokens, without what is outside the mask"
        same(answer(logprobs, rewards, values, mask), expected, asked)


def check_3(answer: Callable[..., Any]) -> None:
    chosen = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.1, 9.0], [0.19, -0.3, 0.11, 0.0, 0.0, 0.0]])
    drawn = torch.tensor([[0.15, 0.15, 0.15, 8.0], [0.25, 0.25, 0.25, 0.25], [0.35, -0.4, 8.0, 8.0]])
    for drift, lengths, eps in ((chosen, [5, 6], 0.2), (drawn, [3, 4, 2], 0.3)):
        mask = first(lengths, drift.shape[1])
        old = -normal(0, *mask.shape).exp()
        inside = torch.where(mask, drift, 0.0)
        outside = [((log_ratio.exp() - 1).abs() > eps).float() for log_ratio in (inside[mask], inside.sum(dim=1))]
        came_out = two(answer(old + drift, old, mask, eps), "the share of tokens, the share of responses")
        asked = f"shares of {int(mask.sum())} tokens and of {len(mask)} responses outside, eps {eps:g}"
        same(came_out, torch.stack([share.mean() for share in outside]), asked)
