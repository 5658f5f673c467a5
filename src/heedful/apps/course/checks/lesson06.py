"""Hidden tests of lesson 6, PPO."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import normal, numbers, same

RATIO = torch.tensor([0.5, 0.7, 1.0, 1.1, 1.5, 1.5, 0.5, 1.0])
ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, 1.0, 2.0, -1.0, -0.5, -1.0])


def check_1(answer: Callable[..., Any]) -> None:
    """The clipped objective."""
    old = torch.linspace(-3.0, -1.0, 8).view(2, 4)
    new, advantages = old + RATIO.view(2, 4).log(), ADVANTAGES.view(2, 4)
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    new[1, 2:] = torch.inf
    for clip_eps in (0.2, 0.4):
        loss, _ = core.ppo_policy_loss(new, old, advantages, mask, clip_range=clip_eps)
        came_out = answer(new, old, advantages, mask, clip_eps)
        only_clamped = float(((new - old).exp().clamp(1 - clip_eps, 1 + clip_eps) * advantages)[mask].mean())
        if isinstance(came_out, torch.Tensor) and came_out.numel() == 1:
            assert not abs(numbers(came_out) - only_clamped) < 1e-6, (
                "this clips every ratio; the objective is the smaller of the clipped and the unclipped product"
            )
        same(came_out, -loss, f"L_clip of 4 and 2 tokens, with padding, at clip_eps {clip_eps:g}")


def check_2(answer: Callable[..., Any]) -> None:
    """The mask of clipped tokens."""
    drawn = normal(0, 20).mul(0.4).exp(), normal(1, 20)
    for ratio, advantages, clip_eps in ((RATIO, ADVANTAGES, 0.2), (RATIO, ADVANTAGES, 0.4), (*drawn, 0.1)):
        mask = torch.ones(len(ratio), dtype=torch.bool)
        surrogate = core.clipped_ratio(
            ratio.log(), torch.zeros(len(ratio)), advantages, mask, core.Bounds(clip_eps, clip_eps)
        )
        came_out = answer(ratio, advantages, clip_eps)
        if ratio is RATIO and isinstance(came_out, torch.Tensor) and came_out.shape == (8,):
            for index in (0, 5):  # beyond a bound, on the unclipped side
                told = f"a token with ratio {ratio[index]:g} and advantage {advantages[index]:g} still learns"
                assert not came_out[index], f"{told}, but yours is clipped"
        same(came_out, surrogate.clipped, f"clipped tokens among {len(ratio)}, at clip_eps {clip_eps:g}")


def check_3(answer: Callable[..., Any]) -> None:
    """The clipped value loss."""
    shown = torch.tensor([0.0, 1.0, 2.0, 0.5]), torch.tensor([0.0, 0.5, 0.5, 1.5]), torch.ones(4)
    drawn = normal(0, 9), normal(1, 9), normal(2, 9)
    for (values, old, returns), clip in ((shown, 0.2), (shown, 1.0), (drawn, 0.5)):
        mask = torch.ones(len(values), dtype=torch.bool)
        loss, _ = core.value_loss(values, old, returns, mask, clip_range=clip)
        same(answer(values, old, returns, clip), loss, f"L_V of {len(values)} tokens at value_clip_eps {clip:g}")
