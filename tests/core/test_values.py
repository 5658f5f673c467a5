"""How much a critic knows: explained variance, the value of the prompt, and calibration."""

import math

import numpy
import pytest
import torch

from heedful.core import calibration, explained_variance, first_values, gae, masked_mean, rewards_to_go
from tensors import close, f64, mask

RETURNS = f64([[1.0, 2.0, 3.0]])

# ------------------------------------------------------------------------------------------------- explained variance


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], 1),  # right
        ([8.0, 9.0, 10.0], 1),  # a constant error does not count
        ([1.0, 1.0, 3.0], 2 / 3),  # errors 0, 1, 0 of variance 2/9, a third of 2/3
        ([5.0, 5.0, 5.0], 0),  # a constant
        ([3.0, 2.0, 1.0], -3),  # errors -2, 0, 2 of variance 8/3
    ],
    ids=["right", "off", "near", "constant", "reversed"],
)
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
def test_golden_explained_variance(values, expected, scale):
    """The returns 1, 2, 3 have the variance 2/3. The unit does not matter."""
    close(explained_variance(scale * f64([values]), scale * RETURNS, mask("xxx")), expected)


def test_golden_explained_variance_without_a_variance():
    """Equal returns, one action, none: there is no share of nothing."""
    values = f64([[0.0, 1.0, 5.0]])
    for returns, inside in ((f64([[2.0, 2.0, 2.0]]), "xxx"), (RETURNS, ".x."), (RETURNS, "...")):
        assert math.isnan(explained_variance(values, returns, mask(inside)))


@pytest.mark.parametrize(("spread", "varies"), [(5e-7, False), (2e-6, True)])
def test_golden_returns_that_differ_by_rounding_do_not_vary(spread, varies):
    """Half of them are that share above 0.1 and half below, so it is their deviation: the bound is a millionth."""
    returns = 0.1 * (1 + spread * f64([[1.0, -1.0] * 8]))
    found = explained_variance(torch.zeros_like(returns), returns, mask("x" * 16))
    assert (not math.isnan(found)) is varies


def test_golden_explained_variance_is_computed_in_float32():
    """Errors of 1/4 beside returns of 256: in bfloat16 they would be 0, and the share 1."""
    values, returns = torch.tensor([[0.25, -0.25, 0.0]]).bfloat16(), torch.tensor([[256.0, 256.0, 258.0]]).bfloat16()
    found = explained_variance(values, returns, mask("xxx"))
    assert found.dtype == torch.float32
    errors = f64([255.75, 256.25, 258.0])
    close(found, 1 - errors.var(correction=0) / f64([256.0, 256.0, 258.0]).var(correction=0), rtol=1e-6)  # float32


def test_identity_explained_variance_is_that_of_numpy():
    """On masks with holes, whatever lies in them."""
    for _ in range(20):
        values, returns = torch.randn(2, 4, 9, dtype=torch.float64)
        inside = torch.rand(4, 9) < 0.6
        r, v = returns[inside].numpy(), values[inside].numpy()
        expected = 1 - numpy.var(r - v) / numpy.var(r)
        close(explained_variance(values, returns, inside), expected)
        dirty = values.masked_fill(~inside, math.nan), returns.masked_fill(~inside, math.inf)
        close(explained_variance(*dirty, inside), expected)


def test_lambda_returns_flatter_a_critic_that_knows_nothing():
    """Values of 1 or -1 throughout a response, and scores of 1 or -1 at its end: all four pairs, so values say nothing of
    scores. Of the rewards to come errors are 0, 2, -2 and 0 at every token: twice the variance of the returns. The returns at
    lambda 0 are the value of the next token, except for the last one, so of ten tokens nine have an error of 0."""
    said, scored = f64([1.0, 1.0, -1.0, -1.0]), f64([1.0, -1.0, 1.0, -1.0])
    values, inside = said.unsqueeze(1).expand(4, 10), torch.ones(4, 10, dtype=torch.bool)
    rewards = torch.zeros(4, 10, dtype=torch.float64)
    rewards[:, -1] = scored
    close(explained_variance(values, rewards_to_go(rewards, inside), inside), 1 - 2)
    close(explained_variance(values, gae(rewards, values, inside, gae_lambda=0.0)[1], inside), 1 - 2 / 10)


