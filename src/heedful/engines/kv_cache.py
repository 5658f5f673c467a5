"""Keys and values of the rows that are sampled together: without padding, written in place.

On a device they are allocated once. On a CPU they grow by blocks: attention then reads memory without gaps, which is faster.
"""

import inspect
import math
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from heedful.devices import upload
from heedful.kernels.attention import ATTENTION

BLOCK = 32
"""Attention reads a multiple of this many positions, so that its products have few different shapes."""
GROWS = ("cpu",)
"""Device types on which the cache grows by blocks."""

KEYS_AND_VALUES, STATES = "past_key_values", "cache_params"
"""Argument names of a model's cache: with attention, and with only recurrent states."""


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, ``[slots, heads, positions, size]``.

    `update` writes the tokens of `Slots.prompts` if prompts are being read, and returns their own keys and values, which
    are all that they attend to. Otherwise it writes a token per row, and returns the part of the cache that is read.
    Unwritten positions contain zeros or old numbers, so the attention mask must exclude them.
    """

    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self, slots: "Slots") -> None:
        super().__init__()
        self.slots: Any = weakref.proxy(slots)  # a cycle would keep the memory until Python collects garbage
        self.read: tuple[tuple[int, int], Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values of new tokens, ``[rows, heads, tokens, size]``. Returns the input of attention."""
        if not self.is_initialized:
            self._hold(self._room(key_states), self._room(value_states))
            self.dtype, self.device = self.keys.dtype, self.keys.device
            self.is_initialized = True
        prompts = self.slots.prompts
        if prompts is None:
            self.write(key_states, value_states)
            return self.seen()
        for cached, states in ((self.keys, key_states), (self.values, value_states)):
            cached[prompts.slot, :, prompts.position] = states[prompts.row, :, prompts.column].to(cached.dtype)
        return key_states, value_states

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write a token of each row: any shape that has rows, heads and size in this order."""
        where = self.slots.places(self.keys.shape[1])
        for flat, states in zip(self.flat, (keys, values), strict=True):
            rows = states.reshape(*where.shape, flat.shape[1])  # a view
            flat.index_put_((where,), rows if rows.dtype == flat.dtype else rows.to(flat.dtype))

    def seen(self) -> tuple[Tensor, Tensor]:
        """Keys and values that attention reads, of the current rows; the same tensors as long as their size is the same."""
        size = self.slots.num_rows, self.slots.length
        if self.read is None or self.read[0] != size:
            self.read = size, *(cached[: size[0], :, : size[1]] for cached in (self.keys, self.values))
        return self.read[1:]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows onto others."""
        for cached in (self.keys, self.values):
            cached[targets] = cached[sources]

    def grow(self) -> None:
        """Move to memory for the current number of positions."""
        if self.is_initialized:
            grown = [self._room(cached) for cached in (self.keys, self.values)]
            for new, old in zip(grown, (self.keys, self.values), strict=True):
                new[:, :, : old.shape[2]] = old
            self._hold(*grown)

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.read = keys, values, None
        self.flat = [cached.view(-1, cached.shape[3]) for cached in (keys, values)]

    def _room(self, states: Tensor) -> Tensor:
        shape = self.slots.capacity, states.shape[1], self.slots.num_positions, states.shape[3]
        return states.new_zeros(shape, dtype=self.slots.dtype or states.dtype)

    def get_seq_length(self) -> int:
        """Return the number of positions before the tokens that are being read."""
        return 0 if self.slots.prompts is not None else self.slots.length - 1


class PromptPlaces:
    """Where the tokens of prompts padded on the left go in the cache. Four numbers per token: row and column of the batch,
    slot and position of the cache."""

    def __init__(self, lengths: Sequence[int], rows: Sequence[int], slots: Sequence[int], device: torch.device) -> None:
        width, counts = max(lengths), [lengths[row] for row in rows]
        parts = (
            ([row] * n, range(width - n, width), [slot] * n, range(n))
            for row, slot, n in zip(rows, slots, counts, strict=True)
        )
        places = [list(chain.from_iterable(part)) for part in zip(*parts, strict=True)]
        self.row, self.column, self.slot, self.position = upload(torch.tensor(places), device)


