"""Exercises of lesson 10: labels, the reward model's loss, the rewards of tokens."""

import math
from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    ids = torch.tensor([1, 70, 71, 2, 80, 81, 3, 0, 0])  # BOS, instruction, SEP, response, EOS, PAD
    asked = "labels of [BOS 70 71 SEP 80 81 EOS PAD PAD]"
    came_out = answer(ids, 2, 0)
    same(came_out, torch.tensor([-100, -100, -100, 80, 81, 3, -100, -100, -100]), asked)
    same(answer(ids[:7], 2, 0), torch.tensor([-100, -100, -100, 80, 81, 3, -100]), "labels of a row without PAD")


def check_2(answer: Callable[..., Any]) -> None:
    r_good, r_bad = torch.tensor([1.0, 0.2, -1.0]), torch.tensor([0.0, 0.5, 1.0])
    expected, _ = core.pairwise_reward_loss(r_good, r_bad)
    same(answer(r_good, r_bad), expected, "the loss of three pairs, two of which are in the wrong order")
    came_out = answer(torch.tensor([-1000.0]), torch.tensor([0.0]))
    assert math.isfinite(came_out), (
        f"with r_good 1000 below r_bad the loss is {float(came_out)}; use logsigmoid or softplus"
    )
    same(came_out, 1000.0, "the loss if r_good is 1000 below r_bad")


def check_3(answer: Callable[..., Any]) -> None:
    logp_old = torch.tensor([[-1.0, -2.0, -0.5], [-0.5, -1.5, -3.0]])
    logp_ref = torch.tensor([[-1.2, -1.0, -0.5], [-1.5, -1.25, -9.0]])
    scores, mask = torch.tensor([1.0, -2.0]), torch.tensor([[True, True, True], [True, True, False]])
    for kl_coef in (0.0, 0.1):
        expected = core.kl_shaped_rewards(scores, logp_old, logp_ref, mask, kl_coef=kl_coef)
        asked = f"rewards of responses of 3 and 2 tokens with kl_coef {kl_coef:g}"
        same(answer(scores, logp_old, logp_ref, mask, kl_coef), expected, asked)
