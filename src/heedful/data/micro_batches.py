"""Split items into micro-batches with a limited number of rows and tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

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


def rows_by_length(lengths: Sequence[int], limit: MicroBatch) -> list[list[int]]:
    """Return the rows of each micro-batch. A micro-batch is as wide as its longest row.

    If one holds all rows, they keep their order; else they are sorted by length first, so that little is padding.

    Args:
        lengths: tokens of each row.
        limit: the most rows and tokens per micro-batch.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    parts = list(in_micro_batches(order, limit, lambda row: (1, lengths[row])))
    return parts if len(parts) > 1 else [list(range(len(lengths)))]
