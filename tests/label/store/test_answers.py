"""Which answers each task takes, and places on the screen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful import DataError
from heedful.apps.label import Candidate, Item
from heedful.apps.label.answers import check_answer, check_item, from_screen, to_screen

PAIR = {"preferred": 1, "strength": 2, "both_bad": False}
TURN = {
    "messages": [{"role": "user", "content": "你好"}],
    "responses": [{"response": "a", "source": {}}, {"response": "b", "source": {}}],
    **PAIR,
    "last": False,
}


def item(task, count):
    return Item("i", task, "p", tuple(Candidate(f"answer {k}") for k in range(count)))


COUNTS = {"pair": 2, "ranking": 4, "rating": 1, "demonstration": 0, "correction": 1, "chat": 0}
ITEMS = {task: item(task, count) for task, count in COUNTS.items()}


def test_places_and_candidates():
    """Candidate 2 is at the top, then 0, then 1."""
    assert from_screen({"ranks": [1, 2, 3]}, (2, 0, 1)) == {"ranks": [2, 3, 1]}
    assert to_screen({"ranks": [2, 3, 1]}, (2, 0, 1)) == {"ranks": [1, 2, 3]}
    assert from_screen(PAIR, (1, 0)) == {**PAIR, "preferred": 0}
    assert from_screen({**PAIR, "preferred": None}, (1, 0)) == {**PAIR, "preferred": None}
    assert from_screen({"text": "猫"}, ()) == {"text": "猫"}


@given(st.permutations(range(9)), st.lists(st.integers(1, 9), min_size=9, max_size=9), st.integers(0, 8))
def test_there_and_back(order, ranks, preferred):
    for answer in ({"ranks": ranks}, {"preferred": preferred, "strength": 1}):
        assert to_screen(from_screen(answer, order), order) == answer
        assert from_screen(to_screen(answer, order), order) == answer
    at_place = from_screen({"ranks": ranks}, order)["ranks"]
    assert [at_place[candidate] for candidate in order] == ranks
    assert from_screen({"preferred": preferred}, order) == {"preferred": order[preferred]}


def test_places_that_are_none():
    for answer, said in (
        *((value, "an object") for value in (None, "left")),
        *(({"preferred": value}, "preferred must be one of 0, 1") for value in (2, True, "0")),
        *(({"ranks": value}, "a list of 2 ranks") for value in ([1], 1)),
    ):
        with pytest.raises(DataError, match=said):
            from_screen(answer, (1, 0))


TAKEN = [
    ("pair", PAIR),
    ("pair", {"preferred": None, "strength": None, "both_bad": True}),
    ("pair", {"preferred": None, "strength": None, "both_bad": False}),
    ("ranking", {"ranks": [1, 1, 2, 4]}),
    ("rating", {"rating": 7, "flags": ["hallucination", "harmful-advice"]}),
    ("demonstration", {"text": "\u2028猫"}),
    ("correction", {"text": "answer 0."}),
    ("chat", TURN),
]


def test_answers_that_are_taken():
    assert [check_answer(ITEMS[task], answer) for task, answer in TAKEN] == [answer for _, answer in TAKEN]


REFUSED = [
    ("pair", [1], "an object"),
    ("pair", {"preferred": 1, "strength": 2}, "lacks 'both_bad'"),
    ("pair", {**PAIR, "model": "x"}, "no field 'model'"),
    ("pair", {**PAIR, "preferred": 2}, "preferred must be one of 0, 1"),
    ("pair", {**PAIR, "preferred": False}, "preferred must be"),
    ("pair", {**PAIR, "strength": 5}, "strength must be one of 1, 2, 3, 4"),
    ("pair", {**PAIR, "strength": None}, "strength must be"),
    ("pair", {**PAIR, "strength": 2.0}, "strength must be"),
    ("pair", {**PAIR, "preferred": None}, "null with a tie"),
    ("pair", {**PAIR, "both_bad": True}, "only allowed with a tie"),
    ("pair", {**PAIR, "both_bad": 0}, "true or false"),
    ("ranking", {"ranks": [1, 2, 3]}, "a list of 4"),
    ("ranking", {"ranks": [1, 2, 3, 5]}, "a rank must be"),
    ("ranking", {"ranks": [1, 2, 3, 0]}, "a rank must be"),
    ("ranking", {"ranks": [2, 2, 3, 4]}, "no answer has rank 1"),
    ("ranking", {"ranks": "1234"}, "a list of 4"),
    ("rating", {"rating": 0, "flags": []}, "rating must be"),
    ("rating", {"rating": 8, "flags": []}, "rating must be"),
    ("rating", {"rating": 5, "flags": ["unsafe"]}, "flags must be"),
    ("rating", {"rating": 5, "flags": ["hallucination"] * 2}, "at most once"),
    ("rating", {"rating": 5, "flags": [["x"]]}, "flags must be"),
    ("demonstration", {"text": " \n"}, "empty"),
    ("demonstration", {"text": None}, "a string"),
    ("correction", {"text": "answer 0"}, "equals the original answer"),
    ("chat", {**TURN, "messages": []}, "role user"),
    ("chat", {**TURN, "messages": [{"role": "assistant", "content": "x"}]}, "role user"),
    ("chat", {**TURN, "messages": ["你好"]}, "a list of messages"),
    ("chat", {**TURN, "responses": TURN["responses"][:1]}, "two objects"),
    ("chat", {**TURN, "responses": [{"response": "a"}] * 2}, "two objects"),
    ("chat", {**TURN, "last": None}, "last must be"),
    ("chat", {**TURN, "strength": 0}, "strength must be"),
]


def test_answers_that_are_refused():
    for task, answer, fragment in REFUSED:
        with pytest.raises(DataError, match=fragment):
            check_answer(ITEMS[task], answer)
    message = Item("i", "correction", "p", (Candidate({"role": "assistant", "content": "猫"}),))
    with pytest.raises(DataError, match="equals the original answer"):
        check_answer(message, {"text": "猫"})


def test_other_line_breaks_are_no_correction():
    """A browser's text field has one kind of them."""
    for was, sent in (("一\r\n二", "一\n二"), ("一\n二", "一\r\n二"), ("一\r二", "一\n二")):
        lines = Item("i", "correction", "p", (Candidate(was),))
        with pytest.raises(DataError, match="equals the original answer"):
            check_answer(lines, {"text": sent})
        assert check_answer(lines, {"text": f"{sent}。\r\n"}) == {"text": f"{sent}。\r\n"}


def test_the_strength_of_an_imported_preference_may_be_unknown():
    unknown = {**PAIR, "strength": None}
    assert check_answer(ITEMS["pair"], unknown, strength_known=False) == unknown
    with pytest.raises(DataError, match="strength"):
        check_answer(ITEMS["pair"], {**PAIR, "strength": 9}, strength_known=False)


WRONG_ITEMS = [
    (item("pair", 3), "a pair needs 2 answers, got 3"),
    (item("ranking", 1), "2 to 9"),
    (item("ranking", 10), "2 to 9"),
    (item("chat", 1), "0 answers"),
    (item("duel", 2), "task must be one of"),
    (Item("", "chat", "p"), "item_id"),
    (Item("i", "chat", "p", needed=0), "needed"),
    (Item("i", "chat", "p", needed=True), "needed"),
    (Item("i", "chat", "p", screening=True), "screening"),
]


def test_items_that_cannot_be_shown():
    for wrong, fragment in WRONG_ITEMS:
        with pytest.raises(DataError, match=fragment):
            check_item(wrong)
