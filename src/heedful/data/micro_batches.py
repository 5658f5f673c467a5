"""Split items into micro-batches with a limited number of rows and tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from heedful.parallel import ranks
from heedful.parallel.lockstep import in_lockstep
from heedful.types import MicroBatch

if TYPE_CHECKING:  # which imports torch
    from heedful.parallel.sharding import Passes

Item = TypeVar("Item")


def in_micro_batches(
    items: Iterable[Item], limit: MicroBatch, shape: Callable[[Item], tuple[int, int]]
) -> Iterator[list[Item]]:
    """Yield items in their order, as many at a time as ``limit`` allows. An item that exceeds the limit comes by itself.

    Args:
        items: what goes through a model: rows, pairs, rankings, ...
        limit: the most rows and tokens per micro-batch; tokens are rows times the longest row.
        shape: returns an item's number of rows and the number of tokens of its longest row.
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
    passes: "Passes | None" = None,
) -> Iterator[list[Item]]:
    """`in_micro_batches` of the items that this rank has to process: about its share of the tokens, in their order.

    ``passes`` keeps ranks in step if their models are divided (`in_step`).
    """
    if ranks.size() == 1:
        return in_micro_batches(items, limit, shape)
    divided = ranks.parts([rows * length for rows, length in map(shape, items)], ranks.size())
    if passes is None:
        return in_micro_batches([items[i] for i in divided[ranks.rank()]], limit, shape)
    return in_step([list(in_micro_batches([items[i] for i in own], limit, shape)) for own in divided], passes)


def in_step(divided: Sequence[Sequence[Item]], passes: "Passes") -> Iterator[Item]:
    """Yield this rank's micro-batches, while all ranks make the same number of passes through divided models.

    Args:
        divided: the micro-batches of each rank.
        passes: what a rank does that has fewer than others.
    """
    most = max(map(len, divided))
    with in_lockstep():
        for i in range(most):
            passes.before(is_last=i == most - 1)
            if i < len(divided[ranks.rank()]):
                yield divided[ranks.rank()][i]
            else:
                passes.nothing()


def rows_by_length(lengths: Sequence[int], limit: MicroBatch) -> list[list[int]]:
    """Return the rows of each micro-batch of this rank. A micro-batch is as wide as its longest row.

    If one holds all rows, they keep their order; else they are sorted by length first, so that little is padding. A rank may
    have no rows.

    Args:
        lengths: tokens of each row.
        limit: the most rows and tokens per micro-batch.
    """
    return rows_of(ranks.shard_indices(lengths), lengths, limit)


def rows_of(own: list[int], lengths: Sequence[int], limit: MicroBatch) -> list[list[int]]:
    """The same of given rows."""
    order = sorted(own, key=lengths.__getitem__)
    parts = list(in_micro_batches(order, limit, lambda row: (1, lengths[row])))
    return parts if len(parts) > 1 or len(own) < len(lengths) else [own]
