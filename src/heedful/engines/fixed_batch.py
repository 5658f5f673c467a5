"""A decoding step in fixed memory: ids, positions, mask, and a key-value cache of fixed length."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


class FixedLayer(DynamicLayer):
    """Keys and values of a layer, ``[rows, heads, positions, head_dim]``, written in place at ``write_position`` ``[1]``."""

    def __init__(self, keys: Tensor, values: Tensor, write_position: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.write_position = keys, values, write_position
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write keys and values of one token per row. Returns those of all positions, also unwritten ones."""
        self.keys.index_copy_(2, self.write_position, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.write_position, value_states.to(self.values.dtype))
        return self.keys, self.values


@dataclass(frozen=True)
class FixedBatch:
    """The memory of decoding steps besides the weights, for the largest batch and the longest row.

    The number of tokens is a tensor too, because a captured step must read it from memory.
    """

    keys: list[Tensor]
    values: list[Tensor]
    ids: Tensor
    """``[rows, 1]``: input tokens of the next step."""
    position_ids: Tensor
    """``[rows, 1]``: their positions, not counting padding."""
    mask: Tensor
    """``[rows, 1, 1, positions]``, added to attention scores: 0 at positions that a row attends to, elsewhere the
    lowest number."""
    write_position: Tensor
    """``[1]``: cache position written by the next step, the same for all rows."""

    @classmethod
    def like(cls, cache: Cache, num_rows: int, num_positions: int) -> "FixedBatch":
        """Allocate a batch with the shapes, dtype and device of a prefilled cache.

        Args:
            cache: the prefilled cache.
            num_rows: maximum number of rows.
            num_positions: maximum number of tokens per row, including padding.
        """

        def room(tensor: Tensor) -> Tensor:
            return tensor.new_zeros(num_rows, tensor.shape[1], num_positions, tensor.shape[3])

        first = cache.layers[0].keys
        ids = torch.zeros(num_rows, 1, dtype=torch.long, device=first.device)
        return cls(
            keys=[room(layer.keys) for layer in cache.layers],
            values=[room(layer.values) for layer in cache.layers],
            ids=ids,
            position_ids=ids.clone(),
            mask=first.new_zeros(num_rows, 1, 1, num_positions),
            write_position=ids[0].clone(),
        )

    @property
    def num_rows(self) -> int:
        """Maximum number of rows."""
        return self.mask.shape[0]

    @property
    def num_positions(self) -> int:
        """Maximum number of tokens per row, including padding."""
        return self.mask.shape[-1]

    def fill(self, cache: Cache, attention_mask: Tensor, rows: Tensor) -> None:
        """Copy a prefill, so that row i continues its prompt ``rows[i]``.

        ``attention_mask`` ``[prompts, time]`` is 1 at real tokens.
        """
        count, width = len(rows), attention_mask.shape[1]
        for layer, keys, values in zip(cache.layers, self.keys, self.values, strict=True):
            keys[:count, :, :width] = layer.keys[rows, :, :width]
            values[:count, :, :width] = layer.values[rows, :, :width]
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        self.mask[:count, 0, 0, :width].masked_fill_(attention_mask[rows].bool(), 0.0)
        self.position_ids.zero_()  # filler rows must stay within the model's context
        self.position_ids[:count, 0] = attention_mask.sum(dim=1)[rows]
        self.write_position.fill_(width)

    def keep(self, rows: Tensor, written: int) -> None:
        """Move the rows at these indices to the front, with the first ``written`` positions of their cache."""
        for tensor in (*self.keys, *self.values):
            tensor[: len(rows), :, :written] = tensor[rows, :, :written]
        for tensor in (self.mask, self.position_ids):
            tensor[: len(rows)] = tensor[rows]

    def forward(self, lm: PreTrainedModel, num_rows: int, num_positions: int) -> Tensor:
        """Read ``ids`` and return the logits ``[num_rows, vocab]``; attention reads only the first ``num_positions``.

        Calls before `advance` repeat the same step.
        """
        self.mask.index_fill_(-1, self.write_position, 0.0)
        here = (slice(0, num_rows), slice(None), slice(0, num_positions))
        layers = [
            FixedLayer(keys[here], values[here], self.write_position)
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        output = lm(
            input_ids=self.ids[:num_rows],
            attention_mask=self.mask[:num_rows, :, :, :num_positions],
            position_ids=self.position_ids[:num_rows],
            past_key_values=Cache(layers=layers),
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def advance(self) -> None:
        """Move on to the next token."""
        self.position_ids.add_(1)
        self.write_position.add_(1)
