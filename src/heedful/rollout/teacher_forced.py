"""The teacher-forced pass: log-probs and values of given responses, in micro-batches."""

from collections.abc import Iterator

import torch
from torch import Tensor

from heedful.data.collate import Batch
from heedful.models.policy import Policy, TokenOutputs
from heedful.models.value_model import ValueModel


def micro_batches(batch: Batch, micro_batch_size: int) -> Iterator[tuple[slice, Batch]]:
    """Consecutive rows of a batch, ``micro_batch_size`` at a time, with where they stand in it."""
    for start in range(0, batch.ids.shape[0], micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        yield rows, Batch(batch.ids[rows], batch.attention_mask[rows], batch.response_mask[rows])


@torch.no_grad()
def token_outputs(
    policy: Policy, batch: Batch, *, temperature: float, micro_batch_size: int, with_entropy: bool = False
) -> TokenOutputs:
    """Log-probs, entropy and values of a batch's responses, ``[batch, time]``, without gradients.

    The same module, precision and temperature as in training, so that the ratio on the first minibatch is 1. They come
    back on the batch's device, wherever the policy is.
    """
    device = batch.ids.device
    parts = []
    for _, here in micro_batches(batch, micro_batch_size):
        part = here.to(policy.device)
        parts.append(
            policy(
                part.ids, part.attention_mask, part.response_mask, temperature=temperature, with_entropy=with_entropy
            )
        )
    values = [part.values for part in parts if part.values is not None]
    return TokenOutputs(
        logprobs=torch.cat([part.logprobs for part in parts]).to(device),
        entropy=torch.cat([part.entropy for part in parts]).to(device),
        values=torch.cat(values).to(device) if values else None,
    )


@torch.no_grad()
def token_values(value_model: ValueModel, batch: Batch, *, micro_batch_size: int) -> Tensor:
    """Values of a batch's responses from a value model of its own, ``[batch, time]``, without gradients."""
    return torch.cat(
        [
            value_model(part.ids, part.attention_mask, part.response_mask)
            for _, part in micro_batches(batch, micro_batch_size)
        ]
    )
