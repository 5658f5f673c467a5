"""Hidden tests of lesson 3, a reward model."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import normal, same


def check_1(answer: Callable[..., Any]) -> None:
    """Bradley-Terry loss, also if the sigmoid underflows."""
    r_w, r_l = torch.tensor([2.0, 0.5, 0.0]), torch.tensor([-1.0, 1.0, 0.0])
    expected, _ = core.pairwise_reward_loss(r_w, r_l)
    same(answer(r_w, r_l), expected, "r_w [2, 0.5, 0], r_l [-1, 1, 0]")
    same(answer(r_w + 5, r_l + 5), expected, "the same scores, each plus 5")
    r_w, r_l = 2 * normal(0, 6), normal(1, 6)
    same(answer(r_w, r_l), core.pairwise_reward_loss(r_w, r_l)[0], "six pairs of random scores")
    far = torch.tensor([-200.0]), torch.tensor([0.0])
    same(answer(*far), 200.0, "a pair far in the wrong order, r_w -200, r_l 0 (use logsigmoid)")


def check_2(answer: Callable[..., Any]) -> None:
    """The mean over all pairs of a prompt; ties make no pair."""
    for seed, ranks in enumerate(([1, 0, 3, 2], [0, 1, 2, 3], [0, 0, 1, 1], [2, 1, 2, 5, 1])):
        scores = normal(seed, len(ranks))
        expected, _ = core.ranking_reward_loss(scores, torch.tensor(ranks), torch.zeros(len(ranks), dtype=torch.long))
        told = [round(score, 2) for score in scores.tolist()]
        same(answer(scores, torch.tensor(ranks)), expected, f"scores {told}, ranks {ranks}")


def check_3(answer: Callable[..., Any]) -> None:
    """The last real token, for any padding."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]])
    last = [3, 1, 3, 2]
    for output in (torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 4), normal(0, 4, 4)):
        for kind in (mask, mask.bool()):
            expected = output[range(4), last]
            told = [round(x, 1) for x in output[0].tolist()]
            same(answer(output, kind), expected, f"outputs {told} and more, without padding, right, left, and both")
