"""Batches with little or no padding: padding on the right, or packing of all texts into one row."""

import inspect
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.devices import on_host, upload
from heedful.errors import is_out_of_memory
from heedful.kernels.attention import ATTENTION, OwnMaskError, Segments, without_padding
from heedful.kernels.cpu.layers import only_last_mlp_of, take, warn_slower
from heedful.kernels.cpu.products import filling

MOST_REAL = 0.9
"""Rows are packed if at most this share of their padded tokens is real. Above it, packing costs more than the
padding."""
_CAN_PACK: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def positions(attention_mask: Tensor) -> Tensor:
    """Position ids ``[batch, time]``: the number of real tokens before each.

    Args:
        attention_mask: True (or 1) at real tokens. Padding on the left does not shift positions.
    """
    mask = attention_mask.long()
    return mask.cumsum(dim=1) - mask


def hidden_states(trunk: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    """Last hidden states ``[batch, time, hidden]`` of a causal trunk, computed without a cache.

    Args:
        trunk: the model without its head.
        ids: token ids ``[batch, time]``, padded on the right.
        options: further arguments of the trunk.

    No token attends to padding on its right, so the mask is all ones, with which attention is faster. States at padding
    are meaningless.
    """
    if "use_cache" in inspect.signature(trunk.forward).parameters:
        options["use_cache"] = False
    with without_padding():
        return trunk(input_ids=ids, attention_mask=torch.ones_like(ids), **options).last_hidden_state


def padding_behind(ids: Tensor, mask: Tensor, *, longest: int) -> tuple[Tensor, Tensor]:
    """The rows of a batch with all padding moved to the right, and the mask of real tokens.

    Args:
        ids: token ids ``[batch, time]``.
        mask: True at real tokens.
        longest: number of columns to keep: the maximum of real tokens per row.

    A batch has as many columns as its longest prompt plus its longest response, often twice what any row needs.
    """
    order = (~mask).byte().argsort(dim=1, stable=True)[:, :longest]
    return ids.gather(1, order), mask.gather(1, order)


def marked(x: Tensor, mask: Tensor) -> Tensor:
    """``x[mask]``, without waiting for the device to count the True positions if the host knows the mask (`on_host`)."""
    places = upload(on_host(mask).flatten().nonzero().squeeze(1), x.device)
    return x.flatten(0, mask.dim() - 1).index_select(0, places)


def scatter(per_token: Tensor, mask: Tensor) -> Tensor:
    """Scatter rows ``[tokens, ...]`` to the True positions of ``mask``, in order; zeros elsewhere. Waits as `marked`."""
    places = upload(on_host(mask).nonzero().t(), per_token.device)
    return per_token.new_zeros(*mask.shape, *per_token.shape[1:]).index_put(tuple(places), per_token)


def read_states(trunk: PreTrainedModel, ids: Tensor, read: Tensor, **options: Any) -> Tensor:
    """Last hidden states ``[read, hidden]`` of some tokens of a batch, as in `hidden_states`.

    Args:
        trunk: the model without its head.
        ids: token ids ``[batch, time]``.
        read: indices of the tokens to read in the flattened ``ids``; each at most once.
        options: further arguments of the trunk.
    """
    with only_last_mlp_of(trunk, ids, read):
        return take(hidden_states(trunk, ids, **options).flatten(0, 1), read)


def token_states(trunk: PreTrainedModel, ids: Tensor, attention_mask: Tensor, read: Tensor | None = None) -> Tensor:
    """Last hidden states ``[tokens, hidden]`` of a batch's real tokens, row after row, computed without a cache.

    Args:
        trunk: the model without its head.
        ids: token ids ``[batch, time]``, padded on either side.
        attention_mask: True (or 1) at real tokens, on the device of ``ids`` or on the host.
        read: True at the real tokens whose states are returned, ``[tokens]``, on the host; None returns all.

    Rows are packed if that saves much padding and the trunk supports it, else padded on the right.
    """
    if attention_mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}, but ids has {list(ids.shape)}")
    mask = attention_mask.bool()
    lengths = on_host(mask).sum(dim=1)
    if is_worth_packing(lengths.tolist()) and can_pack(trunk):
        return packed_states(trunk, marked(ids, mask), lengths.tolist(), read)
    longest = int(lengths.max())
    rows = padding_behind(ids, upload(mask, ids.device), longest=longest)[0]
    places = (torch.arange(longest) < lengths.unsqueeze(1)).flatten().nonzero().squeeze(1)
    return read_states(trunk, rows, upload(places if read is None else places[read], ids.device))


