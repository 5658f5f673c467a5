"""`Rollouts`: prompts and sampled responses as tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.data.batches import Batch, collate


@dataclass(frozen=True)
class Rollouts:
    """Prompts and sampled responses in one batch, with prompts padded on the left and responses on the right.

    ``response_mask`` covers every sampled token up to and including the stop token.
    """

    batch: Batch
    lengths: Int[Tensor, " batch"]
    """Number of response tokens of each row, including the stop token."""
    truncated: Bool[Tensor, " batch"]
    """True = cut at the length limit, without a stop token."""
    sampler_logprobs: Float[Tensor, "batch time"]
    """Unfiltered log-probs of the sampled tokens at the sampling temperature. A loss uses them only for importance
    weights (``--importance``), with ``kept_logprobs``."""
    kept_logprobs: Float[Tensor, "batch time"] | None = None
    """Log of the probability mass kept by top-k and top-p at each token (at temperature 0: of the most likely one); at
    most 0. None if all is kept, or if servers sampled: their ``sampler_logprobs`` are already of the filtered
    distribution."""
    versions: Int[Tensor, " batch"] | None = None
    """Version of the weights that sampled each response: number of rollout batches they were trained on. None if not
    counted."""

    @property
    def drawn_logprobs(self) -> Float[Tensor, "batch time"]:
        """Log-probs of the sampled tokens under the filtered distribution: normalised by the kept mass."""
        return self.sampler_logprobs if self.kept_logprobs is None else self.sampler_logprobs - self.kept_logprobs

    def responses(self, *, with_stop: bool) -> list[list[int]]:
        """Return the ids of each response, with or without the stop token that ended it."""
        ends = self.lengths if with_stop else self.lengths - (~self.truncated).long()
        start = self.batch.ids.shape[1] - self.batch.response_mask.shape[1]
        return [ids[:end] for ids, end in zip(self.batch.ids[:, start:].tolist(), ends.tolist(), strict=True)]

    def select(self, rows: Tensor) -> "Rollouts":
        """Return the rows at these indices, in this order."""
        return self._with(self.batch.select(rows), lambda numbers: numbers[rows])

    def to(self, device: torch.device) -> "Rollouts":
        """Return the rollouts on another device."""
        return self._with(self.batch.to(device), lambda numbers: numbers.to(device))

    def _with(self, batch: Batch, change: Callable[[Tensor], Tensor]) -> "Rollouts":
        kept = None if self.kept_logprobs is None else change(self.kept_logprobs)
        versions = None if self.versions is None else change(self.versions)
        lengths, truncated, sampled = map(change, (self.lengths, self.truncated, self.sampler_logprobs))
        return Rollouts(batch, lengths, truncated, sampled, kept, versions)


def joined(parts: Sequence[Rollouts], rows: Sequence[int], *, pad_id: int) -> Rollouts:
    """Join rows of several rollouts with the same settings into one batch; row indices run through all parts."""
    prompts, responses = [], []
    for part in parts:
        ids, mask = part.batch.ids, part.batch.attention_mask
        longest = ids.shape[1] - part.batch.response_mask.shape[1]
        begins = (longest - mask[:, :longest].sum(dim=1)).tolist()
        prompts += [row[begin:longest] for row, begin in zip(ids.tolist(), begins, strict=True)]
        responses += part.responses(with_stop=True)
    batch = collate([prompts[row] for row in rows], [responses[row] for row in rows], pad_id=pad_id)
    time, chosen = batch.response_mask.shape[1], torch.tensor(rows, device=parts[0].lengths.device)

    def padded(numbers: Sequence[Tensor]) -> Tensor:
        same = [torch.nn.functional.pad(x[:, :time], (0, max(0, time - x.shape[1]))) for x in numbers]
        return torch.cat(same)[chosen]

    kept = [part.kept_logprobs for part in parts if part.kept_logprobs is not None]
    versions = [part.versions for part in parts if part.versions is not None]
    return Rollouts(
        batch=batch.to(chosen.device),
        lengths=torch.cat([part.lengths for part in parts])[chosen],
        truncated=torch.cat([part.truncated for part in parts])[chosen],
        sampler_logprobs=padded([part.sampler_logprobs for part in parts]),
        kept_logprobs=padded(kept) if kept else None,
        versions=torch.cat(versions)[chosen] if versions else None,
    )
