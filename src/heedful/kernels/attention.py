"""Attention by plain matrix products, and within the texts of a packed row.

On a CPU plain products are faster than torch's fused kernel for short texts and single tokens.
"""

import contextlib
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heedful.core.masking import at_least_float32
from heedful.devices import capabilities, upload
from heedful.kernels.cpu.products import compiles_each_shape
from heedful.kernels.device import HALF

M = TypeVar("M", bound=PreTrainedModel)
_ALL_REAL: ContextVar[bool] = ContextVar("all_real", default=False)
ATTENTION = "heedful"
"""Name of `attention` in transformers' registry."""
MOST_SCORES = 2**22
"""Maximum number of attention scores in memory per layer, 16 MiB in float32. Above it the fused kernel is used, which
stores none."""

GROUP, COMPILED_GROUP = 8, 32
"""Packed texts are padded to a multiple of this length; texts of equal padded length share a call. The second number is
for devices that compile products per shape."""


def use_attention(model: M) -> M:
    """Switch a model from SDPA to heedful's `attention` if the model allows it. Not saved with the model."""
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation(ATTENTION)
    return model


class Segments:
    """The consecutive texts of a packed row; passed to a model as ``segments``.

    Args:
        lengths: number of tokens of each text, in order.
        device: the model's device.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.group = COMPILED_GROUP if compiles_each_shape(device) else GROUP
        self.uses = 0
        """Number of attention calls with them; `heedful.kernels.packing.can_pack` uses it to check that they arrive."""
        self.device = device

    @functools.cached_property
    def edges(self) -> Tensor:
        """Start of each text, and the end of the last one: ``[texts + 1]``."""
        return upload(torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32), self.device)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Position of each token within its text: ``[tokens]``."""
        return upload(self._counted_from([0] * len(self.lengths)), self.device)

    @functools.cached_property
    def widths(self) -> list[int]:
        """Padded length of each text, a multiple of ``group``."""
        return [-(-length // self.group) * self.group for length in self.lengths]

    @functools.cached_property
    def groups(self) -> list[tuple[int, int]]:
        """Groups of texts that share a call, as (width, number of texts), in order of width."""
        return sorted(Counter(self.widths).items())

    @functools.cached_property
    def places(self) -> Tensor:
        """Index of each token after sorting texts into groups: ``[tokens]``.

        Groups are consecutive; each text is padded on the right to its group's width.
        """
        starts, at = [0] * len(self.lengths), 0
        for i in sorted(range(len(self.lengths)), key=self.widths.__getitem__):
            starts[i], at = at, at + self.widths[i]
        return upload(self._counted_from(starts), self.device)

    def _counted_from(self, starts: Sequence[int]) -> Tensor:
        """For the tokens of each text ``start``, ``start + 1``, ...: ``[tokens]``."""
        before = itertools.accumulate(self.lengths, initial=0)
        shifts = torch.tensor([start - first for start, first in zip(starts, before, strict=False)])
        return torch.arange(sum(self.lengths)) + shifts.repeat_interleave(torch.tensor(self.lengths))


class OwnMaskError(Exception):
    """A model whose layers make masks of their own: it cannot read packed texts."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    segments: Segments | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``softmax(q k^T scaling + mask) v`` as ``[rows, queries, heads, size]``; transformers calls it in place of SDPA.

    Args:
        module: the attention layer; ``module.is_causal`` is the default of ``is_causal``.
        query: ``[rows, heads, queries, size]``.
        key, value: ``[rows, kv_heads, keys, size]``; query heads may share key heads.
        attention_mask: boolean (True: attend) or additive; None: each query of a causal model attends to keys up to its
            own position.
        scaling: factor of the products; None is ``size ** -0.5``.
        is_causal: whether a query attends only to keys up to its own position.
        segments: the texts of a packed row; then ``rows`` is 1, and a query attends only to keys of its own text.

    Plain products are used where torch's fused attention is several times slower: on a CPU for a single query, and for
    training in bfloat16. All other cases use the fused one, including many scores and options that only it supports.
    """
    if segments is not None:
        if attention_mask is not None:
            raise OwnMaskError
        segments.uses += 1
        if _has_kernel(module, query, is_causal, options):
            return _packed_by_kernel(query, key, value, segments, scaling), None
        return _packed(module, query, key, value, segments, scaling=scaling, is_causal=is_causal, **options), None
    rows, heads, queries, size = query.shape
    kv_heads, is_beyond = key.shape[1], _is_beyond(attention_mask, options)
    if is_beyond or not (_is_faster(query, key) or (queries == 1 and heads > kv_heads)):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **options
        )
    grouped = query.reshape(rows, kv_heads, -1, size)  # stacks query heads that share a key head
    if not _is_faster(query, key):  # transformers would repeat keys and values for each query head
        fused = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return fused.reshape(rows, 1, heads, -1), None
    scores = at_least_float32(grouped @ key.transpose(2, 3))
    if queries > 1 or attention_mask is not None:
        scores = scores.view(rows, heads, queries, -1)
    scaling = size**-0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and queries > 1:
        attention_mask = torch.ones(queries, key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = _additive(attention_mask, scores.dtype)
    scores = scores * scaling if attention_mask is None else torch.add(attention_mask, scores, alpha=scaling)
    weights = scores.softmax(dim=-1).to(value.dtype).view(rows, kv_heads, -1, key.shape[2])
    mixed = (weights @ value).view(rows, heads, queries, value.shape[3])
    return mixed.transpose(1, 2).contiguous(), None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 at True, the lowest finite number at False. Adding it to finite scores has the same effect as masking them."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _packed(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, segments: Segments, **options: Any
) -> Tensor:
    """Attention with texts of equal padded length as rows of a batch.

    Padding is on the right, where no token of a causal text sees it.
    """
    parts, places = [], segments.places
    sizes = [length * count for length, count in segments.groups]
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    padded = (x.new_zeros(sum(sizes), *x.shape[1:]).index_copy(0, places, x).split(sizes) for x in rows)
    for (length, _), *group in zip(segments.groups, *padded, strict=True):
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in group)
        parts.append(attention(module, q, k, v, None, **options)[0].flatten(0, 1))
    return torch.cat(parts).index_select(0, places).unsqueeze(0)


