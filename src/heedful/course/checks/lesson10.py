"""Exercises of lesson 10: labels, the reward model's loss, PPO's loss."""

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
    logp_old = torch.full((2, 3), -1.0)
    drift = torch.tensor([[0.5, 0.1, 0.0], [-0.5, -0.1, 9.0]])
    adv, mask = (
        torch.tensor([[1.0, 0.5, -0.5], [-1.0, 2.0, 3.0]]),
        torch.tensor([[True, True, True], [True, True, False]]),
    )
    logp_new = (logp_old + drift).requires_grad_()
    expected, _ = core.ppo_policy_loss(logp_new, logp_old, adv, mask, clip_range=0.2)
    came_out = answer(logp_new, logp_old, adv, mask, 0.8, 1.2)
    same(came_out, expected, "the loss of five tokens, two of which are clipped")
    assert getattr(came_out, "requires_grad", False), (
        "the loss has no gradient into logp_new, so nothing would be learned"
    )
    (found,) = torch.autograd.grad(came_out, logp_new)
    (gradient,) = torch.autograd.grad(expected, logp_new)
    same(found, gradient, "its gradient into logp_new")
