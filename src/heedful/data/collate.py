"""Batches: prompts padded on the left and responses on the right, or each row with all padding behind.

Padding is told by the masks and never by comparing ids, so a padding token that equals the end-of-sequence token is safe.
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
    """True = a response token; its columns are the last ``time`` ones of ``ids``."""

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.ids.to(device), self.attention_mask.to(device), self.response_mask.to(device))


def collate(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, pad_id: int) -> Batch:
    """Pad prompts on the left and responses on the right into one batch; no prompt may be empty.

    Responses all begin in one column, as sampling needs it.
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
    """The same rows with all padding behind them; no prompt may be empty.

    A batch is as long as its longest row, not as its longest prompt and longest response together: for given texts that
    saves a third and more of the work. ``response_mask`` covers every column but the first.
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
    assert all(prompts), "a response token is predicted from the token before it, so every prompt has one at least"
