"""Masked sums, means and variances; whitening and rescaling."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.core import first_in_mask, masked_mean, masked_sum, masked_var, rescale, whiten
from heedful.core.masking import at_least_float32
from tensors import close, f64

X = f64([[1.0, 2.0, 7.0], [4.0, -3.0, 5.0]])
MASK = torch.tensor([[True, True, False], [False, True, True]])
MEAN = (1 + 2 - 3 + 5) / 4
VAR = ((1 - MEAN) ** 2 + (2 - MEAN) ** 2 + (-3 - MEAN) ** 2 + (5 - MEAN) ** 2) / 4


def test_golden_first_in_mask():
    inside = torch.tensor([[True, True, False], [False, True, True], [False, False, False], [True, False, True]])
    first = [[True, False, False], [False, True, False], [False, False, False], [True, False, False]]
    assert first_in_mask(inside).tolist() == first


def test_golden_masked_sum():
    close(masked_sum(X, MASK), 1 + 2 - 3 + 5)


def test_golden_masked_sum_of_nothing_is_zero():
    assert masked_sum(X, torch.zeros_like(MASK)) == 0


def test_golden_masked_mean():
    close(masked_mean(X, MASK), (1 + 2 - 3 + 5) / 4)


@pytest.mark.parametrize("count", [10, 10.0, torch.tensor(10)])
def test_golden_masked_mean_divides_by_the_count_handed_in(count):
    close(masked_mean(X, MASK, count=count), (1 + 2 - 3 + 5) / 10)


def test_golden_masked_mean_of_an_empty_mask():
    """No tokens: NaN by default, because 0 would look like a result; a count of the whole step makes it 0."""
    empty = torch.zeros_like(MASK)
    assert masked_mean(X, empty).isnan()
    assert masked_mean(X, empty, count=4) == 0


def test_golden_masked_var_is_the_population_variance():
    close(masked_var(X, MASK), VAR)


def test_golden_masked_var_of_one_entry_is_zero():
    """The Bessel-corrected variance would be 0/0 here."""
    assert masked_var(X, X == 7.0) == 0


def test_golden_whiten():
    s = math.sqrt(VAR)
    close(whiten(X, MASK), [[(1 - MEAN) / s, (2 - MEAN) / s, 0], [0, (-3 - MEAN) / s, (5 - MEAN) / s]])


def test_golden_whiten_with_statistics_handed_in():
    expected = [[(1 - 0.5) / 2, (2 - 0.5) / 2, 0], [0, (-3 - 0.5) / 2, (5 - 0.5) / 2]]
    close(whiten(X, MASK, mean=0.5, var=4.0), expected)
    close(whiten(X, MASK, mean=f64(0.5), var=f64(4.0)), expected)


def test_golden_whiten_with_only_the_mean_handed_in():
    s = math.sqrt(VAR)
    close(whiten(X, MASK, mean=0.5)[0], [(1 - 0.5) / s, (2 - 0.5) / s, 0])


def test_golden_whiten_of_equal_values_is_zero():
    x = f64([0.3, 0.3, 0.3])
    close(whiten(x, torch.tensor([True, True, True])), [0, 0, 0])


def test_golden_whiten_divides_by_the_floor_where_the_spread_is_tiny():
    """Values 1e-6 apart are noise: they come out at 1e-2, not at 1."""
    x = f64([1e-6, -1e-6])
    close(whiten(x, torch.tensor([True, True])), [1e-6 / 1e-4, -1e-6 / 1e-4])


def test_golden_rescale():
    s = math.sqrt(VAR)
    expected = [[(1 - MEAN) / s + MEAN, (2 - MEAN) / s + MEAN, 0], [0, (-3 - MEAN) / s + MEAN, (5 - MEAN) / s + MEAN]]
    close(rescale(X, MASK), expected)


def test_golden_rescale_with_statistics_handed_in():
    close(rescale(X, MASK, mean=0.5, var=4.0)[1], [0, (-3 - 0.5) / 2 + 0.5, (5 - 0.5) / 2 + 0.5])


def test_golden_rescale_of_equal_values_keeps_them():
    close(rescale(f64([0.3, 0.3]), torch.tensor([True, True])), [0.3, 0.3])


def test_golden_half_precision_is_computed_in_float32():
    """256 + 1 is 256 in bfloat16."""
    x = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)
    both = torch.tensor([True, True])
    assert masked_sum(x, both).dtype == torch.float32
    assert masked_sum(x, both) == 257
    assert masked_mean(x, both) == 128.5
    assert whiten(x, both).dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_golden_result_dtypes(dtype, result):
    x = X.to(dtype)
    outputs = [at_least_float32(x), masked_sum(x, MASK), masked_mean(x, MASK), masked_var(x, MASK)]
    outputs += [whiten(x, MASK), rescale(x, MASK), whiten(x, MASK, mean=0.5, var=4.0)]
    assert {output.dtype for output in outputs} == {result}


FUNCTIONS = [masked_sum, masked_mean, masked_var, whiten, rescale]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradcheck_masked_functions(function):
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, MASK), (x,))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_invariance_value_under_poison_outside_the_mask(function):
    for poison in (math.nan, math.inf, 1e300):
        close(function(X.masked_fill(~MASK, poison), MASK), function(X, MASK))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_invariance_gradient_under_poison_outside_the_mask(function):
    """A NaN that the forward pass hides must not come back in the backward pass."""
    gradients = []
    for x in (X.clone(), X.masked_fill(~MASK, math.nan)):
        x.requires_grad_()
        (function(x, MASK) * torch.arange(1.0, 4.0, dtype=torch.float64)).sum().backward()
        gradients.append(x.grad)
    close(gradients[1], gradients[0])


@st.composite
def values_and_masks(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    size = math.prod(shape)
    values = draw(st.lists(st.floats(-20, 20), min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    mask[draw(st.integers(0, size - 1))] = True
    return f64(values).view(shape), torch.tensor(mask).view(shape)


@given(values_and_masks())
def test_property_masking_equals_a_loop(drawn):
    x, mask = drawn
    inside = [v for v, m in zip(x.flatten().tolist(), mask.flatten().tolist(), strict=True) if m]
    mean = sum(inside) / len(inside)
    var = sum((v - mean) ** 2 for v in inside) / len(inside)
    std = max(math.sqrt(var), 1e-4)
    torch.testing.assert_close(masked_sum(x, mask), f64(sum(inside)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(masked_mean(x, mask), f64(mean), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(masked_var(x, mask), f64(var), rtol=1e-9, atol=1e-9)
    white = [(v - mean) / std if m else 0.0 for v, m in zip(x.flatten().tolist(), mask.flatten().tolist(), strict=True)]
    torch.testing.assert_close(whiten(x, mask), f64(white).view(x.shape), rtol=1e-7, atol=1e-7)
    scaled = torch.where(mask, f64(white).view(x.shape) + mean, 0.0)
    torch.testing.assert_close(rescale(x, mask), scaled, rtol=1e-7, atol=1e-7)
