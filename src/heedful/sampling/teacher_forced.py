"""The teacher-forced pass: log-probs and values of given responses, in micro-batches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from heedful.data.collate import Batch
from heedful.data.micro_batches import in_micro_batches
from heedful.models.policy import Policy, TokenOutputs
from heedful.models.value_model import ValueModel
from heedful.types import MicroBatch


def micro_batches(batch: Batch, limit: MicroBatch) -> Iterator[tuple[Tensor, Batch]]:
    """Rows of a batch, as many at a time as ``limit`` allows, with where they stand in it.

    More than one pass's come in the order of their lengths: a pass is as long as its longest row.
    """
    lengths: list[int] = batch.attention_mask.sum(dim=1).tolist()
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    parts = list(in_micro_batches(order, limit, lambda row: (1, lengths[row])))
    for part in parts if len(parts) > 1 else [list(range(len(lengths)))]:
        rows = torch.tensor(part, device=batch.ids.device)
        yield rows, Batch(batch.ids[rows], batch.attention_mask[rows], batch.response_mask[rows])


@torch.no_grad()
def token_outputs(
    policy: Policy, batch: Batch, *, temperature: float, micro_batch: MicroBatch, with_entropy: bool = False
) -> TokenOutputs:
    """Log-probs, entropy and values of a batch's responses, ``[batch, time]``, without gradients.

    The same module, precision and temperature as in training, so that the ratio on the first minibatch is 1 up to rounding.
    They come back on the batch's device, wherever the policy is.
    """
    device = batch.ids.device
    parts = []
    for rows, here in micro_batches(batch, micro_batch):
        b = here.to(policy.device)
        outputs = policy(b.ids, b.attention_mask, b.response_mask, temperature=temperature, with_entropy=with_entropy)
        parts.append((rows, outputs))
    values = [(rows, part.values) for rows, part in parts if part.values is not None]
    return TokenOutputs(
        logprobs=_in_place([(rows, part.logprobs) for rows, part in parts], device),
        entropy=_in_place([(rows, part.entropy) for rows, part in parts], device),
        values=_in_place(values, device) if values else None,
    )


@torch.no_grad()
def token_values(value_model: ValueModel, batch: Batch, *, micro_batch: MicroBatch) -> Tensor:
    """Values of a batch's responses from a value model of its own, ``[batch, time]``, without gradients."""
    return _in_place(
        [
            (rows, value_model(part.ids, part.attention_mask, part.response_mask))
            for rows, part in micro_batches(batch, micro_batch)
        ],
        batch.ids.device,
    )


def _in_place(parts: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Rows of several micro-batches where they stand in the batch, on its device."""
    order = torch.cat([rows for rows, _ in parts])
    return torch.cat([part for _, part in parts]).to(device)[order.argsort()]
