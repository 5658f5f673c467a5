"""The batch layouts, against loops that place one token at a time; micro-batches as rows and tokens allow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.batches import collate, collate_padding_behind, in_micro_batches
from heedful.types import MicroBatch
from operations import operations_of

PAD = 1
"""A token that occurs in the rows too, so that nothing can be told from it."""
TOKENS = st.integers(0, 3)
ROWS = st.lists(
    st.tuples(st.lists(TOKENS, min_size=1, max_size=6), st.lists(TOKENS, max_size=6)), min_size=1, max_size=5
)


def test_golden_layout():
    batch = collate([[5], [6, 7]], [[8, 1], [9]], pad_id=PAD)
    assert batch.ids.tolist() == [[1, 5, 8, 1], [6, 7, 9, 1]]
    assert batch.attention_mask.tolist() == [[False, True, True, True], [True, True, True, False]]
    assert batch.response_mask.tolist() == [[True, True], [True, False]]
    assert (batch.ids.dtype, batch.attention_mask.dtype) == (torch.int64, torch.bool)


@given(ROWS)
def test_slow_reference(rows):
    prompts, responses = zip(*rows, strict=True)
    batch = collate(prompts, responses, pad_id=PAD)
    longest, time = max(map(len, prompts)), max(map(len, responses))
    assert batch.ids.shape == batch.attention_mask.shape == (len(rows), longest + time)
    assert batch.response_mask.shape == (len(rows), time)
    for row, (prompt, response) in enumerate(rows):
        for column in range(longest + time):
            i, t = column - (longest - len(prompt)), column - longest
            if t >= 0:
                token = response[t] if t < len(response) else None
                assert batch.response_mask[row, t] == (token is not None)
            else:
                token = prompt[i] if i >= 0 else None
            assert batch.ids[row, column] == (PAD if token is None else token)
            assert batch.attention_mask[row, column] == (token is not None)


def test_golden_packed_layout():
    batch = collate_padding_behind([[5], [6, 7, 4]], [[8, 1], [9]], pad_id=PAD)
    assert batch.ids.tolist() == [[5, 8, 1, 1], [6, 7, 4, 9]]
    assert batch.attention_mask.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert batch.response_mask.tolist() == [[True, True, False], [False, False, True]]
    assert (batch.ids.dtype, batch.attention_mask.dtype) == (torch.int64, torch.bool)


@given(ROWS)
def test_packed_rows_have_their_padding_behind(rows):
    batch = collate_padding_behind(*zip(*rows, strict=True), pad_id=PAD)
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    assert batch.ids.shape == batch.attention_mask.shape == (len(rows), longest)
    assert batch.response_mask.shape == (len(rows), longest - 1)
    for row, (prompt, response) in enumerate(rows):
        text = prompt + response
        for column in range(longest):
            real = column < len(text)
            assert batch.attention_mask[row, column] == real
            assert batch.ids[row, column] == (text[column] if real else PAD)
            if column:
                assert batch.response_mask[row, column - 1] == (real and column >= len(prompt))


@pytest.mark.parametrize("layout", [collate, collate_padding_behind])
def test_rows_that_cannot_be_learned_from(layout):
    for prompts, responses in (([[]], [[1]]), ([[1], []], [[1], [2]]), ([[1]], [[1], [2]])):
        with pytest.raises(AssertionError):
            layout(prompts, responses, pad_id=PAD)


@pytest.mark.parametrize("layout", [collate, collate_padding_behind])
@pytest.mark.parametrize("is_own", [False, True])
def test_many_rows_take_no_more_operations_than_few(layout, is_own):
    def of(rows):
        prompts, responses = [[5, 6]] * rows, [[7, 8, 9]] * rows
        own = [[True, False, True]] * rows if is_own else None
        return operations_of(lambda: layout(prompts, responses, pad_id=PAD, own=own))

    assert of(40) == of(2)


LENGTHS = [3, 3, 4, 5, 9, 30]


def of_lengths(lengths, *limit):
    return list(in_micro_batches(lengths, MicroBatch(*limit), lambda length: (1, length)))


def test_micro_batches_by_hand():
    """Tokens count padding: three rows, the longest of 4, are 12. A row of 30 is alone where 12 is the most. The order is the
    caller's: with the longest first, 4 rows of at most 9 are 36."""
    for limit, expected in (
        ((4,), [[3, 3, 4, 5], [9, 30]]),
        ((6,), [LENGTHS]),
        ((1,), [[length] for length in LENGTHS]),
        ((100, 12), [[3, 3, 4], [5], [9], [30]]),
        ((100, 11), [[3, 3], [4, 5], [9], [30]]),
        ((2, 12), [[3, 3], [4, 5], [9], [30]]),
        ((100, 1), [[length] for length in LENGTHS]),
        ((100, 180), [LENGTHS]),
        ((100, 179), [LENGTHS[:5], [30]]),
    ):
        assert of_lengths(LENGTHS, *limit) == expected
    assert of_lengths(LENGTHS[::-1], 100, 36) == [[30], [9, 5, 4, 3], [3]]
    assert of_lengths([2, 9, 2, 2], 100, 18) == [[2, 9], [2, 2]]
    assert of_lengths([], 4, 10) == []


def test_items_of_several_rows_stay_whole():
    """The first three are 7 rows of 6 tokens. A pair is two rows."""
    items = [(2, 4), (3, 4), (2, 6), (7, 5), (2, 2)]
    by_rows, by_tokens = (
        list(in_micro_batches(items, limit, lambda item: item)) for limit in (MicroBatch(5), MicroBatch(100, 42))
    )
    assert by_rows == [items[:2], *([item] for item in items[2:])]
    assert by_tokens == [items[:3], items[3:4], items[4:]]
    assert MicroBatch(8, 100).of_pairs == MicroBatch(16, 100)
