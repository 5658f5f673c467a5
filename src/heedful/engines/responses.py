"""`Responses`: prompts and sampled responses, as tokens and as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heedful.data.batches import Batch, Rows, collate, row_indices, shapes
from heedful.types import Completion


@dataclass(frozen=True)
class Responses:
    """Prompts and what a policy said to them, as tokens and as text. Row i answers prompt i.

    B rows, T columns of the longest response, L columns with the longest prompt. Prompts are padded on the left, responses
    on the right. ``mask`` marks the policy's own tokens, up to and including the stop token. Tokens of somebody else between
    them, such as a tool's result, are read but not marked: log-probs, losses and lengths leave them out.
    """

    batch: Batch
    """All tokens, and the mask of the policy's own."""
    truncated: Bool[Tensor, " batch"]
    """True = cut at the length limit, without a stop token."""
    logprobs: Float[Tensor, "batch time"]
    """Log-probs recorded during sampling, unfiltered, at ``temperature``; `heedful.logprobs` computes those of training. A
    loss uses them only for importance weights (``--importance``), with ``kept_logprobs``."""
    completions: Sequence[Completion] = ()
    """Prompts and responses as text; empty as long as only token ids were sampled."""
    temperature: float = 1.0
    """Sampling temperature, also of the log-probs; those of greedy sampling (0) are at temperature 1."""
    kept_logprobs: Float[Tensor, "batch time"] | None = None
    """Log of the probability mass kept by top-k and top-p at each token (at temperature 0: of the most likely one); at
    most 0. None if all is kept, or if servers sampled: their ``logprobs`` are already of the filtered distribution."""
    versions: Int[Tensor, " batch"] | None = None
    """Version of the weights that sampled each response: number of rollout batches they were trained on. None if not
    counted."""

    @property
    def ids(self) -> Int[Tensor, "batch length"]:
        """Token ids ``[B, L]``: prompts padded on the left, responses on the right."""
        return self.batch.ids

    @property
    def attention_mask(self) -> Bool[Tensor, "batch length"]:
        """True at real tokens, ``[B, L]``."""
        return self.batch.attention_mask

    @property
    def mask(self) -> Bool[Tensor, "batch time"]:
        """True at the policy's own tokens, ``[B, T]``; its columns are the last T of ``ids``."""
        return self.batch.response_mask

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Number of the policy's own tokens in each row, including the stop token."""
        return self.mask.sum(dim=1)

    @property
    def texts(self) -> list[str]:
        """The responses as text."""
        return [completion.response for completion in self.completions]

    @property
    def drawn_logprobs(self) -> Float[Tensor, "batch time"]:
        """Log-probs of the sampled tokens under the filtered distribution: normalised by the kept mass."""
        return self.logprobs if self.kept_logprobs is None else self.logprobs - self.kept_logprobs

    def own_ids(self) -> list[list[int]]:
        """The policy's own tokens in each row, including the stop token."""
        return self.batch.own_ids()

    def __repr__(self) -> str:
        """A line for each field: the shape and type of a tensor, the number of texts."""
        return shapes("Responses", vars(self))

    def __len__(self) -> int:
        return len(self.truncated)

    def __getitem__(self, rows: Rows) -> "Responses":
        """The rows at these indices, or where a mask is True, in this order; ``batch[0]`` is a batch of one row.

        Raises IndexError for a row that there is not, or a mask of another length.
        """
        return self.select(rows)

    def select(self, rows: Rows) -> "Responses":
        """``self[rows]``."""
        indices = row_indices(rows, len(self), self.truncated.device)
        chosen = [self.completions[row] for row in indices.tolist()] if self.completions else ()
        return self._with(self.batch.select(indices), chosen, lambda numbers: numbers[indices])

    def to(self, device: torch.device | str) -> "Responses":
        """The responses on another device."""
        return self._with(self.batch.to(torch.device(device)), self.completions, lambda numbers: numbers.to(device))

    def _with(self, batch: Batch, completions: Sequence[Completion], change: Callable[[Tensor], Tensor]) -> "Responses":
        numbers: dict[str, Any] = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, batch=batch, completions=completions, **numbers)


def joined(parts: Sequence[Responses], rows: Sequence[int], *, pad_id: int) -> Responses:
    """Join rows of several batches with the same settings into one; row indices run through all parts."""
    asked, said, own = (
        list(chain.from_iterable(each)) for each in zip(*(part.batch.tokens() for part in parts), strict=True)
    )
    batch = collate(
        [asked[row] for row in rows], [said[row] for row in rows], own=[own[row] for row in rows], pad_id=pad_id
    )
    time, chosen = batch.response_mask.shape[1], torch.tensor(rows, device=parts[0].truncated.device)

    def padded(numbers: Sequence[Tensor]) -> Tensor:
        same = [nn.functional.pad(x[:, :time], (0, max(0, time - x.shape[1]))) for x in numbers]
        return torch.cat(same)[chosen]

    completions = list(chain.from_iterable(part.completions for part in parts))
    kept = [part.kept_logprobs for part in parts if part.kept_logprobs is not None]
    versions = [part.versions for part in parts if part.versions is not None]
    return Responses(
        batch=batch.to(chosen.device),
        completions=[completions[row] for row in rows],
        truncated=torch.cat([part.truncated for part in parts])[chosen],
        logprobs=padded([part.logprobs for part in parts]),
        temperature=parts[0].temperature,
        kept_logprobs=padded(kept) if kept else None,
        versions=torch.cat(versions)[chosen] if versions else None,
    )
