"""What goes through a model together: so many rows, so many tokens."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from heedful.types import MicroBatch

Item = TypeVar("Item")


def in_micro_batches(
    items: Iterable[Item], limit: MicroBatch, shape: Callable[[Item], tuple[int, int]]
) -> Iterator[list[Item]]:
    """Items in their order, as many at a time as ``limit`` allows; one that alone is more than that comes alone.

    ``shape`` says how many rows an item has, and how many tokens the longest of them.
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
