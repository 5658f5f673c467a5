"""What ranks tell each other: in one process nothing changes, in several every rank has the same numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.distributed import ranks
from heedful.errors import RankError


def test_one_process_is_everything():
    tensor, parameter = torch.tensor([1.0, -0.0]), torch.nn.Parameter(torch.zeros(1))
    ranks.add([tensor])
    ranks.add_gradients([parameter])
    assert (ranks.size(), ranks.rank(), ranks.is_first(), ranks.launched()) == (1, 0, True, False)
    assert tensor.tolist() == [1.0, 0.0]
    assert parameter.grad is None
    assert ranks.shard_indices([3.0, 9.0, 1.0]) == [0, 1, 2]
    assert ranks.all_gather_rows(torch.tensor([5.0, 4.0]), [1, 0], 2).tolist() == [4.0, 5.0]
    assert (ranks.broadcast("值"), ranks.gather("值"), ranks.on_rank_zero(lambda: "值")) == ("值", ["值"], "值")
    assert (ranks.any_of(True), ranks.any_of(False), ranks.largest(-2.5)) == (True, False, -2.5)
    ranks.check_same({"code": "a"}, {"code": ""})
    ranks.leave()


def test_memory_that_runs_out_in_a_sum_is_no_lost_rank():
    """torch's error is a RuntimeError, as those of lost connections are."""
    with pytest.raises(torch.OutOfMemoryError), ranks.complete():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(RankError), ranks.complete():
        raise RuntimeError("Connection closed by peer")


def test_a_division_worked_out_by_hand():
    """9 to rank 0, 7 to rank 1, 6 to rank 1 (7 < 9), 5 to rank 0 (9 < 13), then 14 against 13: 1 to rank 1."""
    assert ranks.parts([6, 9, 5, 7, 1], 2) == [[1, 2], [0, 3, 4]]


@given(st.lists(st.integers(0, 500), max_size=40), st.integers(1, 6))
def test_parts_hold_every_index_once_and_are_balanced(costs, count):
    parts = ranks.parts(costs, count)
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    assert len(costs) < count or all(parts)
    counted = [max(1, cost) for cost in costs]
    loads = [sum(counted[index] for index in part) for part in parts]
    # a rank that has more than another by more than one item would have given that to it
    assert max(loads) - min(loads) <= max(counted, default=0)


@pytest.fixture(scope="module")
def two(results):
    return results(2, "collectives.py")


def test_every_rank_has_the_same(two):
    first, second = ({k: v for k, v in found.items() if k not in ("rank", "first", "rows")} for found in two)
    assert str(first) == str(second)  # as text: NaN is not NaN
    assert [(found["rank"], found["size"], found["first"]) for found in two] == [(0, 2, True), (1, 2, False)]


def test_sums(two):
    found = two[0]
    assert found["added"][:3] == [[3.0] * 3, [21.0] * 4, [257.0 // 2 * 2] * 5]  # 257 is 256 in bfloat16
    assert found["added"][3] == [0.0, 9.0, 3.0, 12.0, 6.0, 15.0]
    assert math.isnan(found["added"][4][0])
    assert found["added"][4][1] == 4.0
    assert found["in buckets"] == [[2.0 * count + 1] * count for count in (3, 1, 2, 9, 4)]
    assert found["gradients"] == [[3.0, 6.0], [5.0, 6.0], None, None]


def test_rows_come_together(two):
    # of costs 5 1 4 4 2: 5 and 4 (row 2), then 4 (row 3) to rank 1, 2 to rank 0, 1 to rank 0
    assert [found["rows"] for found in two] == [[0, 1, 4], [2, 3]]
    assert two[0]["whole"] == [[0.0, 5.0], [1.0, 1.0], [2.0, 4.0], [3.0, 4.0], [4.0, 2.0]]
    assert two[0]["whole flags"] == [False, False, True, True, True]
    assert two[0]["one row"] == [[7.0, 7.0]]


def test_values_errors_and_flags_are_shared(two):
    found = two[1]
    assert found["shared"] == {"中文": 0}
    assert found["gathered"] == [["秩", 0], ["秩", 1]]
    assert found["by first"] == [0, "第一"]
    assert found["refused"] == "DataError: 坏 line 3"
    assert found["any"] == [True, False]
    assert found["largest"] == -3.0


def test_rows_that_each_rank_has_filled_in(two):
    assert two[0]["put together"] == [[0.0, 0.0], [11.0, 11.0]]
    assert two[0]["merged"] == {"0": "秩", "1": "秩"}
    assert two[0]["alone"] == [1, 5.0, [0, 1]]


def test_each_rank_has_random_numbers_of_its_own_where_it_asks_for_them(two):
    """And then all have the common ones again."""
    first, second = two[0]["streams"]
    assert len({tuple(numbers) for numbers in first + second}) == 4
    assert two[0]["common again"][0] == two[0]["common again"][1]


def test_memory_that_runs_out_while_ranks_ask_each_other_is_that_of_the_attempt(two):
    """It ran out on rank 1 only: both try again, with half of their four rows."""
    assert [found["rows at a time"] for found in two] == [2, 2]


def test_a_rank_that_differs_is_named(two):
    assert two[0]["differs"] == "ConfigError: rank 1 differs from rank 0 in data: e instead of d; copy it"
    assert two[0]["same"] is None
    assert two[0]["after"] == 1
