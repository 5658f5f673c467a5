"""Exercises of lesson 8: groups as their own baseline."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    scores = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.25, 0.25, 0.25, 0.25])
    kl = torch.tensor([2.0, 1.0, 0.0, 4.0, 1.0, 1.0, 3.0, 1.0])
    for kl_coef in (0.0, 0.1):
        expected = core.rloo_advantages(scores - kl_coef * kl, group_size=4)
        same(answer(scores, kl, kl_coef, 4), expected, f"advantages of two groups of four with kl_coef {kl_coef}")


def check_2(answer: Callable[..., Any]) -> None:
    for p, group_size in (
        ([0.5, 0.5], 2),
        ([0.9, 0.1], 4),
        ([0.2, 0.5, 0.3], 2),
        ([1.0], 8),
        ([0.1, 0.4, 0.25, 0.25], 3),
    ):
        expected = 1 - sum(one**group_size for one in p)
        same(answer(p, group_size), expected, f"the share of groups of {group_size} that do not tie, for p = {p}")


def check_3(answer: Callable[..., Any]) -> None:
    mask = torch.tensor([[True, True, False, False], [True, True, True, True], [False, True, False, False]])
    for how in ("token", "sequence", "fixed"):
        x = torch.zeros(mask.shape, requires_grad=True)
        core.Reduction(how, max_new_tokens=8).tokens(x, mask).backward()
        came_out = answer(mask, how, 8)
        same(came_out, x.grad, f'weights with how = "{how}", max_new_tokens 8, responses of 2, 4 and 1 tokens')
