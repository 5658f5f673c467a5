"""The result of sampling."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.data.collate import Batch


@dataclass(frozen=True)
class Rollouts:
    """Prompts and sampled responses in one batch, with prompts padded on the left and responses on the right.

    ``response_mask`` covers every sampled token up to and including the stop token.
    """

    batch: Batch
    lengths: Int[Tensor, " batch"]
    """Number of response tokens of each row, including the stop token."""
    truncated: Bool[Tensor, " batch"]
    """True = no stop token was sampled: the response was cut off by its length."""
    sampler_logprobs: Float[Tensor, "batch time"]
    """Log-probs of the sampled tokens, unfiltered, with the temperature applied. For diagnosis, never for a loss."""

    def responses(self, *, with_stop: bool) -> list[list[int]]:
        """Return the ids of each response, with or without the stop token that ended it."""
        ends = self.lengths if with_stop else self.lengths - (~self.truncated).long()
        start = self.batch.ids.shape[1] - self.batch.response_mask.shape[1]
        return [ids[:end] for ids, end in zip(self.batch.ids[:, start:].tolist(), ends.tolist(), strict=True)]

    def select(self, rows: Tensor) -> "Rollouts":
        """Return the rows at these indices, in this order."""
        return Rollouts(self.batch.select(rows), self.lengths[rows], self.truncated[rows], self.sampler_logprobs[rows])

    def to(self, device: torch.device) -> "Rollouts":
        """Return the rollouts on another device."""
        return Rollouts(
            self.batch.to(device), self.lengths.to(device), self.truncated.to(device), self.sampler_logprobs.to(device)
        )
