"""The sampler: whole batches, whole epochs, and a position that restores exactly."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful import CheckpointError, ConfigError
from heedful.data import BatchOrder
from refusals import refused

SIZES = st.integers(1, 40).flatmap(lambda items: st.tuples(st.just(items), st.integers(1, items)))


def take(sampler, count):
    return list(itertools.islice(sampler, count))


def test_golden_order():
    """Written out, so that a run resumed by another release or on another machine sees the same order."""
    assert take(BatchOrder(5, 2, seed=7), 5) == [[4, 2], [1, 3], [0, 2], [1, 3], [4, 0]]


@given(sizes=SIZES, seed=st.integers())
def test_batches_are_full_and_every_epoch_holds_each_item_once(sizes, seed):
    """``batch_size`` epochs are ``num_items`` batches, to the item."""
    num_items, batch_size = sizes
    batches = take(BatchOrder(num_items, batch_size, seed), num_items)
    assert {len(batch) for batch in batches} == {batch_size}
    visited = list(itertools.chain(*batches))
    for epoch in range(batch_size):
        assert sorted(visited[epoch * num_items : (epoch + 1) * num_items]) == list(range(num_items))


@given(sizes=SIZES, seed=st.integers(), counts=st.lists(st.integers(0, 90), max_size=4))
def test_items_may_be_taken_in_other_numbers(sizes, seed, counts):
    """In the same order, without a gap: what one call leaves is the next one's; more than an epoch may be asked for."""
    num_items, batch_size = sizes
    order, flat = BatchOrder(num_items, batch_size, seed), BatchOrder(num_items, 1, seed)
    taken = [item for count in counts for item in order.take(count)] + next(order)
    assert taken == list(itertools.chain(*take(flat, sum(counts) + batch_size)))


def test_the_given_order():
    """Every epoch has it, whatever the seed."""
    order = BatchOrder(5, 2, seed=7, shuffle=False)
    assert take(order, 5) == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


@given(sizes=SIZES, seed=st.integers(), before=st.integers(0, 60), shuffle=st.booleans())
def test_continuing_equals_never_having_stopped(sizes, seed, before, shuffle):
    """The state goes into a sampler that has already wandered elsewhere."""
    num_items, batch_size = sizes
    uninterrupted = BatchOrder(num_items, batch_size, seed, shuffle=shuffle)
    take(uninterrupted, before)
    state = uninterrupted.state_dict()
    resumed = BatchOrder(num_items, batch_size, seed, shuffle=shuffle)
    take(resumed, 3)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert take(resumed, 50) == take(uninterrupted, 50)


@given(sizes=SIZES, before=st.integers(0, 60))
def test_state_and_progress_count_items(sizes, before):
    num_items, batch_size = sizes
    sampler = BatchOrder(num_items, batch_size, seed=0)
    take(sampler, before)
    epoch, cursor = divmod(before * batch_size, num_items)
    assert sampler.state_dict() == {"epoch": epoch, "cursor": cursor}
    assert sampler.progress == pytest.approx(before * batch_size / num_items, rel=1e-12)


def test_epochs_and_seeds_have_orders_of_their_own():
    """Also seed 1 in epoch 0 against seed 0 in epoch 1: the two numbers are not added."""
    first, second = take(BatchOrder(30, 30, seed=0), 2)
    assert len({tuple(order) for order in (first, second, *take(BatchOrder(30, 30, seed=1), 2))}) == 4
    assert take(BatchOrder(30, 30, seed=0), 2) == [first, second]
    assert first != list(range(30))


def test_a_batch_that_cannot_be():
    for items, size, said in (
        (3, 4, "batch_size is 4, but the data have only 3 records. Lower it, or give more data"),
        (0, 1, "batch_size is 1, but the data have only 0 records"),
        (3, 0, "batch_size is 0; it must be at least 1"),
        (3, -1, "batch_size is -1; it must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            BatchOrder(items, size, seed=0)
    with pytest.raises(ConfigError, match="only 4 prompts"):
        BatchOrder(4, 8, seed=0, items="prompts")


def test_a_position_that_the_data_do_not_have():
    for state in ({"epoch": 0, "cursor": 5}, {"epoch": 0, "cursor": -1}, {"epoch": -1, "cursor": 0}, {"epoch": 0}, {}):
        sampler = BatchOrder(5, 2, seed=0)
        remedy = "0 <= cursor < 5. Resume with the data that the run was started with"
        with refused(CheckpointError, f"the saved data position {state} does not fit data of 5 records", remedy):
            sampler.load_state_dict(state)
        assert sampler.state_dict() == {"epoch": 0, "cursor": 0}
