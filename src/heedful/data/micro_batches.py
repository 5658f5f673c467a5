"""Split items into micro-batches with a limited number of rows and tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from heedful.parallel import ranks
from heedful.types import MicroBatch

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
    items: Sequence[Item], limit: MicroBatch, shape: Callable[[Item], tuple[int, int]]
) -> Iterator[list[Item]]:
    """`in_micro_batches` of the items that this rank has to process: about its share of the tokens, in their order."""
    if ranks.size() > 1:
        items = [items[i] for i in ranks.own([rows * length for rows, length in map(shape, items)])]
    return in_micro_batches(items, limit, shape)


def rows_by_length(lengths: Sequence[int], limit: MicroBatch) -> list[list[int]]:
    """Return the rows of each micro-batch of this rank. A micro-batch is as wide as its longest row.

    If one holds all rows, they keep their order; else they are sorted by length first, so that little is padding. A rank may
    have no rows.

    Args:
        lengths: tokens of each row.
        limit: the most rows and tokens per micro-batch.
    """
    own = ranks.own(lengths)
    order = sorted(own, key=lengths.__getitem__)
    parts = list(in_micro_batches(order, limit, lambda row: (1, lengths[row])))
    return parts if len(parts) > 1 or len(own) < len(lengths) else [own]
