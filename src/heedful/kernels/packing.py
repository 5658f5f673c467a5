"""Rows of unequal length without padding: one row of all their tokens, in which each text attends to itself alone."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.kernels.attention import Segments
from heedful.kernels.layout import hidden_states, padding_behind
from heedful.kernels.row_filling import filling

MOST_REAL = 0.9
"""Share of real tokens beyond which rows are not packed: arranging texts for attention costs more than that much padding."""
_CAN_PACK: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def token_states(trunk: PreTrainedModel, ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states ``[tokens, hidden]`` of a batch's real tokens, row after row, without building a cache.

    Packed, where padding would be much and the trunk can; else as rows with their padding behind.
    """
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1).tolist()
    if is_worth_packing(lengths) and can_pack(trunk):
        return packed_states(trunk, ids[mask], lengths)
    rows, real = padding_behind(ids, mask, longest=max(lengths))
    return hidden_states(trunk, rows)[real]


def response_tokens(attention_mask: Tensor, response_mask: Tensor) -> Tensor:
    """Which of a batch's real tokens, row after row, belong to a response, ``[tokens]``."""
    responses = torch.zeros_like(attention_mask, dtype=torch.bool)
    responses[:, -response_mask.shape[1] :] = response_mask
    return responses[attention_mask.bool()]


def is_worth_packing(lengths: Sequence[int]) -> bool:
    """Whether texts of these lengths, none of them empty, would be padded much as rows."""
    return min(lengths) > 0 and sum(lengths) <= MOST_REAL * max(lengths) * len(lengths)


def packed_states(trunk: PreTrainedModel, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Last hidden states ``[tokens, hidden]`` of texts of these lengths that lie one after the other in ``ids``."""
    weights = sum(p.numel() for p in trunk.parameters()) - trunk.get_input_embeddings().weight.numel()
    missing, longest = filling(len(ids), ids.device, weights=weights), max(lengths)
    if missing == 0:
        return _states(trunk, ids, Segments(lengths, ids.device))
    fillers = [min(longest, missing - start) for start in range(0, missing, longest)]
    filled = nn.functional.pad(ids, (0, missing))
    return _states(trunk, filled, Segments([*lengths, *fillers], ids.device))[: len(ids)]


def can_pack(trunk: PreTrainedModel) -> bool:
    """Whether a trunk gives the states of packed texts that it gives of each by itself. It is tried once, on two texts.

    Not those that attend in another way than `heedful.kernels.attention`, have layers that mix tokens by something else, or
    see a window or a chunk of a text alone: their masks are those of a whole row.
    """
    if trunk not in _CAN_PACK:
        _CAN_PACK[trunk] = _try_packing(trunk)
    return _CAN_PACK[trunk]


@torch.no_grad()
def _try_packing(trunk: PreTrainedModel) -> bool:
    config = trunk.config.get_text_config()
    if any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")):
        return False
    ids = torch.tensor([1, 2, 3, 4, 4, 3, 2], device=next(trunk.parameters()).device)
    segments = Segments([4, 3], ids.device)
    was_training = trunk.training
    trunk.eval()
    try:
        apart = torch.cat([hidden_states(trunk, part[None])[0] for part in ids.split(segments.lengths)])
        together = _states(trunk, ids, segments)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError):  # arguments, shapes or kernels that are not there
        return False
    finally:
        trunk.train(was_training)
    is_half = torch.finfo(apart.dtype).bits < 32 or torch.is_autocast_enabled(ids.device.type)
    largest = float((together - apart).abs().max() / apart.abs().max())
    return segments.uses == config.num_hidden_layers and largest < (3e-2 if is_half else 1e-3)


def _states(trunk: PreTrainedModel, ids: Tensor, segments: Segments) -> Tensor:
    return hidden_states(trunk, ids[None], position_ids=segments.positions[None], segments=segments)[0]