def response_tokens(attention_mask: Tensor, response_mask: Tensor) -> Tensor:
    """True for response tokens among a batch's real tokens, row after row: ``[tokens]``, on the host.

    Args:
        attention_mask: real tokens, ``[batch, prompt + time]``.
        response_mask: response tokens, ``[batch, time]``.

    Raises ValueError for a response token that is padding, or the first of its row: no token before it predicts it.
    """
    real = on_host(attention_mask.bool())
    responses = torch.zeros_like(real)
    responses[:, -response_mask.shape[1] :] = on_host(response_mask)
    if (responses & (~real | (real.cumsum(dim=1) == 1))).any():
        raise ValueError("response_mask marks padding, or the first token of a row, which no token before it predicts")
    return responses[real]


def before_each(tokens: Tensor) -> Tensor:
    """True for the token before each marked one: ``[tokens]``."""
    return nn.functional.pad(tokens[1:], (0, 1))


def is_worth_packing(lengths: Sequence[int]) -> bool:
    """Whether texts of these lengths would need much padding as rows. None may be empty."""
    return min(lengths) > 0 and sum(lengths) <= MOST_REAL * max(lengths) * len(lengths)


def packed_states(trunk: PreTrainedModel, ids: Tensor, lengths: Sequence[int], read: Tensor | None = None) -> Tensor:
    """Last hidden states ``[tokens, hidden]`` of packed texts.

    Args:
        trunk: the model without its head; see `can_pack`.
        ids: token ids of all texts, ``[tokens]``.
        lengths: number of tokens of each text.
        read: True at the tokens whose states are returned, on the host; None returns all.
    """
    places = upload(torch.arange(len(ids)) if read is None else read.nonzero().squeeze(1), ids.device)
    embedding = trunk.get_input_embeddings().weight
    weights = (p.numel() for p in trunk.parameters() if p is not embedding)
    missing, longest = filling(len(ids), ids.device, weights=weights), max(lengths)
    if missing == 0:
        return _states(trunk, ids, Segments(lengths, ids.device), places)
    fillers = [min(longest, missing - start) for start in range(0, missing, longest)]
    filled = nn.functional.pad(ids, (0, missing))
    return _states(trunk, filled, Segments([*lengths, *fillers], ids.device), places)


def can_pack(trunk: PreTrainedModel) -> bool:
    """Whether a trunk's states of packed texts equal those of separate texts.

    Tested once per trunk, on two texts. A trunk fails if it does not use `heedful.kernels.attention`, mixes tokens in
    other layers, or has sliding-window or chunked attention, whose masks are for a whole row.
    """
    if trunk not in _CAN_PACK:
        _CAN_PACK[trunk] = _try_packing(trunk)
    return _CAN_PACK[trunk]


@torch.no_grad()
def _try_packing(trunk: PreTrainedModel) -> bool:
    config = trunk.config.get_text_config()
    if config._attn_implementation != ATTENTION or any(
        getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")
    ):
        return False
    ids = torch.tensor([1, 2, 3, 4, 4, 3, 2], device=next(trunk.parameters()).device)
    segments = Segments([4, 3], ids.device)
    was_training = trunk.training
    trunk.eval()
    try:
        apart = torch.cat([hidden_states(trunk, part[None])[0] for part in ids.split(segments.lengths)])
        together = _states(trunk, ids, segments, torch.arange(len(ids), device=ids.device))
    except OwnMaskError:
        return False
    except Exception as error:  # unsupported shapes or kernels
        if is_out_of_memory(error):
            raise
        warn_slower(f"{type(trunk).__name__} pads its batches", error)
        return False
    finally:
        trunk.train(was_training)
    is_half = torch.finfo(apart.dtype).bits < 32 or torch.is_autocast_enabled(ids.device.type)
    largest = float((together - apart).abs().max() / apart.abs().max())
    return segments.uses == config.num_hidden_layers and largest < (3e-2 if is_half else 1e-3)


def _states(trunk: PreTrainedModel, ids: Tensor, segments: Segments, places: Tensor) -> Tensor:
    return read_states(trunk, ids[None], places, position_ids=segments.positions[None], segments=segments)