class Slots(Cache):
    """The cache of a fixed number of rows. A row's tokens are at positions 0, 1, and so on; rows begin and end at any time.

    Args:
        lm: the model.
        capacity: maximum number of rows.
        longest: maximum number of tokens that a row reads.
        dtype: storage dtype of keys and values; None keeps the incoming dtype.
        block: attention reads a multiple of this many positions.
    """

    def __init__(
        self, lm: PreTrainedModel, capacity: int, longest: int, *, dtype: torch.dtype | None = None, block: int = BLOCK
    ) -> None:
        self.capacity, self.longest, self.dtype, self.block = capacity, longest, dtype, block
        self.device = lm.device
        most = -(-longest // block) * block
        self.num_positions = block if self.device.type in GROWS else most
        """Positions that there is memory for."""
        self.prompts: PromptPlaces | None = None
        """Set while prompts are read."""
        self.num_rows, self.length = capacity, block
        """Rows and positions that are read."""
        self.positions = torch.zeros(capacity, dtype=torch.long, device=self.device)
        """Of the next token of each row."""
        self.columns = torch.arange(most, device=self.device)
        self.steps, self.begun = 0, [0] * capacity
        """Steps so far, and each row's next position without them."""
        self._places: dict[int, Tensor] = {}
        super().__init__(layers=[SlotLayer(self) for _ in DynamicCache(config=lm.config).layers])

    def fill(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Begin rows in these slots, whose prompts have these lengths."""
        for slot, length in zip(slots, lengths, strict=True):
            self.begun[slot] = length - self.steps
        self.positions[upload(torch.tensor(slots), self.device)] = upload(torch.tensor(lengths), self.device)
        self._reserve(max(lengths))

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with only these rows, in this order; one may occur more than once. Only rows that change place are
        copied."""
        moved = [(source, target) for target, source in enumerate(rows) if source != target]
        if moved:
            sources, targets = upload(torch.tensor(moved).t().contiguous(), self.device)
            self.positions[targets] = self.positions[sources]
            for layer in self.layers:
                layer.move(sources, targets)
        self.begun[: len(rows)] = [self.begun[row] for row in rows]
        self.num_rows = len(rows)

    def begin_step(self) -> None:
        """Find where the next tokens are written, and how many positions are read."""
        self.begin_places()
        furthest = min(self.steps + max(self.begun[: self.num_rows]), self.longest - 1)
        self.length = (furthest // self.block + 1) * self.block
        self._reserve(self.length)

    def _reserve(self, length: int) -> None:
        """Have memory for so many positions."""
        if length > self.num_positions:
            self.num_positions = -(-length // self.block) * self.block
            for layer in self.layers:
                layer.grow()

    def begin_places(self) -> None:
        """Forget where tokens were written."""
        self._places = {}

    def end_step(self) -> None:
        """Move on to the next token."""
        self.advance()
        self.steps += 1

    def places(self, heads: int) -> Tensor:
        """Indices of the next tokens among all ``[slots * heads * positions]``, as ``[rows, heads]``."""
        if heads not in self._places:
            first = torch.arange(0, self.num_rows * heads * self.num_positions, self.num_positions, device=self.device)
            self._places[heads] = first.view(-1, heads) + self.positions[: self.num_rows, None]
        return self._places[heads]

    def mask(self, dtype: torch.dtype) -> Tensor:
        """``[rows, 1, 1, length]``, added to scores: 0 at positions up to that of the next token, elsewhere -inf."""
        unseen = self.columns[: self.length] > self.positions[: self.num_rows, None]
        scores = torch.zeros(unseen.shape, dtype=dtype, device=self.device)
        return scores.masked_fill_(unseen, -math.inf)[:, None, None]

    def advance(self) -> None:
        """`end_step` on the device: rows that have ended stay at the last position."""
        self.positions.add_(1).clamp_(max=self.longest - 1)


def takes_slots(lm: PreTrainedModel) -> bool:
    """Whether a model can be sampled with `Slots`: every layer attends to all tokens, with `heedful.kernels.attention`.

    Models with other layers (sliding windows, recurrent states) or another attention get transformers' own cache.
    """
    layers = DynamicCache(config=lm.config).layers
    return lm.config._attn_implementation == ATTENTION and all(type(layer) is DynamicLayer for layer in layers)


def cache_argument(lm: PreTrainedModel) -> str:
    """Return the name of a model's cache argument. Models ignore a cache under another name."""
    return STATES if STATES in inspect.signature(lm.forward).parameters else KEYS_AND_VALUES
