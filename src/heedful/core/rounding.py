"""Stochastic rounding of float32 to bfloat16, which keeps small changes on average."""

import torch
from jaxtyping import BFloat16, Float32, Int32
from torch import Tensor

from heedful.core.masking import same_shape

__all__ = ["stochastic_round"]


def stochastic_round(x: Float32[Tensor, "*shape"], noise: Int32[Tensor, "*shape"]) -> BFloat16[Tensor, "*shape"]:
    """Round float32 to bfloat16, up or down at random, without bias.

        P(x rounds to b) = (x - a) / (b - a),   a and b the neighbours of x in bfloat16, so E = x

    bfloat16 is float32 without its last 16 bits. Noise of 0 to 2^16 - 1, added to the bits, carries into the kept ones
    with the probability above; numbers exact in bfloat16 never change. Rounding to nearest would lose every step
    smaller than half the distance between neighbours, 2^-9 of a weight (Gupta et al. 2015).

    Args:
        x: float32 numbers. Infinities and NaN stay unchanged.
        noise: int32 of the same shape, uniform on 0 ... 2^16 - 1.
    """
    same_shape(x=x, noise=noise)
    kept = (x.view(torch.int32) + noise) & -(2**16)
    return torch.where(x.isfinite(), kept.view(torch.float32), x).to(torch.bfloat16)
