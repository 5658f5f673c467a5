"""What values explain in bins, by hand."""

import pytest
import torch

from heedful import core
from tensors import f64

EVERY = torch.ones(2, 2, dtype=torch.bool)


def test_bins_by_hand():
    """At the first place 1/2 is said of 0 and of 2: nothing is explained, and the mean error is 1/2. At the second 1/2 of 0,
    and 1.5 of 2: the errors -1/2 and 1/2 have a fourth of the returns' variance of 1."""
    returns, values = f64([[0.0, 0.0], [2.0, 2.0]]), f64([[0.5, 0.5], [0.5, 1.5]])
    found = core.explained_in_bins(values, returns, EVERY, f64([[1.0, 2.0], [1.0, 2.0]]), bins=10)
    assert found.by.tolist() == [1.0, 2.0]
    assert found.explained.tolist() == [0.0, 0.75]
    assert found.bias.tolist() == [0.5, 0.0]
    assert found.actions.tolist() == [2.0, 2.0]


def test_returns_of_a_bin_that_do_not_vary_and_what_is_outside():
    """By the response they are equal, so nothing of them can be explained; a NaN outside the mask is not read."""
    returns, by = f64([[0.0, 0.0, 9.0], [1.0, 1.0, torch.nan]]), f64([[3.0, 3.0, 3.0], [7.0, 7.0, torch.nan]])
    values, mask = f64([[0.5, 0.0, torch.nan], [0.5, 1.0, 0.0]]), torch.tensor([[True, True, False]] * 2)
    found = core.explained_in_bins(values, returns, mask, by)
    assert found.explained.isnan().tolist() == [True, True]
    assert found.bias.tolist() == [-0.25, 0.25]
    assert found.by.tolist() == [3.0, 7.0]


@pytest.mark.parametrize(("bins", "sizes"), [(1, [6]), (2, [3, 3]), (3, [3, 1, 2]), (10, [3, 1, 2])])
def test_equal_numbers_stay_together(bins, sizes):
    """Of 1 1 1 2 3 3 the middles are 1.5, 3.5 and 5 of 6."""
    by = f64([3.0, 1.0, 1.0, 2.0, 3.0, 1.0])
    found = core.explained_in_bins(by, by, by > 0, by, bins=bins)
    assert found.actions.tolist() == sizes


def test_different_numbers_are_in_bins_of_equal_size():
    by = torch.randperm(70, generator=torch.Generator().manual_seed(0)).double()
    found = core.explained_in_bins(by, by, by >= 0, by, bins=7)
    assert found.actions.tolist() == [10.0] * 7
    assert found.by.tolist() == [10 * place + 4.5 for place in range(7)]


def test_no_action_and_no_bin_are_refused():
    x = f64([1.0])
    with pytest.raises(ValueError, match="explained_in_bins: 0 actions in 10 bins; both must be at least 1"):
        core.explained_in_bins(x, x, x > 1, x)
    with pytest.raises(ValueError, match="1 actions in 0 bins"):
        core.explained_in_bins(x, x, x > 0, x, bins=0)
