"""Ids, orders and draws that follow from content."""

import itertools
from collections import Counter

import pytest

from heedful import DataError
from heedful.apps.label import Candidate, item_id
from heedful.apps.label.records import draw, order_of, places_in, to_line, token_hash

CRITICAL = {1: 10.828, 5: 20.515, 9: 27.877}
"""Chi-square at p = 0.001, by degrees of freedom."""


def chi_square(values, kinds):
    counts = Counter(values)
    assert set(counts) <= set(kinds)
    expected = len(values) / len(kinds)
    return sum((counts[kind] - expected) ** 2 / expected for kind in kinds)


def test_an_id_never_changes():
    """Projects on the disk have them."""
    candidates = (Candidate("是\u2028"), Candidate({"role": "assistant", "content": "🐈"}))
    assert item_id("pair", "猫?", candidates) == "3506d9c2e80f7f44cef0"
    assert item_id("demonstration", [{"role": "user", "content": "猫?"}]) == "44b6b7bd89a665d4280c"


def test_an_id_is_of_task_prompt_and_responses():
    one = (Candidate("a"), Candidate("b"))
    reference = item_id("pair", "p", one)
    assert item_id("pair", "p", (Candidate("a", {"checkpoint": "x"}), Candidate("b"))) == reference
    others = [
        item_id("ranking", "p", one),
        item_id("pair", "q", one),
        item_id("pair", "p", (Candidate("a"), Candidate("b\u2028"))),
        item_id("pair", "p", (Candidate("a"), Candidate({"content": "b"}))),
    ]
    assert len({reference, *others}) == 5


def test_neither_the_order_of_the_responses_nor_that_of_keys_counts():
    one, other = {"role": "user", "content": "x"}, {"content": "x", "role": "user"}
    assert item_id("demonstration", [one]) == item_id("demonstration", [other])
    message = Candidate({"role": "assistant", "content": "猫\u2028"})
    for task, answers in (
        ("pair", (Candidate("b"), message)),
        ("ranking", (Candidate("b"), message, Candidate("a🙂"))),
    ):
        assert len({item_id(task, "p", order) for order in itertools.permutations(answers)}) == 1


def test_where_each_of_the_same_candidates_is():
    there = tuple(map(Candidate, ("猫", "a", "猫", "b\u2028")))
    theirs = tuple(Candidate(text, {"model": "m"}) for text in ("b\u2028", "猫", "a", "猫"))
    assert places_in(there, theirs) == [3, 0, 1, 2]


def test_left_and_right_are_uniform():
    """10,000 items, for each of two people, and what one sees says nothing about the other."""
    ids = [f"{i:020x}" for i in range(10_000)]
    first = [order_of(0, one, "p1", False, 2) for one in ids]
    second = [order_of(0, one, "p2", False, 2) for one in ids]
    again = [order_of(0, one, "p1", True, 2) for one in ids]
    orders = [(0, 1), (1, 0)]
    for seen in (first, second, again):
        assert chi_square(seen, orders) < CRITICAL[1]
    for other in (second, again):
        assert chi_square([a == b for a, b in zip(first, other, strict=True)], [True, False]) < CRITICAL[1]
    assert chi_square([a == b for a, b in itertools.pairwise(first)], [True, False]) < CRITICAL[1]


def test_every_order_of_a_ranking_is_as_likely():
    orders = [order_of(3, f"{i}", "p1", False, 3) for i in range(10_000)]
    assert chi_square(orders, list(itertools.permutations(range(3)))) < CRITICAL[5]


def test_an_order_stays():
    assert order_of(0, "item", "p1", False, 9) == order_of(0, "item", "p1", False, 9)
    assert "".join(str(order_of(0, "item", "p1", turn, 2)[0]) for turn in range(8)) == "00000101"


def test_draws_are_uniform():
    assert chi_square([int(draw(1, "repeat", "p", i) * 10) for i in range(10_000)], range(10)) < CRITICAL[9]


def test_what_json_cannot_hold_is_refused():
    values = (float("nan"), {"a": {1, 2}}, "half \ud83d", ["\udc08"], {"\ud800": 1})
    for value, fragment in zip(values, ("JSON", "set", *["surrogate"] * 3), strict=True):
        with pytest.raises(DataError, match=fragment):
            to_line(value)


def test_a_line_is_one_line():
    assert to_line({"b": "猫\n\u2028", "a": (1, None)}) == '{"b":"猫\\n\u2028","a":[1,null]}'


def test_any_text_has_a_hash():
    """Tokens come from outside, as anything."""
    assert len({token_hash(text) for text in ("", "猫", "\ud800", "a")}) == 4
