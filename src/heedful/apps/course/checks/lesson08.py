"""Exercises of lesson 8: groups as their own baseline."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import first, normal, same


def check_1(answer: Callable[..., Any]) -> None:
    for seed, kl_coef, group_size, groups in ((0, 0.0, 4, 2), (1, 0.1, 4, 2), (2, 0.5, 3, 4), (3, 0.2, 2, 3)):
        scores, kl = normal(seed, group_size * groups), normal(seed + 4, group_size * groups).exp()
        expected = core.rloo_advantages(scores - kl_coef * kl, group_size=group_size)
        asked = f"advantages of {groups} groups of {group_size} with kl_coef {kl_coef}"
        same(answer(scores, kl, kl_coef, group_size), expected, asked)


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
    holes = torch.tensor([[True, True, False, False], [True, True, True, True], [False, True, False, False]])
    for mask, longest in ((holes, 8), (first([5, 2], 5), 6)):
        for how in ("token", "sequence", "fixed"):
            x = torch.zeros(mask.shape, requires_grad=True)
            core.Reduction(how, max_new_tokens=longest).tokens(x, mask).backward()
            told = ", ".join(str(int(row.sum())) for row in mask)
            asked = f'weights with how = "{how}", max_new_tokens {longest}, responses of {told} tokens'
            same(answer(mask, how, longest), x.grad, asked)
