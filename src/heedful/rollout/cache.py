"""The key-value cache of sampling: written in place, rows dropped when they have finished; and attention for one token."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heedful.core.masking import at_least_float32

ATTENTION = "heedful_decode"
"""The name that `one_token_attention` has in transformers."""
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

    It is where every layer attends to all tokens by "sdpa"; the model then does by `one_token_attention` (and is changed).
    Layers of other kinds (sliding windows, states) and other attentions keep transformers' own cache.
    """
    cache = DynamicCache(config=lm.config)
    in_place = lm.config._attn_implementation == "sdpa" and all(type(layer) is DynamicLayer for layer in cache.layers)
    if in_place:
        lm.set_attn_implementation(ATTENTION)
        cache.layers = [InPlaceLayer(dtype) for _ in cache.layers]
    return cache, in_place


def one_token_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one query token a row by plain matrix products, ``softmax(q k^T scaling + mask) v``.

    On a CPU torch's fused attention is several times slower for a single query, most of all in bfloat16. Longer queries
    (the prompt) and other devices have the fused one. ``attention_mask`` is additive.
    """
    if query.shape[2] > 1 or query.device.type != "cpu" or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows, heads, _, size = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, size)  # query heads that share a key
    scores = (grouped @ key.transpose(2, 3)) * (size**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores + attention_mask
    mixed = at_least_float32(scores).softmax(dim=-1).to(value.dtype) @ value
    return mixed.reshape(rows, 1, heads, value.shape[3]), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, one_token_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
