"""The layout of a batch: positions, padding moved behind the rows, and numbers put back in their places."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn


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
        ids: token ids ``[batch, time]``; padding must be behind a row's tokens.
        options: further arguments of the trunk.

    With padding behind, no token sees it, so no mask is needed, and attention without one is faster. The mask of ones
    tells transformers so. The states at padding are meaningless.
    """
    if "use_cache" in inspect.signature(trunk.forward).parameters:
        options["use_cache"] = False
    return trunk(input_ids=ids, attention_mask=torch.ones_like(ids), **options).last_hidden_state


def padding_behind(ids: Tensor, mask: Tensor, *, longest: int) -> tuple[Tensor, Tensor]:
    """The rows of a batch with all padding moved behind their tokens, and the mask of the real tokens.

    Args:
        ids: token ids ``[batch, time]``.
        mask: True at real tokens.
        longest: number of columns to keep: the most real tokens of any row.

    A batch has as many columns as its longest prompt plus its longest response, often twice what any row needs.
    """
    order = (~mask).byte().argsort(dim=1, stable=True)[:, :longest]
    return ids.gather(1, order), mask.gather(1, order)


def scatter(per_token: Tensor, mask: Tensor) -> Tensor:
    """Put numbers back at the True positions of ``mask``, in order; zeros elsewhere."""
    return per_token.new_zeros(mask.shape).masked_scatter(mask, per_token)
