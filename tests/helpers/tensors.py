"""Numbers by hand: tensors in float64, masks as strings, and how near a result must be."""

import math

import torch


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def logs(*ratios):
    return f64([math.log(ratio) for ratio in ratios])


def close(actual, expected, rtol=1e-9):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=1e-12, equal_nan=True)


def mask(*rows):
    """Rows written as strings: 'x' counts, '.' does not."""
    return torch.tensor([[c == "x" for c in row] for row in rows])


def minus_log_sigmoid(x):
    return math.log(1 + math.exp(-x))
