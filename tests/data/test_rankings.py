"""Rankings to rows: best first, each response read once, and what contradicts itself named."""

import pytest

from heedful import DataError, Ranking
from heedful.data.chat import RewardInputs
from heedful.data.loading import best_first, encode_rankings
from heedful.models import byte_tokenizer

INPUTS = RewardInputs(byte_tokenizer())


def ranking(responses, ranks, *, line=1, prompt="问", **options):
    return Ranking(prompt, tuple(responses), tuple(ranks), f"排序.jsonl:{line}", **options)


def encode(*rankings, max_length=99, action="error", equal_pairs="error"):
    return encode_rankings(rankings, INPUTS, max_length=max_length, action=action, equal_pairs=equal_pairs)


def row(response, *, prompt="问", truncated=False):
    return INPUTS.encode(prompt, response, truncated=truncated)


def test_responses_are_sorted_and_ties_keep_their_order():
    """Ranks may be any integers, also some that no tensor could hold; only their order means anything."""
    sorted_ = best_first(ranking("甲乙丙丁", [7, -3, 10**30, 7]))
    assert sorted_.responses == ("乙", "甲", "丁", "丙")
    assert sorted_.ranks == (0, 1, 1, 2)


@pytest.mark.parametrize("truncated", [False, True])
def test_every_response_is_a_row(truncated):
    (one, two), counts = encode(
        ranking(["好", "坏", "中"], [0, 2, 1], truncated=truncated), ranking(["差", "优"], [1, 0], margin=0.5)
    )
    assert one.rows == tuple(row(text, truncated=truncated) for text in ("好", "中", "坏"))
    assert two.rows == (row("优"), row("差"))
    assert two.ranking.margin == 0.5
    assert counts == {"dropped_too_long": 0, "truncated": 0, "dropped_equal": 0}


def test_a_response_in_several_pairs_is_encoded_once():
    """One that is cut off, or answers another prompt, is another."""
    same, other = ranking(["好", "坏"], [0, 1]), ranking(["中", "好"], [1, 0])
    asked, cut = ranking(["好", "坏"], [0, 1], prompt="答"), ranking(["好", "坏"], [0, 1], truncated=True)
    (one, two, three, four), _ = encode(same, other, asked, cut)
    assert one.rows[0] is two.rows[0]
    assert three.rows[0] == row("好", prompt="答") != one.rows[0]
    assert four.rows[0] == row("好", truncated=True) != one.rows[0]


def test_a_ranking_is_too_long_where_one_of_its_responses_is():
    """ "p" and the responses make 3, 8 and 4 tokens with the end."""
    items = ranking(["a", "bcdefg", "cd"], [0, 1, 2], prompt="p"), ranking(["a", "b"], [0, 1], prompt="p", line=2)
    with pytest.raises(DataError, match=r"1 of 2 rankings are longer than 6 tokens: 排序.jsonl:1 \(8 tokens\)"):
        encode(*items, max_length=6)
    (kept,), counts = encode(*items, max_length=6, action="drop")
    assert (kept.ranking.source, counts["dropped_too_long"]) == ("排序.jsonl:2", 1)
    (cut, _), counts = encode(*items, max_length=6, action="truncate")
    assert [len(r["input_ids"]) for r in cut.rows] == [3, 6, 4]
    assert cut.rows[1]["input_ids"] == row("bcdefg", prompt="p")["input_ids"][:6]
    assert counts == {"dropped_too_long": 0, "truncated": 1, "dropped_equal": 0}


def test_a_ranking_that_prefers_a_response_to_an_equal_one():
    items = ranking(["同", "异", "同"], [0, 1, 2], line=4), ranking(["a", "b", "c"], [0, 1, 2], line=5)
    with pytest.raises(DataError, match=r"^1 of 2 rankings prefer a response to an equal one: 排序.jsonl:4\. Fix"):
        encode(*items)
    (kept,), counts = encode(*items, equal_pairs="drop")
    assert (kept.ranking.source, counts["dropped_equal"]) == ("排序.jsonl:5", 1)


def test_equal_responses_may_tie():
    (one,), counts = encode(ranking(["同", "异", "同"], [0, 1, 0]))
    assert one.ranking.responses == ("同", "同", "异")
    assert not any(counts.values())


def test_responses_that_are_equal_only_after_truncation():
    item = ranking(["abcdX", "abcdY", "e"], [0, 1, 2], prompt="p")
    with pytest.raises(DataError, match="1 of 1 rankings prefer a response to an equal one after truncation"):
        encode(item, max_length=5, action="truncate")
    assert encode(item)[1]["dropped_equal"] == 0


def test_what_has_pairs():
    (one,), _ = encode(ranking(["a", "b", "c"], [0, 1, 1]))
    (tied,), _ = encode(ranking(["a", "b"], [1, 1]))
    assert (one.has_pairs, tied.has_pairs) == (True, False)
