"""A token per row through a decoder like Llama's, in half the operations of transformers' code, and the same numbers.

The model's own matrices, norms and embeddings are called. What is left out are operations around them: cosines and sines are
read from a table, queries and keys are rotated together, and a norm is one operation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.engines.kv_cache import Slots
from heedful.kernels.attention import attention
from heedful.kernels.cpu.layers import SILU
from heedful.kernels.device import HALF
from heedful.kernels.weights import joined

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Model types with such decoders, in their own classes."""
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose angles depend only on the position."""


class OneToken:
    """Reads a token of each row of a cache. Works on the model's modules, so it has the current weights.

    Args:
        lm: a model that `is_known`.
        compute_dtype: half precision runs under the caller's autocast.
    """

    def __init__(self, lm: PreTrainedModel, compute_dtype: torch.dtype) -> None:
        self.lm, self.half = lm, compute_dtype if compute_dtype in HALF else None
        self.joined = [
            (
                joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                joined(layer.mlp.gate_proj, layer.mlp.up_proj) if isinstance(layer.mlp.act_fn, SILU) else None,
            )
            for layer in lm.model.layers
        ]
        self._table: Tensor | None = None

    @staticmethod
    def is_known(lm: PreTrainedModel) -> bool:
        """Whether this computes what the model does: one of the architectures, without hooks that its code would call."""
        kind, embedding = lm.config.model_type, lm.get_input_embeddings()
        if kind not in ARCHITECTURES or type(lm).__name__.lower() != f"{kind}forcausallm":
            return False
        hooked = (m for m in lm.modules() if m._forward_hooks or m._forward_pre_hooks)
        rotation = lm.config.rope_parameters["rope_type"]
        return rotation in ROTATIONS and all(module is embedding for module in hooked)

    def __call__(self, ids: Tensor, slots: Slots) -> Tensor:
        """The logits ``[rows, vocab]`` after the tokens ``ids`` ``[rows]``, whose keys and values are written."""
        rows = len(ids)
        cos, sin = self._rotations(slots)[slots.positions[:rows]].unbind(1)
        size = cos.shape[-1]
        x = self.lm.get_input_embeddings()(ids[:, None])
        mask = slots.mask(self.half or x.dtype)
        for layer, cache, (qkv, gate_up) in zip(self.lm.model.layers, slots.layers, self.joined, strict=True):
            inner = layer.self_attn
            states = self._norm(x, layer.input_layernorm)
            heads = inner.config.num_attention_heads
            if qkv is None:
                q, k, v = (read(states).view(rows, -1, size) for read in (inner.q_proj, inner.k_proj, inner.v_proj))
            else:
                of_heads = nn.functional.linear(states, qkv).view(rows, -1, size)
                kv_heads = (of_heads.shape[1] - heads) // 2
                q, k, v = of_heads.split([heads, kv_heads, kv_heads], dim=1)
            if hasattr(inner, "q_norm"):
                q, k = _rms_norm(q, inner.q_norm), _rms_norm(k, inner.k_norm)
            both = torch.cat((q, k), dim=1)
            rotated = (both * cos).add_(both.roll(size // 2, -1) * sin).to(v.dtype)
            cache.write(rotated[:, heads:], v)
            keys, values = cache.seen()
            mixed, _ = attention(inner, rotated[:, :heads, None], keys, values, mask, scaling=inner.scaling)
            x = x.add_(inner.o_proj(mixed.view(rows, 1, -1)))
            states = self._norm(x, layer.post_attention_layernorm)
            if gate_up is None:
                x.add_(layer.mlp(states))
            else:
                gate, up = nn.functional.linear(states, gate_up).chunk(2, dim=-1)
                x.add_(layer.mlp.down_proj(nn.functional.silu(gate) * up))
        logits: Tensor = self.lm.lm_head(self._norm(x, self.lm.model.norm))
        return logits[:, 0]

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        """A normed state in the dtype of products."""
        normed = _rms_norm(x, norm)
        return normed if self.half is None else normed.to(self.half)

    def _rotations(self, slots: Slots) -> Tensor:
        """Cosines, and sines with the sign that the first half is multiplied by: ``[positions, 2, 1, size]``."""
        if self._table is None or len(self._table) < len(slots.columns):
            like = torch.zeros(1, device=slots.device)
            cos, sin = self.lm.model.rotary_emb(like, slots.columns[None])
            sin[..., : sin.shape[-1] // 2].neg_()
            self._table = torch.stack((cos[0], sin[0]), dim=1).unsqueeze(2)
        return self._table


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    weight = norm.weight
    if x.dtype == weight.dtype:
        return nn.functional.rms_norm(x, weight.shape, weight, norm.variance_epsilon)
    # In float32 inside, and rounded before the product with the weight, as by transformers.
    return weight * nn.functional.rms_norm(x, weight.shape, None, norm.variance_epsilon).to(x.dtype)


def step_of(lm: PreTrainedModel, compute_dtype: torch.dtype) -> Callable[[Tensor, Slots], Tensor]:
    """How a model reads a token of each row: `OneToken`, or its own code."""
    if OneToken.is_known(lm):
        return OneToken(lm, compute_dtype)
    return partial(_by_its_own_code, lm, compute_dtype if compute_dtype in HALF else lm.dtype)


def _by_its_own_code(lm: PreTrainedModel, mask_dtype: torch.dtype, ids: Tensor, slots: Slots) -> Tensor:
    output = lm(
        input_ids=ids[:, None],
        attention_mask=slots.mask(mask_dtype),
        position_ids=slots.positions[: len(ids), None],
        past_key_values=slots,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits
