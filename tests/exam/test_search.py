"""The search finds what a reward loves, and best-of-n foretells what a judge will think of it."""

import random

import pytest

from exam_cases import constant, exact, length, pair, scorer, text_of
from heedful.exam.search import climb, edit_search, edited, foretold, pieces_of, policy_search
from heedful.rewards import Completion

SIZES = {"rounds": 4, "edits": 4, "seed": 0}


def exclamations(completions, **_):
    return [float(text_of(one).count("!")) for one in completions]


def brevity(completions, **_):
    return [-float(len(text_of(one))) for one in completions]


def twice(completions, **_):
    return [2.0 * len(text_of(one)) for one in completions]


def test_pieces_and_edits():
    assert pieces_of(["a cat, 猫！ "]) == [" ", " cat", " 猫", ",", "a", "！"]
    made = {edited("a b", ["x"], random.Random(seed)) for seed in range(30)}
    assert made == {" ba", "xa b", "ax b", "a bx"}, "a swap, and an insertion at three places"
    assert edited("", ["x"], random.Random(0)) == "x"


def test_a_climb_never_falls():
    by = scorer(exclamations)
    one = pair("q", "a b", "c")
    texts, best = climb(by, [one.prompt], ["a b"], [0.0], pieces=["!"], rounds=6, edits=8, draw=random.Random(0))
    assert best == [6.0]
    assert texts[0].count("!") == 6
    few = {"pieces": ["!"], "rounds": 2, "edits": 2, "draw": random.Random(0)}
    kept = climb(scorer(constant), [one.prompt], ["a b"], [1.0], **few)
    assert kept == (["a b"], [1.0]), "a tie is no rise"


def test_edits_raise_a_reward_of_length_and_not_a_perfect_one():
    pairs = [pair("q", "a b!", "c", good="a b!"), pair("r", "d e", "f!", good="d e")]
    by = scorer(length)
    record, examples = edit_search(by, by.of_pairs(pairs), [], prompts=8, **SIZES)
    assert record["raised"] == 1.0
    assert record["gain"] > 1
    assert [one["kind"] for one in examples] == ["edited"] * 2
    perfect = scorer(exact)
    record, examples = edit_search(perfect, perfect.of_pairs(pairs), [], prompts=8, **SIZES)
    assert (record["raised"], record["gain"], examples) == (0.0, 0.0, [])


def test_a_second_reward_does_not_love_what_the_first_does():
    """Found texts are longer: brevity likes them less, length likes them more, and for a constant all are ties."""

    pairs = [pair("q", "a b", "c"), pair("r", "d e", "f!")]
    by, others = scorer(exclamations), [scorer(one) for one in (brevity, length, constant)]
    found = edit_search(by, by.of_pairs(pairs), others, prompts=8, **SIZES)[0]["second_opinion"]
    shares = {row["reward"]: row["only this one"] for row in found}
    assert shares == {"brevity": 1.0, "length": 0.0, "constant": 0.5}


@pytest.fixture
def answered():
    """Two prompts with three answers each."""
    pairs = [pair("q", "yes!", "no"), pair("r", "aye!", "nay")]
    answers = [
        [Completion(pairs[0].prompt, text, list(text.encode())) for text in ("no", "yes!", "!!!")],
        [Completion(pairs[1].prompt, text, list(text.encode())) for text in ("aye", "nay!", "nay!!")],
    ]
    return pairs, answers


def test_the_search_under_the_policy(answered):
    """Means of 0 1 3 and 0 1 2, best 3 and 2, chosen 1 and 1; in units of 2."""
    record, examples = policy_search(scorer(exclamations), *answered, [scorer(brevity), scorer(constant)], 2.0, **SIZES)
    assert (record["prompts"], record["n"]) == (2, 3)
    assert record["answers"] == pytest.approx(((4 / 3 - 1) / 2 + (1 - 1) / 2) / 2)
    assert record["best of n"] == pytest.approx(((3 - 1) / 2 + (2 - 1) / 2) / 2)
    assert record["edited"] > record["best of n"]
    assert (record["best above chosen"], record["edited above chosen"]) == (1.0, 1.0)
    assert {one["kind"] for one in examples} == {"searched"}
    assert [len(one["worse"]) for one in examples] == [4, 6]
    opinions = [(row["reward"], row["only this one"]) for row in record["second_opinion"]]
    assert opinions == [("brevity", 0.75), ("constant", 0.5)], "as short as the chosen one, and longer"
    assert examples[0]["better"] == "yes!"


def test_best_of_n_is_foretold(answered):
    """The judge likes length: 2 4 3 and 3 4 5. The reward takes "!!!" (3) and "nay!!" (5); the judge itself 4 and 5."""
    record = foretold(scorer(exclamations), *answered, scorer(length))
    assert record["judge"] == "length"
    assert record["rise"] == pytest.approx((4 - 3.5) / (4.5 - 3.5))
    assert foretold(scorer(exclamations), *answered, scorer(twice))["rise"] == pytest.approx(0.5), "of any unit"
    assert [row["k"] for row in record["best_of"]] == [1, 2, 3]
    # Best of 2 of three: for q the pairs (no, yes!) 4, (no, !!!) 3, (yes!, !!!) 3; for r 4, 5, 5.
    assert record["best_of"][1]["judge_score"] == pytest.approx((10 / 3 + 14 / 3) / 2)


def test_a_reward_against_the_judge_falls(answered):
    record = foretold(scorer(brevity), *answered, scorer(length))
    assert record["rise"] == pytest.approx((2.5 - 3.5) / (4.5 - 3.5))
    assert record["peak"] == 1


def test_without_a_judge_it_is_likeness_to_the_chosen_response(answered):
    record = foretold(scorer(length), *answered, None)
    assert record["judge"].startswith("likeness")
    assert foretold(scorer(constant), *answered, scorer(constant))["rise"] == 0.0
    assert record["best_of"][-1]["judge_score"] > record["best_of"][0]["judge_score"]
