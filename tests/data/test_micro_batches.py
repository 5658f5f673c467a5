"""Micro-batches: items in their order, as many at a time as rows and tokens allow."""

import pytest

from heedful.data.batches import in_micro_batches
from heedful.types import MicroBatch

LENGTHS = [3, 3, 4, 5, 9, 30]


def of_lengths(lengths, *limit):
    return list(in_micro_batches(lengths, MicroBatch(*limit), lambda length: (1, length)))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ((4,), [[3, 3, 4, 5], [9, 30]]),
        ((6,), [LENGTHS]),
        ((1,), [[length] for length in LENGTHS]),
        ((100, 12), [[3, 3, 4], [5], [9], [30]]),
        ((100, 11), [[3, 3], [4, 5], [9], [30]]),
        ((2, 12), [[3, 3], [4, 5], [9], [30]]),
        ((100, 1), [[length] for length in LENGTHS]),
        ((100, 180), [LENGTHS]),
        ((100, 179), [LENGTHS[:5], [30]]),
    ],
)
def test_by_hand(limit, expected):
    """Tokens count padding: three rows, the longest of 4, are 12. A row of 30 is alone where 12 is the most."""
    assert of_lengths(LENGTHS, *limit) == expected


def test_the_order_is_the_callers():
    """The longest first: 4 rows of at most 9 are 36."""
    assert of_lengths(LENGTHS[::-1], 100, 36) == [[30], [9, 5, 4, 3], [3]]
    assert of_lengths([2, 9, 2, 2], 100, 18) == [[2, 9], [2, 2]]


def test_items_of_several_rows_stay_whole():
    items = [(2, 4), (3, 4), (2, 6), (7, 5), (2, 2)]
    assert list(in_micro_batches(items, MicroBatch(5), lambda item: item)) == [[*items[:2]], *([i] for i in items[2:])]
    assert (
        list(in_micro_batches(items, MicroBatch(100, 42), lambda item: item))
        == [
            items[:3],  # 7 rows of 6
            items[3:4],
            items[4:],
        ]
    )


def test_pairs_are_two_rows():
    assert MicroBatch(8, 100).of_pairs == MicroBatch(16, 100)


def test_nothing_makes_no_micro_batch():
    assert of_lengths([], 4, 10) == []
