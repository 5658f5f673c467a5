"""Surrogates by hand: what each is, what its gradient is, and how numbers per token become one."""

import math

import pytest
import torch

from heedful import core

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

    def test_golden_cispo(self):
        logprobs, old, advantages, mask = tensors(self.new, self.old, self.advantages)
        surrogate = core.cispo(logprobs, old, advantages, mask, self.bounds)
        expected = torch.tensor([[-1.28 * LOG2, -1.6 * LOG2, 1.0, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(surrogate.objective, expected, rtol=0, atol=1e-12)
        assert surrogate.clipped.tolist() == [[True, True, False, True]]
        torch.testing.assert_close(
            surrogate.log_ratio, torch.tensor([[LOG2, -LOG2, 0.0, 2 * LOG2]], dtype=torch.float64)
        )
        assert not surrogate.log_ratio.requires_grad

    def test_every_token_learns_beyond_the_bounds_too(self):
        """d J / d log pi is the weight times the advantage: nothing flows through the ratio, nothing is cut off."""
        logprobs, old, advantages, mask = tensors(self.new, self.old, self.advantages)
        core.cispo(logprobs, old, advantages, mask, self.bounds).objective.sum().backward()
        expected = torch.tensor([[1.28, 0.8, -1.0, -2.56]], dtype=torch.float64)
        torch.testing.assert_close(logprobs.grad, expected, rtol=0, atol=1e-12)
        clipped = logprobs.detach().clone().requires_grad_()
        core.clipped_ratio(clipped, old, advantages, mask, self.bounds).objective.sum().backward()
        assert clipped.grad[0, 0] == 0.0, "the surrogate of PPO stops there"

    def test_cispo_gives_its_constants_no_gradient(self):
        logprobs, old, advantages, mask = tensors(self.new, self.old, self.advantages)
        core.cispo(
            logprobs, old.requires_grad_(), advantages.requires_grad_(), mask, self.bounds
        ).objective.sum().backward()
        assert logprobs.grad is not None
        assert old.grad is None
        assert advantages.grad is None

    def test_padding_is_nothing_whatever_it_holds(self):
        logprobs, old, advantages, mask = tensors(
            [[-1.0, math.nan]], [[-1.0, math.inf]], [[1.0, math.nan]], [[True, False]]
        )
        surrogate = core.cispo(logprobs, old, advantages, mask, self.bounds)
        surrogate.objective.sum().backward()
        assert surrogate.objective.tolist() == [[-1.0, 0.0]]
        assert logprobs.grad.tolist() == [[1.0, 0.0]]
        assert surrogate.clipped.tolist() == [[False, False]]


class TestDoubleSided:
    """Ratios 2, 1/2, 3/4 and 4 with advantages 1, 1, -1, -2; inside 0.6 < r < 3 are the first and the third."""

    new = ((-LOG2, -3.0, -1.0, 0.0),)
    old = ((-2 * LOG2, -3.0 + LOG2, -1.0 - math.log(0.75), -2 * LOG2),)
    advantages = ((1.0, 1.0, -1.0, -2.0),)
    bounds = core.Bounds(0.4, 2.0)

    def test_golden_double_sided(self):
        logprobs, sampler, advantages, mask = tensors(self.new, self.old, self.advantages)
        surrogate = core.double_sided(logprobs, sampler, advantages, mask, self.bounds)
        expected = torch.tensor([[2 * -LOG2, 0.0, 0.75, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(surrogate.objective, expected, rtol=0, atol=1e-12)
        assert surrogate.clipped.tolist() == [[False, True, False, True]]
        expected = torch.tensor([[LOG2, -LOG2, math.log(0.75), 2 * LOG2]], dtype=torch.float64)
        torch.testing.assert_close(surrogate.log_ratio, expected)
        assert not surrogate.log_ratio.requires_grad

    def test_a_token_learns_by_its_ratio_inside_and_not_at_all_outside(self):
        """d J / d log pi is ratio times advantage, or exactly 0. Nothing flows through the ratio, nor into a constant."""
        logprobs, sampler, advantages, mask = tensors(self.new, self.old, self.advantages)
        sampler.requires_grad_()
        advantages.requires_grad_()
        core.double_sided(logprobs, sampler, advantages, mask, self.bounds).objective.sum().backward()
        torch.testing.assert_close(logprobs.grad, torch.tensor([[2.0, 0.0, -0.75, 0.0]], dtype=torch.float64))
        assert sampler.grad is None
        assert advantages.grad is None

    def test_the_bounds_are_strict(self):
        """A ratio of exactly 1 at bounds of 1 counts 0. Padding, whose ratio is 1 too, is not outside."""
        logprobs, sampler, advantages, mask = tensors([[-2.0, 7.0]], [[-2.0, 9.0]], [[3.0, 5.0]], [[True, False]])
        for bounds, is_outside in ((core.Bounds(0.0, 1.0), True), (core.Bounds(0.5, 0.0), True), (self.bounds, False)):
            surrogate = core.double_sided(logprobs, sampler, advantages, mask, bounds)
            assert surrogate.objective.tolist() == [[0.0 if is_outside else -6.0, 0.0]]
            assert surrogate.clipped.tolist() == [[is_outside, False]]

    def test_a_ratio_that_overflows_is_outside(self):
        """Infinity times 0 would be NaN."""
        logprobs, sampler, advantages, mask = tensors([[1000.0, -1.0]], [[0.0, -1.0]], [[0.0, 1.0]])
        surrogate = core.double_sided(logprobs, sampler, advantages, mask, self.bounds)
        surrogate.objective.sum().backward()
        assert surrogate.objective.tolist() == [[0.0, -1.0]]
        assert logprobs.grad.tolist() == [[0.0, 1.0]]

    def test_padding_is_nothing_whatever_it_holds(self):
        logprobs, sampler, advantages, mask = tensors(
            [[-1.0, math.nan]], [[-1.0, math.inf]], [[1.0, math.nan]], [[True, False]]
        )
        surrogate = core.double_sided(logprobs, sampler, advantages, mask, self.bounds)
        surrogate.objective.sum().backward()
        assert surrogate.objective.tolist() == [[-1.0, 0.0]]
        assert logprobs.grad.tolist() == [[1.0, 0.0]]
        assert surrogate.clipped.tolist() == [[False, False]]


RATIOS, SIGNS = (0.5, 0.5, 1.1, 1.1, 1.5, 1.5), (1.0, -1.0, 1.0, -1.0, 1.0, -1.0)
BOUNDS = core.Bounds(0.2, 0.2)


def slopes(surrogate_of, new, old, advantages):
    new = new.clone().requires_grad_()
    surrogate = surrogate_of(new, old, advantages, torch.ones_like(new, dtype=torch.bool), BOUNDS)
    return torch.autograd.grad(surrogate.objective.sum(), new)[0]


@pytest.mark.parametrize(
    ("surrogate_of", "expected"),
    [
        (core.clipped_ratio, [0.5, 0.0, 1.1, -1.1, 0.0, -1.5]),
        (core.cispo, [0.8, -0.8, 1.1, -1.1, 1.2, -1.2]),
        (core.double_sided, [0.0, 0.0, 1.1, -1.1, 0.0, 0.0]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_golden_what_each_surrogate_does_beyond_its_bounds(surrogate_of, expected):
    """PPO's clip corrects what moved the wrong way, CISPO learns with the bound as weight, double_sided not at all."""
    new, signs = torch.tensor([RATIOS], dtype=torch.float64).log(), torch.tensor([SIGNS], dtype=torch.float64)
    found = slopes(surrogate_of, new, torch.zeros_like(new), signs)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


def test_golden_double_sided_beside_the_token_mask_of_importance_weights():
    """At the first optimizer step both weigh a token alike. Then the policy moves, here back to the sampler: ``double_sided``
    weighs with the new ratio, 1, and all tokens learn. The weights of ``token-mask`` stay those before the update, and what
    they left out is never learned from. Their bounds are inclusive."""
    policy = torch.tensor([RATIOS], dtype=torch.float64).log()
    sampler, signs, inside = torch.zeros_like(policy), torch.tensor([SIGNS], dtype=torch.float64), policy < 9
    kept = {"level": "token", "bound": "mask", "low": 0.8, "high": 1.2}
    weights = core.importance_weights(policy, sampler, inside, **kept).weights
    at_first = slopes(core.clipped_ratio, policy, policy, weights * signs)
    torch.testing.assert_close(at_first, slopes(core.double_sided, policy, sampler, signs))
    moved = sampler
    torch.testing.assert_close(slopes(core.double_sided, moved, sampler, signs), signs)
    later = slopes(core.clipped_ratio, moved, policy, weights * signs)
    torch.testing.assert_close(later, torch.tensor([[0.0, 0.0, 1.0, -1.0, 0.0, 0.0]], dtype=torch.float64))
    at_bound = {"level": "token", "bound": "mask", "low": 1.0, "high": 2.0}
    assert core.importance_weights(sampler, sampler, inside, **at_bound).weights.tolist() == [[1.0] * 6]


def test_golden_the_advantage_of_a_response_is_that_of_its_first_token():
    """Padding on the left, then advantages 2 and 5; the ratio is 1.1 * 1, its log-prob -1 - 3."""
    logprobs, old, advantages, mask = tensors(
        [[7.0, -1.0, -3.0]], [[7.0, -1.0 - math.log(1.1), -3.0]], [[9.0, 2.0, 5.0]], [[False, True, True]]
    )
    clipped = core.clipped_sequence_ratio(logprobs, old, advantages, mask, core.Bounds(0.2, 0.2))
    torch.testing.assert_close(clipped.objective, torch.tensor([2.2], dtype=torch.float64))
    gradient = core.sequence_policy_gradient(logprobs, advantages, mask)
    torch.testing.assert_close(gradient.objective, torch.tensor([-8.0], dtype=torch.float64))


def test_golden_sequence_policy_gradient():
    """The log-prob of a response is the sum over its tokens, -3; a row without a token is no action."""
    logprobs, _, advantages, mask = tensors(
        [[-1.0, -2.0, 50.0], [60.0, 70.0, 80.0]],
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        [[2.0, 2.0, 9.0], [9.0, 9.0, 9.0]],
        [[True, True, False], [False, False, False]],
    )
    surrogate = core.sequence_policy_gradient(logprobs, advantages, mask)
    assert surrogate.objective.tolist() == [-6.0, 0.0]
    assert surrogate.mask.tolist() == [True, False]
    assert surrogate.log_ratio is None
    assert surrogate.clipped is None


@pytest.mark.parametrize(
    ("how", "of_the_call", "of_a_step"),
    [("token", 2.5, 1.25), ("sequence", 3.0, 1.5), ("fixed", 1.0, 0.5)],
    ids=["token", "sequence", "fixed"],
)
def test_golden_reduction(how, of_the_call, of_a_step):
    """Responses of 3, 1 and 0 tokens: 10 / 4; (2 + 4) / 2; 10 / (2 * 5). A step of twice the counts halves each."""
    nan = math.nan
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, nan, nan], [nan, nan, nan]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert core.Reduction(how, max_new_tokens=5).tokens(x, mask).item() == pytest.approx(of_the_call)
    step = {"num_tokens": 8, "num_sequences": 4, "max_new_tokens": 5}
    assert core.Reduction(how, **step).tokens(x, mask).item() == pytest.approx(of_a_step)


@pytest.mark.parametrize("surrogate", [core.policy_gradient, core.sequence_policy_gradient, core.cispo])
def test_gradcheck(surrogate):
    """With the old log-probs held fixed and no ratio at a bound (there the derivative jumps)."""
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    advantages = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, True, False, False], [True, False, False, False]])

    def objective(x):
        if surrogate is core.cispo:
            return core.cispo(x, logprobs, advantages, mask, core.Bounds(10.0, 10.0)).objective.sum()
        return surrogate(x, advantages, mask).objective.sum()

    x = logprobs.clone().requires_grad_()
    if surrogate is core.cispo:  # a semi-gradient: finite differences would also move the weight, which is 1 here
        (gradient,) = torch.autograd.grad(objective(x), x)
        torch.testing.assert_close(gradient, torch.where(mask, advantages, 0.0), rtol=0, atol=1e-12)
    else:
        assert torch.autograd.gradcheck(objective, (x,))
