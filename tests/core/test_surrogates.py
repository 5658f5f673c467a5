"""Surrogates by hand: what each is, what its gradient is, and how numbers per token become one."""

import math

import pytest
import torch

from heedful import core
from heedful.core.surrogates import SURROGATES

LOG2 = math.log(2)


def tensors(new, old, advantages, mask=None):
    """Float64 rows, the first of which takes a gradient."""
    new, old, advantages = (torch.tensor(x, dtype=torch.float64) for x in (new, old, advantages))
    mask = torch.ones_like(new, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return new.requires_grad_(), old, advantages, mask


class TestCispo:
    """Ratios 2, 1/2, 1, 4 with advantages 1, 1, -1, -2, bounds 0.2 and 0.28: weights 1.28, 0.8, 1, 1.28."""

    new = ((-LOG2, -2 * LOG2, -1.0, 0.0),)
    old = ((-2 * LOG2, -LOG2, -1.0, -2 * LOG2),)
    advantages = ((1.0, 1.0, -1.0, -2.0),)
    bounds = core.Bounds(0.2, 0.28)

    def test_golden(self):
        logprobs, old, advantages, mask = tensors(self.new, self.old, self.advantages)
        surrogate = core.cispo(logprobs, old, advantages, mask, self.bounds)
        expected = torch.tensor([[-1.28 * LOG2, -1.6 * LOG2, 1.0, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(surrogate.objective, expected, rtol=0, atol=1e-12)
        assert surrogate.clipped.tolist() == [[True, True, False, True]]
        torch.testing.assert_close(
            surrogate.log_ratio, torch.tensor([[LOG2, -LOG2, 0.0, 2 * LOG2]], dtype=torch.float64)
        )

    def test_every_token_learns_beyond_the_bounds_too(self):
        """d J / d log pi is the weight times the advantage: nothing flows through the ratio, nothing is cut off."""
        logprobs, old, advantages, mask = tensors(self.new, self.old, self.advantages)
        core.cispo(logprobs, old, advantages, mask, self.bounds).objective.sum().backward()
        expected = torch.tensor([[1.28, 0.8, -1.0, -2.56]], dtype=torch.float64)
        torch.testing.assert_close(logprobs.grad, expected, rtol=0, atol=1e-12)
        clipped = logprobs.detach().clone().requires_grad_()
        core.clipped_ratio(clipped, old, advantages, mask, self.bounds).objective.sum().backward()
        assert clipped.grad[0, 0] == 0.0, "the surrogate of PPO stops there"

    def test_at_ratio_1_it_is_the_policy_gradient(self):
        logprobs, _, advantages, mask = tensors(self.new, self.old, self.advantages)
        ours = core.cispo(logprobs, logprobs.detach(), advantages, mask, self.bounds)
        theirs = core.policy_gradient(logprobs, logprobs.detach(), advantages, mask)
        torch.testing.assert_close(ours.objective, theirs.objective, rtol=0, atol=0)
        assert not ours.clipped.any()

    def test_padding_is_nothing_whatever_it_holds(self):
        logprobs, old, advantages, mask = tensors(
            [[-1.0, math.nan]], [[-1.0, math.inf]], [[1.0, math.nan]], [[True, False]]
        )
        surrogate = core.cispo(logprobs, old, advantages, mask, self.bounds)
        surrogate.objective.sum().backward()
        assert surrogate.objective.tolist() == [[-1.0, 0.0]]
        assert logprobs.grad.tolist() == [[1.0, 0.0]]
        assert surrogate.clipped.tolist() == [[False, False]]


@pytest.mark.parametrize("key", [key for key in SURROGATES if key[0] != "clip"], ids="-".join)
def test_gradcheck(key):
    """With the old log-probs held fixed and no ratio at a bound (there the derivative jumps)."""
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    old = logprobs.clone() if key[0] == "cispo" else logprobs - 0.1
    advantages = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, True, False, False], [True, False, False, False]])
    weight = torch.where(mask, (logprobs - old).exp() * advantages, 0.0)

    def objective(x):
        return SURROGATES[key](x, old, advantages, mask, core.Bounds(10.0, 10.0)).objective.sum()

    x = logprobs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(x), x)
    if key[0] == "cispo":  # a semi-gradient: finite differences would also move the weight
        torch.testing.assert_close(gradient, weight, rtol=0, atol=1e-12)
    else:
        assert torch.autograd.gradcheck(objective, (x,))