# -------------------------------------------------------------------------------------------------------- first values


def test_golden_first_values():
    """Behind left padding, over holes, and nothing of a row without an action."""
    values = f64([[9.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, math.nan], [7.0, 7.0, 7.0, 7.0]])
    close(first_values(values, mask(".x.x", "xxx.", "....")), [[0, 1, 0, 1], [4, 4, 4, 0], [0, 0, 0, 0]])
    assert first_values(values.bfloat16(), mask(".x.x", "xxx.", "....")).dtype == torch.float32


def test_a_critic_that_reads_the_answer_explains_more_than_its_first_value():
    """Scores 1 and 0 after the same prompt: the value of the prompt is 0.5 for both and explains nothing."""
    returns, values, inside = f64([[1.0] * 3, [0.0] * 3]), f64([[0.5, 0.6, 0.8], [0.5, 0.2, 0.0]]), mask("xxx", "xxx")
    close(explained_variance(first_values(values, inside), returns, inside), 0)
    errors = f64([0.5, 0.4, 0.2, -0.5, -0.2, 0.0])
    close(explained_variance(values, returns, inside), 1 - errors.var(correction=0) / 0.25)


# --------------------------------------------------------------------------------------------------------- calibration


def test_golden_calibration():
    """By value: 0, 0.2, 0.5 | 0.5, 0.6, 0.8 with returns 0, 0, 1 | 0, 1, 1. The two of 0.5 keep their order."""
    values, returns = f64([[0.5, 0.6, 0.8, 9.0], [math.nan, 0.5, 0.2, 0.0]]), f64([[1.0] * 4, [0.0] * 4])
    found = calibration(values, returns, mask("xxx.", ".xxx"), bins=2)
    close(found.value, [0.7 / 3, 1.9 / 3])
    close(found.returned, [1 / 3, 2 / 3])
    close(found.std, [math.sqrt(2) / 3] * 2)
    close(found.actions, [3, 3])


def test_golden_calibration_of_a_critic_that_says_the_same_everywhere():
    """A head that starts at 0: bins are in the order of the actions."""
    found = calibration(torch.zeros(2, 2), torch.tensor([[1.0, 3.0], [5.0, 7.0]]), mask("xx", "xx"), bins=2)
    close(found.value, [0, 0])
    close(found.returned, [2, 6])
    close(found.std, [1, 1])


def test_golden_calibration_with_fewer_actions_than_bins():
    """One action in each; its deviation is 0."""
    found = calibration(f64([2.0, 1.0]), f64([5.0, 6.0]), torch.tensor([True, True]))
    for given, expected in zip(found, ([1, 2], [6, 5], [0, 0], [1, 1]), strict=True):
        close(given, expected)


def test_identity_bins_are_of_equal_size_and_add_up_to_all_actions():
    """23 actions in ten bins by default, the first three of which have one more."""
    values, returns, inside = (
        torch.randn(30, dtype=torch.float64),
        torch.randn(30, dtype=torch.float64),
        torch.arange(30) < 23,
    )
    found = calibration(values, returns, inside)
    assert found.actions.tolist() == [3.0] * 3 + [2.0] * 7
    close((found.value * found.actions).sum() / 23, masked_mean(values, inside))
    close((found.returned * found.actions).sum() / 23, masked_mean(returns, inside))
    second = ((found.std.square() + found.returned.square()) * found.actions).sum() / 23
    close(second, masked_mean(returns.square(), inside))
    assert found.value.tolist() == sorted(found.value.tolist())


def test_golden_calibration_is_computed_in_float32():
    """256 + 1 in bfloat16 would be 256."""
    values = torch.tensor([256.0, 1.0]).bfloat16()
    found = calibration(values, values, torch.tensor([True, True]), bins=1)
    assert {x.dtype for x in found} == {torch.float32}
    close(found.value, [128.5])
    close(found.returned, [128.5])


def test_calibration_of_nothing_is_refused():
    values = f64([1.0, 2.0])
    with pytest.raises(ValueError, match=r"^calibration: 0 actions in 10 bins; both must be at least 1$"):
        calibration(values, values, torch.tensor([False, False]))
    with pytest.raises(ValueError, match=r"^calibration: 1 actions in 0 bins"):
        calibration(values, values, torch.tensor([True, False]), bins=0)
