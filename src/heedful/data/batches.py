"""Rows of tokens as tensors: padding, micro-batches of limited size, and retries when memory runs out.

Masks mark the padding. Ids are never compared, so the padding token may be the end-of-sequence token.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from heedful.devices import dropout_state, empty_cache, known_on_host, remember, set_dropout_state, upload
from heedful.display import say
from heedful.distributed import ranks
from heedful.distributed.rank_failures import check_present, in_lockstep, others_wait
from heedful.errors import MemoryFullError, is_out_of_memory
from heedful.types import MicroBatch

if TYPE_CHECKING:  # which loads torch.distributed
    from heedful.distributed.sharding import LockstepForwards

Item = TypeVar("Item")
Result = TypeVar("Result")


Rows = int | slice | Sequence[int] | Sequence[bool] | Tensor
"""Rows of a batch: indices in any order, or a mask with a value for each row."""


@dataclass(frozen=True)
class Batch:
    """Prompts and responses as tensors."""

    ids: Int[Tensor, "batch length"]
    attention_mask: Bool[Tensor, "batch length"]
    """True = a real token, prompt or response."""
    response_mask: Bool[Tensor, "batch time"]
    """True = a token that the policy wrote, or is to learn. Its columns are the last ``time`` columns of ``ids``. Tokens of
    somebody else between them, such as a tool's result, are False."""

    def select(self, rows: Tensor) -> "Batch":
        """The rows at these indices, in this order."""
        return Batch(self.ids[rows], _rows_of_mask(self.attention_mask, rows), _rows_of_mask(self.response_mask, rows))

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on another device."""
        return Batch(*(upload(x, device) for x in (self.ids, self.attention_mask, self.response_mask)))

    def own_ids(self) -> list[list[int]]:
        """The tokens of each row where ``response_mask`` is True."""
        ids = self.ids[:, -self.response_mask.shape[1] :] if self.response_mask.shape[1] else self.ids[:, :0]
        return [row[own].tolist() for row, own in zip(ids.cpu(), self.response_mask.cpu(), strict=True)]

    def tokens(self) -> tuple[list[list[int]], list[list[int]], list[list[bool]]]:
        """Each row without padding, as `collate` takes it: its prompt, its response, and which of that is the policy's."""
        start = self.ids.shape[1] - self.response_mask.shape[1]
        rows = list(zip(self.ids.cpu(), self.attention_mask.cpu(), self.response_mask.cpu(), strict=True))
        return (
            [ids[:start][real[:start]].tolist() for ids, real, _ in rows],
            [ids[start:][real[start:]].tolist() for ids, real, _ in rows],
            [own[real[start:]].tolist() for _, real, own in rows],
        )


def shapes(title: str, fields: Mapping[str, object]) -> str:
    """A line for each field, under a title: the shape and type of a tensor, the number of texts. A batch gives its own."""
    named: dict[str, object] = {}
    for name, value in fields.items():
        named |= vars(value) if isinstance(value, Batch) else {name: value}
    width = max(map(len, named))
    return "\n".join([title, *(f"  {name:{width}}  {_shape(value)}" for name, value in named.items())])


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    return f"{len(value)} of them" if isinstance(value, list | tuple | dict) else repr(value)


def row_indices(rows: Rows, count: int, device: torch.device) -> Int[Tensor, " some"]:
    """Indices of some of ``count`` rows. Raises IndexError for a row that there is not, or a mask of another length."""
    chosen = torch.atleast_1d(torch.as_tensor(range(count)[rows] if isinstance(rows, slice) else rows))
    chosen = chosen if chosen.numel() else torch.zeros(0, dtype=torch.long)
    if chosen.dtype == torch.bool and tuple(chosen.shape) == (count,):
        chosen = chosen.nonzero().squeeze(1)
    elif chosen.dtype.is_floating_point or chosen.dtype == torch.bool or chosen.dim() != 1:
        raise IndexError(
            f"rows must be indices, or a mask with one value for each of {count} rows; got {chosen.dtype} of shape "
            f"{tuple(chosen.shape)}"
        )
    if len(chosen) and not (-count <= int(chosen.min()) and int(chosen.max()) < count):
        raise IndexError(f"there are {count} rows, 0 to {count - 1}; got {chosen.tolist()}")
    return chosen.to(device).long() % max(count, 1)  # torch reads uint8 as a mask


def _rows_of_mask(mask: Tensor, rows: Tensor) -> Tensor:
    """``mask[rows]``; if the host knows mask and rows, it knows these rows too, and no pass needs to wait for them."""
    selected, of_mask, of_rows = mask[rows], known_on_host(mask), known_on_host(rows)
    if of_mask is not None and of_rows is not None and of_mask is not mask:
        remember(selected, of_mask[of_rows])
    return selected


Own = Sequence[Sequence[bool]] | None
"""Which tokens of each response the policy wrote, or is to learn; None is all."""


