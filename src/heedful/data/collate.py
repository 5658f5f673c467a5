"""Pad prompts and responses into batches: prompts on the left and responses on the right, or all padding at the end.

The masks say what is padding. Ids are never compared, so the padding token may be the end-of-sequence token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Prompts and responses as tensors."""

    ids: Int[Tensor, "batch length"]
    attention_mask: Bool[Tensor, "batch length"]
    """True = a real token, prompt or response."""
    response_mask: Bool[Tensor, "batch time"]
    """True = a response token. Its columns are the last ``time`` columns of ``ids``."""

    def select(self, rows: Tensor) -> "Batch":
        """Return the rows at these indices, in this order."""
        return Batch(self.ids[rows], self.attention_mask[rows], self.response_mask[rows])

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on another device."""
        return Batch(self.ids.to(device), self.attention_mask.to(device), self.response_mask.to(device))


def collate(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, pad_id: int) -> Batch:
    """Pad prompts on the left and responses on the right, so that all responses begin in one column, as sampling needs.

    Args:
        prompts: token ids of each prompt; none may be empty.
        responses: token ids of each response; one may be empty.
        pad_id: the token that fills padding.
    """
    _check(prompts, responses)
    longest_prompt = max(len(prompt) for prompt in prompts)
    time = max(len(response) for response in responses)
    ids = torch.full((len(prompts), longest_prompt + time), pad_id)
    attention_mask = torch.zeros_like(ids, dtype=torch.bool)
    response_mask = torch.zeros(len(prompts), time, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, end = longest_prompt - len(prompt), longest_prompt + len(response)
        ids[row, start:end] = torch.tensor([*prompt, *response])
        attention_mask[row, start:end] = True
        response_mask[row, : len(response)] = True
    return Batch(ids, attention_mask, response_mask)


def collate_padding_behind(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, pad_id: int
) -> Batch:
    """Pad as `collate` does, but with all padding at the end of each row.

    A batch is then as long as its longest row, not as its longest prompt plus its longest response. For texts that are
    given, not sampled, this saves at least a third of the work. ``response_mask`` covers every column except the first.
    """
    _check(prompts, responses)
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    ids = torch.full((len(prompts), max(lengths)), pad_id)
    response_mask = torch.zeros(len(prompts), max(lengths) - 1, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, : lengths[row]] = torch.tensor([*prompt, *response])
        response_mask[row, len(prompt) - 1 : lengths[row] - 1] = True
    return Batch(ids, torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1), response_mask)


def _check(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> None:
    assert len(prompts) == len(responses)
    assert all(prompts), "a response token is predicted from the token before it, so every prompt needs at least one"
