"""Sample the next token from logits."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.core.masking import at_least_float32
from heedful.devices import capabilities

BLOCK = 64
"""Tokens per block. The search first finds the block by block sums, then the token in it."""
AT_ONCE = 2**19
"""Maximum number of probabilities summed at a time on a CPU, which copies them to float64 first."""


def filter_logits(logits: Float[Tensor, "batch vocab"], *, top_k: int, top_p: float) -> Float[Tensor, "batch vocab"]:
    """Set the logits of unlikely tokens to -inf: first by rank (``top_k``), then by cumulative probability (``top_p``).

    Args:
        logits: one row per response.
        top_k: keep the k most likely tokens and those that tie with the k-th; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this total probability, in (0, 1]; 1 keeps all.
            The token that crosses it is kept, as in transformers (Holtzman et al. 2020, section 3.1).
    """
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(outside, -torch.inf)
    return logits


def draw(logits: Float[Tensor, "batch vocab"], uniforms: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Sample one token per row from ``softmax(logits)`` by inverse transform sampling: the cumulative distribution at
    ``u``.

    A row's token depends only on its own logits and number, not on the rest of the batch. Tokens of probability 0 are
    never sampled. The distribution is summed in float64.

    Args:
        logits: one row per response.
        uniforms: one number ``u`` per row, in [0, 1).
    """
    return draw_from(at_least_float32(logits).softmax(dim=-1), uniforms)


def draw_from(probabilities: Float[Tensor, "batch vocab"], uniforms: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """`draw` from probabilities: find the block in which the cumulative sum exceeds ``u``, then the token."""
    if not capabilities(probabilities.device).float64:
        return draw_from(probabilities.cpu(), uniforms.cpu()).to(probabilities.device)
    rows, vocab = probabilities.shape
    size = math.gcd(vocab, BLOCK)  # most vocabularies are multiples of BLOCK; others are padded
    size = size if size >= 8 else BLOCK
    if vocab % size:
        probabilities = nn.functional.pad(probabilities, (0, -vocab % size))
    blocks = probabilities.reshape(rows, -1, size)
    parts = blocks.split(max(1, AT_ONCE // vocab)) if blocks.device.type == "cpu" else [blocks]
    cumulative = torch.cat([part.sum(dim=-1, dtype=torch.float64) for part in parts]).cumsum(dim=-1)
    total = cumulative[:, -1:]
    uniforms = uniforms.to(probabilities.device).double().unsqueeze(1)
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(cumulative, target, right=True)
    before = nn.functional.pad(cumulative, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(rows, device=blocks.device), block.squeeze(1)].double().cumsum(dim=-1) + before
    target = torch.minimum(
        target, torch.nextafter(inside[:, -1:], torch.zeros_like(total))
    )  # the two sums may round differently
    return (block * size + torch.searchsorted(inside, target, right=True)).squeeze(1)
