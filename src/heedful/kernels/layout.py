"""Where the tokens of a batch stand: positions, padding behind the rows, numbers back in their places."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn


def positions(attention_mask: Tensor) -> Tensor:
    """Position ids: the exclusive cumulative sum of the attention mask, so that left padding shifts nothing."""
    mask = attention_mask.long()
    return mask.cumsum(dim=1) - mask


def hidden_states(trunk: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    """Last hidden states ``[batch, time, hidden]`` of a causal trunk, without building a cache.

    Padding must be behind a row's tokens: no token then sees any, so it needs no mask, and attention without one is faster.
    The mask of ones says so to transformers. The states at padding mean nothing.
    """
    if "use_cache" in inspect.signature(trunk.forward).parameters:
        options["use_cache"] = False
    return trunk(input_ids=ids, attention_mask=torch.ones_like(ids), **options).last_hidden_state


def padding_behind(ids: Tensor, mask: Tensor, *, longest: int) -> tuple[Tensor, Tensor]:
    """The rows of a batch with all padding behind them, ``longest`` columns, and the mask of their real tokens.

    A batch's columns are its longest prompt and its longest response together, often twice as many.
    """
    order = (~mask).byte().argsort(dim=1, stable=True)[:, :longest]
    return ids.gather(1, order), mask.gather(1, order)


def scatter(per_token: Tensor, mask: Tensor) -> Tensor:
    """Numbers of the masked positions back in their places, zeros elsewhere."""
    return per_token.new_zeros(mask.shape).masked_scatter(mask, per_token)
