"""A key-value cache for sampling, written in place."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from heedful.kernels.attention import ATTENTION

BLOCK = 32
"""The cache grows by this many tokens: a compromise between reallocations and unused positions."""

KEYS_AND_VALUES, STATES = "past_key_values", "cache_params"
"""Argument names of a model's cache: with attention, and with only recurrent states."""


def capacity(length: int) -> int:
    """Return the cache's number of positions for ``length`` tokens: rounded up to whole blocks."""
    return -(-length // BLOCK) * BLOCK


class InPlaceLayer(DynamicLayer):
    """Keys and values of one layer, ``[rows, heads, capacity, size]``. Tokens are written in place, without copying the
    rest.

    After the first call `update` returns the whole capacity. Unwritten positions contain zeros, so the attention mask
    must exclude them. ``dtype`` is the storage dtype; None keeps the incoming dtype.
    """

    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.stored_dtype = dtype
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens, ``[rows, heads, tokens, size]``. Returns the input of attention."""
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
        """Return the number of tokens written."""
        return self.length


def make_cache(lm: PreTrainedModel, dtype: torch.dtype | None) -> tuple[DynamicCache, bool]:
    """Make an empty cache for a model. Returns it, and whether it consists of `InPlaceLayer`.

    It does if every layer attends to all tokens with `heedful.kernels.attention`. Models with other layers (sliding
    windows, recurrent states) or another attention get transformers' own cache.

    Args:
        lm: the model.
        dtype: storage dtype of keys and values; None keeps the incoming dtype.
    """
    cache = DynamicCache(config=lm.config)
    in_place = lm.config._attn_implementation == ATTENTION and all(
        type(layer) is DynamicLayer for layer in cache.layers
    )
    if in_place:
        cache.layers = [InPlaceLayer(dtype) for _ in cache.layers]
    return cache, in_place


def cache_argument(lm: PreTrainedModel) -> str:
    """Return the name of a model's cache argument. Models ignore a cache under another name."""
    return STATES if STATES in inspect.signature(lm.forward).parameters else KEYS_AND_VALUES
