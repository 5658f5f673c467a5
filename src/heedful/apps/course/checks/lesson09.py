"""Exercises of lesson 9: losses of preference pairs and of single responses."""

import math
from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import normal, same


def check_1(answer: Callable[..., Any]) -> None:
    for seed, beta, pairs in ((0, 1.0, 2), (1, 5.0, 2), (2, 0.5, 5)):
        pi_w, pi_l, ref_w, ref_l = 5 * normal(seed, 4, pairs) - 10
        n_w, n_l = torch.arange(4, 4 + pairs), torch.arange(2, 2 + 3 * pairs, 3)
        expected, _ = core.dpo_loss(pi_w, pi_l, ref_w, ref_l, beta=beta, chosen_tokens=n_w, rejected_tokens=n_l)
        same(answer(pi_w, pi_l, ref_w, ref_l, n_w, n_l, beta), expected, f"the loss of {pairs} pairs with beta {beta}")
    far, zero, one = torch.tensor([-5000.0]), torch.zeros(1), torch.ones(1, dtype=torch.long)
    came_out = answer(far, zero, zero, zero, one, one, 0.1)
    same(came_out, 500.0, "the loss at h = -5000 with beta 0.1 (logsigmoid does not overflow)")


def check_2(answer: Callable[..., Any]) -> None:
    for beta, share in ((0.1, 1.0), (0.1, 0.5), (0.1, 0.9), (0.5, 0.25)):
        same(answer("ipo", beta, share), (2 * share - 1) / (2 * beta), f'stops_at("ipo", {beta}, {share})')
        expected = math.log(share / (1 - share)) / beta if share < 1 else math.inf
        same(answer("sigmoid", beta, share), expected, f'stops_at("sigmoid", {beta}, {share})')


def check_3(answer: Callable[..., Any]) -> None:
    for seed, good in enumerate(([True, True, False], [False, True, False, False, True])):
        logprobs, ref_logprobs, desirable = 2 * normal(seed, len(good)), normal(seed + 2, len(good)), torch.tensor(good)
        for kl, good_weight, bad_weight in ((0.5, 1.0, 1.0), (-2.0, 1.0, 1.0), (0.5, 1.0, 2.0)):
            weights = {"desirable_weight": good_weight, "undesirable_weight": bad_weight}
            expected, _ = core.kto_loss(logprobs, ref_logprobs, desirable, beta=0.4, kl=kl, **weights)
            told = f"the loss of {sum(good)} good responses and {len(good) - sum(good)} bad"
            asked = f"{told}, kl {kl:g}, weights {good_weight:g} and {bad_weight:g}"
            same(answer(logprobs, ref_logprobs, desirable, 0.4, kl, good_weight, bad_weight), expected, asked)
