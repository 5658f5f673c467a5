"""Importance weights by hand, and the bias that filtered sampling leaves, where every response can be listed."""

import itertools
import math

import pytest
import torch

from heedful import core
from heedful.engines.draw import filter_logits

LOG2, LOG3 = math.log(2), math.log(3)
MASK = torch.tensor([[True, True, True], [True, True, False]])
SAMPLER = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, math.nan]], dtype=torch.float64)
RATIOS = torch.tensor([[2.0, 0.5, 3.0], [1 / 3, 2.0, 1.0]], dtype=torch.float64)
"""Of the responses: 3 and 2/3."""
POLICY = torch.where(MASK, SAMPLER + RATIOS.log(), math.inf)


def weights(level, bound, **options):
    return core.importance_weights(POLICY, SAMPLER, MASK, level=level, bound=bound, **options)


@pytest.mark.parametrize(
    ("level", "bound", "low", "expected", "bounded"),
    [
        ("token", "truncate", 0.0, [[2.0, 0.5, 2.5], [1 / 3, 2.0, 0.0]], [[0, 0, 1], [0, 0, 0]]),
        ("token", "mask", 0.4, [[2.0, 0.5, 0.0], [0.0, 2.0, 0.0]], [[0, 0, 1], [1, 0, 0]]),
        ("sequence", "truncate", 0.0, [[2.5, 2.5, 2.5], [2 / 3, 2 / 3, 0.0]], [[1, 1, 1], [0, 0, 0]]),
        ("sequence", "mask", 0.7, [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [[1, 1, 1], [1, 1, 0]]),
        ("sequence", "mask", 0.4, [[0.0, 0.0, 0.0], [2 / 3, 2 / 3, 0.0]], [[1, 1, 1], [0, 0, 0]]),
    ],
)
def test_golden_importance_weights(level, bound, low, expected, bounded):
    found = weights(level, bound, low=low, high=2.5)
    torch.testing.assert_close(found.weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert found.bounded.tolist() == torch.tensor(bounded).bool().tolist()


def test_golden_the_log_ratio_is_that_before_the_bounds():
    token, sequence = weights("token", "mask", low=0.4, high=2.5), weights("sequence", "truncate", high=2.5)
    expected = torch.tensor([[LOG2, -LOG2, LOG3], [-LOG3, LOG2, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(token.log_ratio, expected)
    whole = torch.tensor([[LOG3] * 3, [LOG2 - LOG3, LOG2 - LOG3, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(sequence.log_ratio, whole)


def test_golden_bounds_themselves_count():
    """A ratio of exactly low or high is neither cut nor left out."""
    policy = torch.tensor([[0.0, LOG2, -LOG2], [0.0, 0.0, 0.0]], dtype=torch.float64)
    sampler = torch.zeros_like(policy)
    found = core.importance_weights(policy, sampler, MASK, level="token", bound="mask", low=0.5, high=2.0)
    assert found.weights[0].tolist() == [1.0, 2.0, 0.5]
    assert not found.bounded.any()


def test_golden_normalised_weights():
    """Tokens: mean (2 + 1/2 + 5/2 + 1/3 + 2) / 5 = 22/15. Responses: mean (5/2 + 2/3) / 2 = 19/12, each counted once."""
    token = weights("token", "truncate", high=2.5, normalise=True).weights
    torch.testing.assert_close(token[0, 1], torch.tensor(0.5 * 15 / 22, dtype=torch.float64))
    sequence = weights("sequence", "truncate", high=2.5, normalise=True).weights
    torch.testing.assert_close(sequence[:, 0], torch.tensor([2.5, 2 / 3], dtype=torch.float64) * 12 / 19)
    assert core.masked_mean(token, MASK).item() == pytest.approx(1.0)


def test_weights_that_are_all_0_stay_0():
    found = weights("sequence", "mask", low=0.7, high=2.5, normalise=True)
    assert not found.weights.any()


def test_identity_the_sampler_is_the_policy():
    """All weights are exactly 1, whatever the bounds."""
    logprobs = -torch.rand(4, 7)
    mask = torch.ones(4, 7, dtype=torch.bool)
    for level, bound in itertools.product(("token", "sequence"), ("truncate", "mask")):
        found = core.importance_weights(logprobs, logprobs, mask, level=level, bound=bound, high=1.5)
        assert torch.equal(found.weights, torch.ones(4, 7))


def test_a_ratio_that_overflows_is_bounded_all_the_same():
    """The product over 400 tokens is e^800: cut down, or left out, and never infinite."""
    ones, mask = torch.ones(1, 400), torch.ones(1, 400, dtype=torch.bool)
    cut = core.importance_weights(2 * ones, 0 * ones, mask, level="sequence", bound="truncate", high=3.0)
    assert cut.weights.unique().tolist() == [3.0]
    assert cut.log_ratio.max() == 800
    left = core.importance_weights(2 * ones, 0 * ones, mask, level="sequence", bound="mask", high=3.0)
    assert not left.weights.any()


def test_weights_are_constants():
    policy = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    found = core.importance_weights(policy, torch.zeros_like(policy), MASK, level="token", bound="truncate")
    assert not found.weights.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence", "sequence-mean"])
@pytest.mark.parametrize("loss", [core.ppo_policy_loss, core.cispo_policy_loss, core.a2c_policy_loss])
def test_identity_a_policy_loss_is_linear_in_positive_weights_of_its_advantages(loss, level):
    """So weights on the advantages weigh loss and gradient, for every loss; also where a bound is active."""
    if (loss, level) in {(core.cispo_policy_loss, "sequence"), (core.cispo_policy_loss, "sequence-mean")} or (
        (loss, level) == (core.a2c_policy_loss, "sequence-mean")
    ):
        return
    generator = torch.Generator().manual_seed(1)
    new, old, advantages = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.8
    is_whole = level != "token"
    w = torch.rand(4, 1 if is_whole else 5, generator=generator, dtype=torch.float64).expand(4, 5)
    new.requires_grad_()
    options = {
        core.ppo_policy_loss: {"clip_range": 0.2, "clip_range_high": 0.3, "dual_clip": 1.5, "importance_level": level},
        core.cispo_policy_loss: {"clip_range": 0.2, "clip_range_high": 0.3},
        core.a2c_policy_loss: {"importance_level": level},
    }[loss]
    constants = () if loss is core.a2c_policy_loss else (old,)
    slopes = []
    for scaled in (advantages, w * advantages):
        slopes.append(torch.autograd.grad(loss(new, *constants, scaled, mask, **options)[0], new)[0])
    torch.testing.assert_close(slopes[1], slopes[0] * w)


@pytest.mark.parametrize("bounds", [(-0.1, 2.0), (2.0, 2.0), (3.0, 2.0), (0.0, 0.0)])
def test_bounds_that_leave_nothing_are_refused(bounds):
    low, high = bounds
    with pytest.raises(ValueError, match="low must be at least 0 and below high, got"):
        weights("token", "mask", low=low, high=high)


def test_golden_effective_sample_size():
    """Weights 1, 1, 2: 4^2 / (3 * 6) = 8/9. Equal ones: 1. One of four has everything: 1/4. None has anything: 0."""
    mask = torch.tensor([True, True, True, False])
    assert core.effective_sample_size(torch.tensor([1.0, 1.0, 2.0, 9.0]), mask).item() == pytest.approx(8 / 9)
    assert core.effective_sample_size(torch.full((5,), 0.1), torch.ones(5, dtype=torch.bool)).item() == pytest.approx(1)
    alone = torch.tensor([0.0, 0.0, 3.0, 0.0])
    assert core.effective_sample_size(alone, torch.ones(4, dtype=torch.bool)).item() == pytest.approx(1 / 4)
    assert core.effective_sample_size(torch.zeros(4), mask).item() == 0
    huge = torch.tensor([1e30, 1e30, 2e30, 0.0])
    assert core.effective_sample_size(huge, mask).item() == pytest.approx(8 / 9), "no square overflows"


# Responses of two tokens from three words, so that all nine of them can be listed ------------------------------------

FIRST = (0.5, 0.42, 0.08)
SECOND = ((0.62, 0.32, 0.06), (0.25, 0.25, 0.5), (0.3, 0.3, 0.4))
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 0.75, 0.5, 0.0], dtype=torch.float64)
"""Of the responses (0, 0), (0, 1), ..., (2, 2)."""
RESPONSES = torch.tensor(list(itertools.product(range(3), range(3))))
WHOLE = torch.ones(9, 2, dtype=torch.bool)


def world():
    """Logits of the first token and of the second after each first, and log-probs of all responses, token by token."""
    logits = torch.tensor([FIRST, *SECOND], dtype=torch.float64).log().requires_grad_()
    states = torch.stack([torch.zeros(9, dtype=torch.long), 1 + RESPONSES[:, 0]], dim=1)
    return logits, states


def logprobs_of(logits, states):
    return core.token_logprobs(logits[states], RESPONSES)


def expected_gradient(top_p, correction):
    """The exact mean, over what the sampler draws, of the weighted policy gradient; scores minus the sampler's mean."""
    logits, states = world()
    new = logprobs_of(logits, states)
    filtered = filter_logits(logits.detach(), top_k=0, top_p=top_p)
    drawn = logprobs_of(filtered, states)
    probability = drawn.sum(dim=1).exp()
    rows = probability > 0
    advantages = (REWARDS - (probability * REWARDS).sum()).unsqueeze(1).expand(9, 2)
    if correction is not None:
        found = core.importance_weights(new[rows].detach(), drawn[rows], WHOLE[rows], **correction)
        weighed = torch.zeros_like(advantages)
        weighed[rows] = advantages[rows] * found.weights
        advantages = weighed
    objective = core.policy_gradient(new, advantages, WHOLE).objective.sum(dim=1)
    (gradient,) = torch.autograd.grad((probability[rows] * objective[rows]).sum(), logits)
    return gradient


def expected_reward_gradient():
    """The gradient of the mean reward by differentiating it, no estimator at all."""
    logits, states = world()
    return torch.autograd.grad((logprobs_of(logits, states).sum(dim=1).exp() * REWARDS).sum(), logits)[0]


def test_identity_without_a_filter_the_estimator_is_the_gradient_of_the_mean_reward():
    torch.testing.assert_close(expected_gradient(1.0, None), expected_reward_gradient(), rtol=0, atol=1e-12)


def test_golden_the_kept_masses():
    """top-p 0.9 keeps 0.92 at the first token, 0.94 after word 0 and everything after word 1; word 2 is never first."""
    logits, states = world()
    filtered = filter_logits(logits.detach(), top_k=0, top_p=0.9)
    kept = (filtered.logsumexp(dim=-1) - logits.detach().logsumexp(dim=-1)).exp()
    torch.testing.assert_close(kept, torch.tensor([0.92, 0.94, 1.0, 1.0], dtype=torch.float64))
    ratio = (logprobs_of(logits.detach(), states) - logprobs_of(filtered, states)).exp()
    torch.testing.assert_close(ratio[0], torch.tensor([0.92, 0.94], dtype=torch.float64))


@pytest.mark.parametrize(
    ("correction", "bias", "size"),
    [
        (None, 0.1723, 1.1219),
        ({"level": "token", "bound": "truncate"}, 0.1302, 1.0612),
        ({"level": "sequence", "bound": "truncate"}, 0.1066, 0.9876),
        ({"level": "token", "bound": "mask", "low": 0.93}, 0.4793, 0.8425),
    ],
    ids=["none", "token", "sequence", "masked"],
)
def test_golden_the_bias_of_top_p(correction, bias, size):
    """Under top-p 0.9: |E[estimate] - gradient| / |gradient|, and the part of the estimate along the gradient."""
    full, found = expected_reward_gradient(), expected_gradient(0.9, correction)
    assert float((found - full).norm() / full.norm()) == pytest.approx(bias, abs=5e-5)
    assert float((found * full).sum() / full.square().sum()) == pytest.approx(size, abs=5e-5)


def test_identity_weights_of_whole_responses_leave_only_what_is_never_drawn():
    """E_q[w f] is the sum of pi f over the responses that are drawn: the bias is that of the others, exactly."""
    logits, states = world()
    new = logprobs_of(logits, states)
    drawn = logprobs_of(filter_logits(logits.detach(), top_k=0, top_p=0.9), states).sum(dim=1).exp()
    centred = REWARDS - (drawn * REWARDS).sum()
    never = drawn == 0
    assert RESPONSES[never].tolist() == [[0, 2], [2, 0], [2, 1], [2, 2]]
    missing = torch.autograd.grad((new.sum(dim=1).exp() * centred)[never].sum(), logits)[0]
    found = expected_gradient(0.9, {"level": "sequence", "bound": "truncate"})
    torch.testing.assert_close(expected_reward_gradient() - found, missing, rtol=0, atol=1e-12)
