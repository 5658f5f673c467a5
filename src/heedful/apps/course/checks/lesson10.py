"""Exercises of lesson 10: labels, the reward model's loss, the rewards of tokens."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import first, normal, same


def check_1(answer: Callable[..., Any]) -> None:
    # BOS, instruction, SEP, response, EOS, PAD; then a row without PAD, and one with other ids
    for ids, sep, pad, labels in (
        ([1, 70, 71, 2, 80, 81, 3, 0, 0], 2, 0, [-100, -100, -100, 80, 81, 3, -100, -100, -100]),
        ([1, 70, 71, 2, 80, 81, 3], 2, 0, [-100, -100, -100, 80, 81, 3, -100]),
        ([4, 60, 5, 61, 62, 63, 7, 9], 5, 9, [-100, -100, 61, 62, 63, 7, -100, -100]),
    ):
        same(answer(torch.tensor(ids), sep, pad), torch.tensor(labels), f"labels of {ids} with sep {sep}, pad {pad}")


def check_2(answer: Callable[..., Any]) -> None:
    three = torch.tensor([1.0, 0.2, -1.0]), torch.tensor([0.0, 0.5, 1.0])
    for r_good, r_bad in (three, (2 * normal(0, 6), normal(1, 6))):
        expected, _ = core.pairwise_reward_loss(r_good, r_bad)
        same(answer(r_good, r_bad), expected, f"the loss of {len(r_good)} pairs, some of them in the wrong order")
    came_out = answer(torch.tensor([-1000.0]), torch.tensor([0.0]))
    same(came_out, 1000.0, "the loss if r_good is 1000 below r_bad (use logsigmoid or softplus)")


def check_3(answer: Callable[..., Any]) -> None:
    for seed, lengths, kl_coef in ((0, [3, 2], 0.0), (1, [3, 2], 0.1), (2, [1, 5, 4], 0.3)):
        mask = first(lengths, max(lengths))
        logp_old, logp_ref, scores = (
            -normal(seed, *mask.shape).exp(),
            -normal(9, *mask.shape).exp(),
            normal(seed, len(mask)),
        )
        expected = core.kl_shaped_rewards(scores, logp_old, logp_ref, mask, kl_coef=kl_coef)
        asked = f"rewards of responses of {' and '.join(map(str, lengths))} tokens with kl_coef {kl_coef:g}"
        same(answer(scores, logp_old, logp_ref, mask, kl_coef), expected, asked)
