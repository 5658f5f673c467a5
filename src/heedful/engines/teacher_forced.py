"""The teacher-forced pass: log-probs and values of given responses, in micro-batches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from heedful.data.batches import AdaptiveMicroBatch, Batch, in_step, rows_of
from heedful.devices import on_host, upload
from heedful.distributed import ranks
from heedful.distributed.sharding import LockstepForwards, lockstep_forwards
from heedful.kernels.waiting import on_device
from heedful.models.policy import Policy, TokenOutputs
from heedful.models.value_model import ValueModel
from heedful.types import MicroBatch


def micro_batches(
    batch: Batch, limit: MicroBatch, lockstep: LockstepForwards | None = None, *, at_least_one: bool = False
) -> Iterator[tuple[Tensor, Batch]]:
    """Yield micro-batches of at most ``limit``, each with its row indices.

    If there are several, rows are sorted by length first (`rows_of`). Each rank yields its own rows, which may be none
    (with ``at_least_one``, then the first row); ``lockstep`` synchronises ranks with sharded models.
    """
    lengths = on_host(batch.attention_mask).sum(dim=1).tolist()
    none = [[0]] if at_least_one else []
    divided = [rows_of(own, lengths, limit) or none for own in ranks.parts(lengths, ranks.size())]
    for part in divided[ranks.rank()] if lockstep is None else in_step(divided, lockstep):
        rows = upload(torch.tensor(part), batch.ids.device)
        yield rows, batch.select(rows)


@torch.no_grad()
def token_outputs(
    policy: Policy,
    batch: Batch,
    *,
    temperature: float,
    micro_batch: MicroBatch,
    adaptive: AdaptiveMicroBatch | None = None,
    with_entropy: bool = False,
    with_states: bool = False,
) -> TokenOutputs:
    """Compute log-probs, entropy and values of a batch's responses, each ``[batch, time]``, without gradients.

    Ranks share the rows, and all get all results.

    Module, precision and temperature are those of training, so that the ratio on the first minibatch is 1 up to
    rounding. The results are on the batch's device.

    Args:
        policy: the model; returns values only with a value head.
        batch: prompts and responses.
        temperature: divides the logits.
        micro_batch: maximum rows and tokens at a time.
        adaptive: remembers the micro-batch that fits into memory; None does not remember.
        with_entropy: also compute the entropy.
        with_states: also return the value head's inputs; each rank has those of its own rows.
    """

    def read(limit: MicroBatch) -> list[tuple[Tensor, TokenOutputs]]:
        parts = []
        for rows, here in micro_batches(
            batch, limit, lockstep_forwards((policy, policy.dummy_loss)), at_least_one=True
        ):
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
        return parts

    with on_device(policy):
        parts = (adaptive or AdaptiveMicroBatch()).run(read, micro_batch, rows=len(batch.ids))
    values = [(rows, part.values) for rows, part in parts if part.values is not None]
    states = {
        row: states
        for rows, part in parts
        if part.states is not None and _has_rows(batch)
        for row, states in zip(on_host(rows).tolist(), part.states.values(), strict=True)
    }
    return TokenOutputs(
        logprobs=_in_place([(rows, part.logprobs) for rows, part in parts], batch),
        entropy=_in_place([(rows, part.entropy) for rows, part in parts], batch),
        values=_in_place(values, batch) if values else None,
        states=states if with_states else None,
    )


@torch.no_grad()
def token_values(
    value_model: ValueModel, batch: Batch, *, micro_batch: MicroBatch, adaptive: AdaptiveMicroBatch | None = None
) -> Tensor:
    """Compute a separate value model's values of a batch's responses, ``[batch, time]``, without gradients."""

    def read(limit: MicroBatch) -> list[tuple[Tensor, Tensor]]:
        parts = micro_batches(batch, limit, lockstep_forwards((value_model, value_model.dummy_loss)), at_least_one=True)
        return [(rows, value_model(part.ids, part.attention_mask, part.response_mask)) for rows, part in parts]

    return _in_place((adaptive or AdaptiveMicroBatch()).run(read, micro_batch, rows=len(batch.ids)), batch)


def _in_place(parts: Sequence[tuple[Tensor, Tensor]], batch: Batch) -> Tensor:
    """Assemble the rows of micro-batches and ranks in the order of the batch, on its device."""
    order = torch.cat([rows for rows, _ in parts])
    numbers = torch.cat([part for _, part in parts]).to(batch.ids.device)
    if ranks.size() == 1:
        return numbers[order.argsort()]
    own = order.tolist() if _has_rows(batch) else []
    return ranks.all_gather_rows(numbers[: len(own)], own, len(batch.ids))


def _has_rows(batch: Batch) -> bool:
    """Whether this rank has rows of its own; else it has read the first (`micro_batches`)."""
    return bool(ranks.shard_indices(on_host(batch.attention_mask).sum(dim=1).tolist()))