def _packed_by_kernel(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """`_packed` with torch's kernel for texts of any length."""
    dtype = _compute_dtype(query)
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    edges, longest, groups = segments.edges, max(segments.lengths), query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if _shares_key_heads(varlen_attn):
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    mixed = varlen_attn(q, k, v, edges, edges, longest, longest, **options)
    assert isinstance(mixed, Tensor)
    return mixed.unsqueeze(0)


@functools.cache
def _shares_key_heads(kernel: Callable[..., Any]) -> bool:
    """Whether query heads may share a key head, as not yet in the kernel of torch 2.11."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _has_kernel(module: torch.nn.Module, query: Tensor, is_causal: bool | None, options: dict[str, Any]) -> bool:
    """Whether torch's variable-length kernel applies: the device has it, half precision, causal, no dropout, no cap."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    has = capabilities(query.device).varlen_attention
    return has and causal and not _is_beyond(None, options) and _compute_dtype(query) in HALF


def _compute_dtype(query: Tensor) -> torch.dtype:
    """The dtype of products."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _is_faster(query: Tensor, key: Tensor) -> bool:
    rows, heads, queries, _ = query.shape
    half = query.dtype in HALF or torch.is_autocast_enabled("cpu")
    few = rows * heads * queries * key.shape[2] <= MOST_SCORES
    return query.device.type == "cpu" and (queries == 1 or (half and few))


def _is_beyond(attention_mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether plain products do not support the call.

    Only the fused attention supports dropout, position biases and masks per head; it refuses a cap.
    """
    by_head = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] != 1
    others = [options.get(name) for name in ("position_bias", "softcap")]
    return by_head or bool(options.get("dropout")) or any(other is not None for other in others)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)


@contextlib.contextmanager
def without_padding() -> Iterator[None]:
    """In this context and thread, attention masks of all ones are known to be: transformers would read them, and so wait for
    the device in every pass."""
    before = _ALL_REAL.set(True)
    try:
        yield
    finally:
        _ALL_REAL.reset(before)


def mask_of_scores(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """transformers' mask for SDPA, which does not look for padding `without_padding`."""
    mask: Tensor | None = sdpa_mask(*args, attention_mask=None if _ALL_REAL.get() else attention_mask, **options)
    return mask


ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, mask_of_scores)