def collate(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, pad_id: int, own: Own = None
) -> Batch:
    """Pad prompts on the left and responses on the right, so that all responses begin in one column, as sampling needs.

    Args:
        prompts: token ids of each prompt; none may be empty.
        responses: token ids of each response; one may be empty.
        pad_id: the token that fills padding.
        own: True for each token of a response that ``response_mask`` marks.
    """
    _check(prompts, responses)
    longest_prompt, time = max(map(len, prompts)), max(map(len, responses))
    ids = [
        [*[pad_id] * (longest_prompt - len(prompt)), *prompt, *response, *[pad_id] * (time - len(response))]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    starts, ends = _columns([longest_prompt - len(x) for x in prompts]), _columns(map(len, responses))
    columns = torch.arange(longest_prompt + time)
    attention_mask = (columns >= starts) & (columns < longest_prompt + ends)
    return Batch(torch.tensor(ids), attention_mask, _marked(columns[:time] < ends, own))


def collate_padding_behind(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, pad_id: int, own: Own = None
) -> Batch:
    """Pad as `collate` does, but with all padding at the end of each row.

    A batch is then as long as its longest row, not as its longest prompt plus its longest response. For given texts this
    saves at least a third of the work. ``response_mask`` covers every column except the first.
    """
    _check(prompts, responses)
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    ids = [
        [*prompt, *response, *[pad_id] * (max(lengths) - length)]
        for prompt, response, length in zip(prompts, responses, lengths, strict=True)
    ]
    starts, ends, columns = _columns(map(len, prompts)), _columns(lengths), torch.arange(max(lengths))
    response_mask = _marked((columns[1:] >= starts) & (columns[1:] < ends), own)
    return Batch(torch.tensor(ids), columns < ends, response_mask)


def _columns(numbers: Iterable[int]) -> Tensor:
    """A number for each row, to compare columns with: ``[batch, 1]``."""
    return torch.tensor([*numbers]).unsqueeze(1)


def _marked(responses: Tensor, own: Own) -> Tensor:
    """The mask of responses without the tokens that ``own`` leaves out."""
    if own is not None:
        responses[responses.clone()] = torch.tensor([is_own for row in own for is_own in row], dtype=torch.bool)
    return responses


def _check(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> None:
    assert len(prompts) == len(responses)
    assert all(prompts), "a response token is predicted from the token before it, so every prompt needs at least one"


# Micro-batches ---------------------------------------------------------------------------------------------------------


def in_micro_batches(
    items: Iterable[Item], limit: MicroBatch, shape: Callable[[Item], tuple[int, int]]
) -> Iterator[list[Item]]:
    """Yield items in order, as many at a time as ``limit`` allows. An item above the limit is a micro-batch of its own.

    ``shape`` returns an item's number of rows and the number of tokens of its longest row.
    """
    part: list[Item] = []
    rows = longest = 0
    for item in items:
        more, length = shape(item)
        rows, longest = rows + more, max(longest, length)
        if part and (rows > limit.rows or (limit.tokens is not None and rows * longest > limit.tokens)):
            yield part
            part, rows, longest = [], more, length
        part.append(item)
    if part:
        yield part


def own_micro_batches(
    items: Sequence[Item],
    limit: MicroBatch,
    shape: Callable[[Item], tuple[int, int]],
    lockstep: "LockstepForwards | None" = None,
) -> Iterator[list[Item]]:
    """`in_micro_batches` of this rank's items: about its share of the tokens, in order.

    ``lockstep`` keeps the ranks in step if their models are sharded (`in_step`).
    """
    if ranks.size() == 1:
        return in_micro_batches(items, limit, shape)
    shares = ranks.parts([rows * length for rows, length in map(shape, items)], ranks.size())
    divided = [in_micro_batches([items[i] for i in share], limit, shape) for share in shares]
    return divided[ranks.rank()] if lockstep is None else in_step([list(parts) for parts in divided], lockstep)


def in_step(divided: Sequence[Sequence[Item]], lockstep: "LockstepForwards") -> Iterator[Item]:
    """Yield this rank's entry of ``divided`` (micro-batches per rank), with the same number of ``lockstep`` on all ranks."""
    most = max(map(len, divided))
    with in_lockstep():
        for i in range(most):
            lockstep.before(is_last=i == most - 1)
            if i < len(divided[ranks.rank()]):
                yield divided[ranks.rank()][i]
            else:
                lockstep.nothing()


def rows_by_length(lengths: Sequence[int], limit: MicroBatch) -> list[list[int]]:
    """Return the row indices of each micro-batch of this rank, given all rows' lengths in tokens. A rank may have none.

    If one micro-batch holds all rows, they keep their order; otherwise they are sorted by length first, to reduce padding.
    """
    return rows_of(ranks.shard_indices(lengths), lengths, limit)


def rows_of(own: list[int], lengths: Sequence[int], limit: MicroBatch) -> list[list[int]]:
    """The same for given rows."""
    order = sorted(own, key=lengths.__getitem__)
    parts = list(in_micro_batches(order, limit, lambda row: (1, lengths[row])))
    return parts if len(parts) > 1 or len(own) < len(lengths) else [own]


# Out of memory ---------------------------------------------------------------------------------------------------------


class AdaptiveMicroBatch:
    """The largest micro-batch that fits into memory: that of the settings, or a smaller one after memory ran out.

    The smaller micro-batch stays for the rest of the run, and is part of its state. Micro-batches change gradients only by
    rounding. Messages name ``flag``, the setting of the micro-batch.
    """

    def __init__(self, flag: str = "--micro-batch-size") -> None:
        self.flag = flag
        self.found: MicroBatch | None = None
        """The micro-batch found to fit into memory; None if memory never ran out."""

    def within(self, limit: MicroBatch) -> MicroBatch:
        """The smaller of ``limit`` (from the settings) and ``found``."""
        if self.found is None:
            return limit
        tokens = [count for count in (limit.tokens, self.found.tokens) if count is not None]
        return MicroBatch(min(limit.rows, self.found.rows), min(tokens, default=None))

    def run(
        self,
        work: Callable[[MicroBatch], Result],
        limit: MicroBatch,
        *,
        rows: int,
        undo: Callable[[], None] = lambda: None,
    ) -> Result:
        """Return ``work(micro-batch)``, restarted with half the micro-batch whenever memory runs out in it.

        The arguments are those of `retry_on_oom`.
        """
        done: list[Result] = []
        for attempt in self.retry_on_oom(limit, rows=rows, undo=undo):
            with attempt as micro_batch:
                done = [work(micro_batch)]
        return done[0]

    def retry_on_oom(
        self, limit: MicroBatch, *, rows: int, undo: Callable[[], None] = lambda: None
    ) -> Iterator["Attempt"]:
        """Yield attempts at some work, each with the micro-batch to use, until one fits into memory.

            for attempt in adaptive.retry_on_oom(limit, rows=16):
                with attempt as micro_batch:
                    ...

        If memory runs out on one of several ranks, all try again. In an attempt, ranks may communicate only after
        `heedful.distributed.ranks.raise_peer_errors`.

        Args:
            limit: the micro-batch of the settings.
            rows: the number of all rows (pairs, if the limit counts pairs); halving starts from it if the limit is larger.
            undo: undoes side effects of an unfinished attempt, such as gradients. torch's random state is restored anyway.

        Raises MemoryFullError if memory runs out with one row at a time, or in a pass through sharded models.
        """
        before = dropout_state()
        while True:
            attempt = Attempt(self.within(limit), rows, self.flag)
            yield attempt
            if not attempt.ran_out:
                return
            # Outside the attempt the error and everything held by its frames is gone.
            gc.collect()
            empty_cache()
            tokens = attempt.micro_batch.tokens
            self.found = MicroBatch((attempt.count + 1) // 2, None if tokens is None else max(1, tokens // 2))
            undo()
            set_dropout_state(before)
            say(
                f"out of memory with {attempt.count} rows at a time, so from here on {self.found.rows}: the same results, "
                f"more slowly ({self.flag} {self.found.rows} does so from the start; heedful plan shows the use of memory)"
            )

    def state_dict(self) -> dict[str, int | None]:
        return {} if self.found is None else {"rows": self.found.rows, "tokens": self.found.tokens}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        rows = state.get("rows")
        self.found = None if rows is None else MicroBatch(rows, state["tokens"])


class Attempt:
    """One attempt at some work: a context with the micro-batch to use, which suppresses the error if memory runs out.

    Args:
        micro_batch: maximal rows and tokens at a time.
        rows: the number of all rows.
        flag: the setting named in messages.
    """

    def __init__(self, micro_batch: MicroBatch, rows: int, flag: str) -> None:
        self.micro_batch, self.rows, self.flag = micro_batch, rows, flag
        self.ran_out = False
        """Whether memory ran out, here or on another rank."""
        self.count = min(micro_batch.rows, -(-rows // ranks.size()))
        """The number of rows that was too large, if it did."""

    def __enter__(self) -> MicroBatch:
        return self.micro_batch

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if error is None:
            try:
                ranks.raise_peer_errors()
            except Exception as failed:  # as if the attempt itself had
                if not is_out_of_memory(failed):
                    check_present(failed)
                    raise
                error = failed
            else:
                return False
        if not isinstance(error, Exception):
            return False
        if not is_out_of_memory(error):
            check_present(error)
            return False
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        if others_wait():
            count = min(self.micro_batch.rows, self.rows)
            raise MemoryFullError(
                f"out of memory with up to {count} rows at a time ({reason}); with --shard full the other ranks wait "
                "in the middle of the pass, so it cannot be repeated in smaller parts: start again with "
                f"{self.flag} {max(1, count // 2)}, and the run resumes from its newest checkpoint"
            ) from error
        if not isinstance(error, ranks.ElsewhereMemoryError):
            ranks.any_of(True)
        if self.count <= 1:
            raise MemoryFullError(
                f"out of memory with one row at a time ({reason}); heedful plan shows the memory of each part of a run "
                "and the settings that make it fit, such as --gradient-checkpointing, --lora-rank 16, --weights-dtype "
                "bfloat16, or shorter texts (--max-length, --max-prompt-tokens, --max-new-tokens)"
            ) from error
        self.ran_out = True
        return True
