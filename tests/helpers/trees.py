"""Trees of tensors and plain values, such as the states of learners."""

import math

import torch


def differing(a, b, path=""):
    """Where two trees are not equal, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{path}.{key}" for key in a.keys() ^ b.keys()]
        return missing + [x for key in a.keys() & b.keys() for x in differing(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return [x for i, (p, q) in enumerate(zip(a, b, strict=True)) for x in differing(p, q, f"{path}.{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    is_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return [] if is_nan or (type(a) is type(b) and a == b) else [path]
