"""Hidden tests of lesson 6, PPO."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same

RATIO = torch.tensor([0.5, 0.7, 1.0, 1.1, 1.5, 1.5, 0.5, 1.0])
ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, 1.0, 2.0, -1.0, -0.5, -1.0])
MASK = torch.ones(8, dtype=torch.bool)


def check_1(answer: Callable[..., Any]) -> None:
    """The clipped objective."""
    old = torch.linspace(-3.0, -1.0, 8).view(2, 4)
    new, advantages = old + RATIO.view(2, 4).log(), ADVANTAGES.view(2, 4)
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    new[1, 2:] = torch.inf
    for clip_eps in (0.2, 0.4):
        loss, _ = core.ppo_policy_loss(new, old, advantages, mask, clip_range=clip_eps)
        came_out = answer(new.clone(), old.clone(), advantages.clone(), mask.clone(), clip_eps)
        only_clamped = float(((new - old).exp().clamp(1 - clip_eps, 1 + clip_eps) * advantages)[mask].mean())
        if isinstance(came_out, torch.Tensor) and came_out.numel() == 1:
            assert not abs(float(came_out) - only_clamped) < 1e-6, (
                "this clips every ratio; the objective is the smaller of the clipped and the unclipped product"
            )
        same(came_out, -loss, f"L_clip of 4 and 2 tokens, with padding, at clip_eps {clip_eps:g}")


def check_2(answer: Callable[..., Any]) -> None:
    """The mask of clipped tokens."""
    surrogate = core.clipped_ratio(RATIO.log(), torch.zeros(8), ADVANTAGES, MASK, core.Bounds(0.2, 0.2))
    came_out = answer(RATIO.clone(), ADVANTAGES.clone(), 0.2)
    for index in (0, 5):  # beyond a bound, on the unclipped side
        wrong = isinstance(came_out, torch.Tensor) and came_out.shape == (8,) and bool(came_out[index])
        assert not wrong, (
            f"a token with ratio {RATIO[index]:g} and advantage {ADVANTAGES[index]:g} still learns, but yours is clipped"
        )
    same(came_out, surrogate.clipped, "clipped tokens among 8, at clip_eps 0.2")


def check_3(answer: Callable[..., Any]) -> None:
    """The clipped value loss."""
    values, old = torch.tensor([0.0, 1.0, 2.0, 0.5]), torch.tensor([0.0, 0.5, 0.5, 1.5])
    returns = torch.tensor([1.0, 1.0, 1.0, 1.0])
    for clip in (0.2, 1.0):
        loss, _ = core.value_loss(values, old, returns, torch.ones(4, dtype=torch.bool), clip_range=clip)
        came_out = answer(values.clone(), old.clone(), returns.clone(), clip)
        same(came_out, loss, f"L_V of 4 tokens at value_clip_eps {clip:g}")
