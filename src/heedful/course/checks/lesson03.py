"""Hidden tests of lesson 3, a reward model."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    """Bradley-Terry loss, also if the sigmoid underflows."""
    r_w, r_l = torch.tensor([2.0, 0.5, 0.0]), torch.tensor([-1.0, 1.0, 0.0])
    expected, _ = core.pairwise_reward_loss(r_w, r_l)
    same(answer(r_w, r_l), expected, "r_w [2, 0.5, 0], r_l [-1, 1, 0]")
    same(answer(r_w + 5, r_l + 5), expected, "the same scores, each plus 5")
    far = torch.tensor([-200.0]), torch.tensor([0.0])
    same(answer(*far), 200.0, "a pair far in the wrong order, r_w -200, r_l 0 (use logsigmoid)")


def check_2(answer: Callable[..., Any]) -> None:
    """The mean over all pairs of a prompt; ties make no pair."""
    scores = torch.tensor([0.2, 1.5, -1.0, -0.3])
    for ranks in ([1, 0, 3, 2], [0, 1, 2, 3], [0, 0, 1, 1]):
        expected, _ = core.ranking_reward_loss(scores, torch.tensor(ranks), torch.zeros(4, dtype=torch.long))
        same(answer(scores, torch.tensor(ranks)), expected, f"scores [0.2, 1.5, -1, -0.3], ranks {ranks}")


def check_3(answer: Callable[..., Any]) -> None:
    """The last real token, for any padding."""
    output = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]])
    for kind in (mask, mask.bool()):
        same(answer(output, kind), [4.0, 2.0, 4.0, 3.0], "outputs 1, 2, 3, 4 without padding, right, left, and both")
