"""The teacher-forced pass: log-probs and values of given responses, in micro-batches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from heedful.data.collate import Batch
from heedful.data.micro_batches import rows_by_length
from heedful.models.policy import Policy, TokenOutputs
from heedful.models.value_model import ValueModel
from heedful.types import MicroBatch


def micro_batches(batch: Batch, limit: MicroBatch) -> Iterator[tuple[Tensor, Batch]]:
    """Yield parts of a batch, as many rows at a time as ``limit`` allows, each with the indices of its rows.

    If there are several parts, rows are sorted by length first (`rows_by_length`).
    """
    for part in rows_by_length(batch.attention_mask.sum(dim=1).tolist(), limit):
        rows = torch.tensor(part, device=batch.ids.device)
        yield rows, batch.select(rows)


@torch.no_grad()
def token_outputs(
    policy: Policy,
    batch: Batch,
    *,
    temperature: float,
    micro_batch: MicroBatch,
    with_entropy: bool = False,
    with_states: bool = False,
) -> TokenOutputs:
    """Compute log-probs, entropy and values of a batch's responses, each ``[batch, time]``, without gradients.

    Module, precision and temperature are those of training, so that the ratio on the first minibatch is 1 up to rounding. The
    results are on the batch's device, wherever the policy is.

    Args:
        policy: the model; it returns values only if it has a value head.
        batch: prompts and responses.
        temperature: divides the logits.
        micro_batch: the most rows and tokens at a time.
        with_entropy: compute the entropy too.
        with_states: keep what the value head read, ``[batch, time, hidden]``.
    """
    device = batch.ids.device
    parts = []
    for rows, here in micro_batches(batch, micro_batch):
        b = here.to(policy.device)
        outputs = policy(
            b.ids,
            b.attention_mask,
            b.response_mask,
            temperature=temperature,
            with_entropy=with_entropy,
            with_states=with_states,
        )
        parts.append((rows, outputs))
    values = [(rows, part.values) for rows, part in parts if part.values is not None]
    states = [(rows, part.states) for rows, part in parts if part.states is not None]
    return TokenOutputs(
        logprobs=_in_place([(rows, part.logprobs) for rows, part in parts], device),
        entropy=_in_place([(rows, part.entropy) for rows, part in parts], device),
        values=_in_place(values, device) if values else None,
        states=_in_place(states, device) if states else None,
    )


@torch.no_grad()
def token_values(value_model: ValueModel, batch: Batch, *, micro_batch: MicroBatch) -> Tensor:
    """Compute the values of a batch's responses by a separate value model, ``[batch, time]``, without gradients."""
    return _in_place(
        [
            (rows, value_model(part.ids, part.attention_mask, part.response_mask))
            for rows, part in micro_batches(batch, micro_batch)
        ],
        batch.ids.device,
    )


def _in_place(parts: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Put the rows of several micro-batches in the order of the batch, on its device."""
    order = torch.cat([rows for rows, _ in parts])
    return torch.cat([part for _, part in parts]).to(device)[order.argsort()]
