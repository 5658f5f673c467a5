"""Stochastic rounding to bfloat16."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful import core

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120)


def noise(shape, seed=0):
    return torch.randint(2**16, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def test_golden_a_quarter_of_the_way():
    """From 1 to its neighbour 1 + 2^-7 are 2^16 steps of float32: a quarter of the way, a quarter of the noise carries."""
    x = torch.full((4,), 1 + 2**-9)
    edges = torch.tensor([0, 3 * 2**14 - 1, 3 * 2**14, 2**16 - 1], dtype=torch.int32)
    assert core.stochastic_round(x, edges).tolist() == [1, 1, 1 + 2**-7, 1 + 2**-7]
    assert core.stochastic_round(-x, edges).tolist() == [-1, -1, -1 - 2**-7, -1 - 2**-7]


@given(FLOAT32)
def test_property_only_neighbours_come_out(number):
    x = torch.full((64,), number)
    rounded = core.stochastic_round(x, noise(x.shape)).float()
    nearest = torch.tensor(number).to(torch.bfloat16)
    around = [torch.nextafter(nearest, torch.tensor(end).bfloat16()).item() for end in (-math.inf, math.inf)]
    assert {*rounded.tolist()} <= {nearest.item(), *around}
    assert ((rounded - x).abs() < abs(around[1] - around[0])).all()


@given(FLOAT32)
def test_property_what_bfloat16_holds_stays(number):
    x = torch.tensor(number).to(torch.bfloat16)
    assert torch.equal(core.stochastic_round(x.float().expand(64), noise((64,))), x.expand(64))


@pytest.mark.parametrize("number", [-0.3, 12345.678])
def test_property_the_mean_is_the_number(number):
    """Of a million roundings, within four standard errors: sqrt(p (1 - p) / n) distances between neighbours."""
    x = torch.full((10**6,), number)
    rounded = core.stochastic_round(x, noise(x.shape)).double()
    low, high = rounded.min().item(), rounded.max().item()
    share = (x[0].double().item() - low) / (high - low)
    assert 0 < share < 1
    limit = 4 * math.sqrt(share * (1 - share) / len(x)) * (high - low)
    assert abs(rounded.mean().item() - x[0].item()) < limit


def test_what_is_no_number_stays_what_it_is():
    last_nan = torch.tensor([2**31 - 1], dtype=torch.int32).view(torch.float32)  # whose bits have no room for a carry
    x = torch.cat([torch.tensor([math.inf, -math.inf, math.nan]), last_nan])
    rounded = core.stochastic_round(x, torch.full((4,), 2**16 - 1, dtype=torch.int32))
    assert rounded[:2].tolist() == [math.inf, -math.inf]
    assert rounded[2:].isnan().all()
