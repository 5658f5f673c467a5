"""Exercises of lesson 9: losses of preference pairs and of single responses."""

import math
from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    pi_w, pi_l, ref_w, ref_l = torch.tensor([[-10.0, -8.0], [-14.0, -5.0], [-9.0, -9.5], [-9.0, -6.0]])
    n_w, n_l = torch.tensor([4, 10]), torch.tensor([5, 2])
    for beta in (1.0, 5.0):
        expected, _ = core.dpo_loss(pi_w, pi_l, ref_w, ref_l, beta=beta, chosen_tokens=n_w, rejected_tokens=n_l)
        same(answer(pi_w, pi_l, ref_w, ref_l, n_w, n_l, beta), expected, f"the loss of two pairs with beta {beta}")
    far, zero, one = torch.tensor([-5000.0]), torch.zeros(1), torch.ones(1)
    came_out = answer(far, zero, zero, zero, one, one, 0.1)
    assert math.isfinite(came_out), f"the loss at h = -5000 is {float(came_out)}; logsigmoid(x) does not overflow"
    same(came_out, 500.0, "the loss at h = -5000 with beta 0.1")


def check_2(answer: Callable[..., Any]) -> None:
    for beta, share in ((0.1, 1.0), (0.1, 0.5), (0.1, 0.9), (0.5, 0.25)):
        same(answer("ipo", beta, share), (2 * share - 1) / (2 * beta), f'stops_at("ipo", {beta}, {share})')
        expected = math.log(share / (1 - share)) / beta if share < 1 else math.inf
        same(answer("sigmoid", beta, share), expected, f'stops_at("sigmoid", {beta}, {share})')


def check_3(answer: Callable[..., Any]) -> None:
    logprobs, ref_logprobs = torch.tensor([-8.0, -6.0, -9.5]), torch.tensor([-10.0, -5.0, -10.0])
    desirable = torch.tensor([True, True, False])
    for kl, good, bad in ((0.5, 1.0, 1.0), (-2.0, 1.0, 1.0), (0.5, 1.0, 2.0)):
        expected, _ = core.kto_loss(
            logprobs, ref_logprobs, desirable, beta=0.4, kl=kl, desirable_weight=good, undesirable_weight=bad
        )
        asked = f"the loss of two good responses and a bad one, kl {kl:g}, weights {good:g} and {bad:g}"
        same(answer(logprobs, ref_logprobs, desirable, 0.4, kl, good, bad), expected, asked)
