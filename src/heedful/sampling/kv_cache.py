"""The key-value cache of sampling, written in place."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from heedful.kernels.attention import ATTENTION

BLOCK = 32
"""Tokens that the cache grows by: seldom enough to cost nothing, and few places are read in vain."""


def capacity(length: int) -> int:
    """Places that the cache has for ``length`` tokens: the next whole number of blocks."""
    return -(-length // BLOCK) * BLOCK


class InPlaceLayer(DynamicLayer):
    """Keys and values ``[rows, heads, capacity, size]``: a token is written in place, and products read them as they are.

    What is returned for one token has all the capacity. Places that were not written yet hold zeros; the attention mask
    must leave them out.
    """

    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.stored_dtype = dtype
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start, self.length = self.length, self.length + key_states.shape[2]
        if not self.is_initialized:
            self.dtype, self.device = self.stored_dtype or key_states.dtype, key_states.device
            self.is_initialized = True
        if capacity(self.length) > capacity(start):
            self.keys = self._grown(self.keys, key_states)
            self.values = self._grown(self.values, value_states)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return (key_states, value_states) if start == 0 else (self.keys, self.values)

    def _grown(self, old: Tensor | None, states: Tensor) -> Tensor:
        rows, heads, _, size = states.shape
        grown = states.new_zeros(rows, heads, capacity(self.length), size, dtype=self.dtype)
        if old is not None:
            grown[:, :, : old.shape[2]] = old
        return grown

    def get_seq_length(self) -> int:
        return self.length


def make_cache(lm: PreTrainedModel, dtype: torch.dtype | None) -> tuple[DynamicCache, bool]:
    """An empty cache for a model, and whether it is one of `InPlaceLayer`, which keep ``dtype`` (None: the states' own).

    It is where every layer attends to all tokens by `heedful.kernels.attention`. Layers of other kinds (sliding windows,
    states) and other attentions keep transformers' own cache.
    """
    cache = DynamicCache(config=lm.config)
    in_place = lm.config._attn_implementation == ATTENTION and all(
        type(layer) is DynamicLayer for layer in cache.layers
    )
    if in_place:
        cache.layers = [InPlaceLayer(dtype) for _ in cache.layers]
    return cache, in_place
