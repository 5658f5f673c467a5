"""Choosing pairs: the disagreement by hand and its invariances, the random share, no prompt twice too early, no bias, and
never a pair that was asked about before."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.rounds.pairs import Choice, Pair, choose, compared, different_pairs, disagreement, item_of, new_pairs

FINITE = st.floats(-50, 50)


def test_disagreement_by_hand():
    """Differences of answers 0 and 2 are 2, 4 and 6: mean 4, squared deviations 4, 0, 4, so sqrt(8 / 3)."""
    scores = [[3.0, 9.0, 1.0], [4.0, 9.0, 0.0], [5.0, 9.0, -1.0]]
    assert disagreement(scores, Pair(0, 2)) == pytest.approx(math.sqrt(8 / 3))
    assert disagreement(scores[:1], Pair(0, 2)) == 0, "one model cannot disagree"


@given(st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=1, max_size=5), FINITE)
def test_disagreement_ignores_constants_and_sides(scores, constant):
    shifted = [tuple(x + constant * (m + 1) for x in member) for m, member in enumerate(scores)]
    value = disagreement(scores, Pair(0, 1))
    assert disagreement(shifted, Pair(0, 1)) == pytest.approx(value, abs=1e-9)
    assert disagreement(scores, Pair(1, 0)) == pytest.approx(value)
    doubled = [tuple(2 * x for x in member) for member in scores]
    assert disagreement(doubled, Pair(0, 1)) == pytest.approx(2 * value)


def test_equal_texts_are_no_pair():
    assert different_pairs(["是", " 是\n", "否", "🦊"]) == [Pair(0, 2), Pair(0, 3), Pair(2, 3)], "each text once"
    assert different_pairs(["是"]) == []


POOL = [[Pair(0, 1), Pair(0, 2), Pair(1, 2)] for _ in range(40)]
DISAGREEMENTS = [[prompt + 0.1 * at for at in range(3)] for prompt in range(40)]


def test_a_share_is_random_and_the_rest_is_what_models_disagree_about_most():
    chosen = choose(POOL, 20, "种子", disagreements=DISAGREEMENTS, random_share=0.3)
    by = Counter(choice.chosen_by for choice in chosen)
    assert by == {"random": 6, "active": 14}
    random_ones = {choice.prompt for choice in chosen if choice.chosen_by == "random"}
    best = [prompt for prompt in reversed(range(40)) if prompt not in random_ones][:14]
    active = [choice for choice in chosen if choice.chosen_by == "active"]
    assert sorted(choice.prompt for choice in active) == sorted(best)
    assert all(choice.pair == Pair(1, 2) for choice in active), "each prompt's most disagreed pair"
    assert all(
        choice.disagreement == DISAGREEMENTS[c.prompt][POOL[0].index(c.pair)] for choice in chosen for c in [choice]
    )


@given(st.integers(0, 60), st.floats(0.2, 1), st.integers(0, 5))
def test_numbers_hold_for_every_share(number, share, seed):
    pairs = [[Pair(0, 1)] * (prompt % 2) + [Pair(1, 2)] for prompt in range(20)]  # 30 pairs in all
    values = [[float(prompt)] * len(own) for prompt, own in enumerate(pairs)]
    chosen = choose(pairs, number, str(seed), disagreements=values, random_share=share)
    assert len(chosen) == min(number, 30)
    assert len({(choice.prompt, choice.pair) for choice in chosen}) == len(chosen)
    random_ones = sum(choice.chosen_by == "random" for choice in chosen)
    assert share * len(chosen) <= random_ones + 1e-6 < share * len(chosen) + 1.001
    per_prompt = Counter(choice.prompt for choice in chosen)
    assert len(per_prompt) == min(len(chosen), 20), "no prompt twice before each has one"


def test_without_an_ensemble_all_are_random():
    """And the seed fixes the choice."""
    chosen = choose(POOL, 40, "a")
    assert {(choice.chosen_by, choice.disagreement) for choice in chosen} == {("random", None)}
    assert sorted(choice.prompt for choice in chosen) == list(range(40))
    assert choose([], 3, "a") == []
    first, again, other = (choose(POOL, 20, s, disagreements=DISAGREEMENTS, random_share=0.5) for s in "aab")
    assert first == again != other


def test_what_is_drawn_at_random_does_not_look_at_disagreements():
    """Over 300 seeds each of 40 prompts is drawn about as often as any other: chi-square, 39 degrees, p > 0.001."""
    drawn = Counter(
        choice.prompt
        for seed in range(300)
        for choice in choose(POOL, 20, str(seed), disagreements=DISAGREEMENTS, random_share=0.2)
        if choice.chosen_by == "random"
    )
    expected = sum(drawn.values()) / 40
    assert sum((drawn[prompt] - expected) ** 2 / expected for prompt in range(40)) < 72.1


def test_of_a_prompt_any_pair_is_drawn():
    """Chi-square, 2 degrees, p > 0.001, over the 40 prompts of 30 seeds."""
    drawn = Counter(choice.pair for seed in range(30) for choice in choose(POOL, 40, str(seed)))
    assert sum((drawn[pair] - 400) ** 2 / 400 for pair in POOL[0]) < 13.8


def test_active_ones_come_in_no_order():
    """Whoever stops labelling after half of them has seen both kinds."""
    chosen = choose(POOL, 40, "a", disagreements=DISAGREEMENTS, random_share=0.5)
    half = Counter(choice.chosen_by for choice in chosen[:20])
    assert min(half["random"], half["active"]) >= 5


ROW = {
    "prompt": "猫？",
    "responses": [
        {"response": text, "source": {"checkpoint": "甲", "seed": at}} for at, text in enumerate("喵🦊\u2028汪")
    ],
    "难度": 3,
}


def test_an_item_keeps_columns_sources_and_how_it_was_chosen():
    item = item_of(ROW, Choice(0, Pair(0, 3), "active", 0.25), 2)
    assert [candidate.response for candidate in item.candidates] == ["喵", "汪"]
    assert [candidate.source["seed"] for candidate in item.candidates] == [0, 3]
    assert (item.task, item.prompt, item.round, item.chosen_by) == ("pair", "猫？", 2, "active")
    assert item.columns == {"难度": 3, "disagreement": 0.25}
    assert item_of(ROW, Choice(0, Pair(0, 3), "random", None), 1).columns == {"难度": 3}


def test_no_pair_is_asked_about_twice():
    every = new_pairs(ROW, set())
    assert every == [Pair(0, 1), Pair(0, 2), Pair(0, 3), Pair(1, 2), Pair(1, 3), Pair(2, 3)]
    for asked in (Pair(0, 2), Pair(2, 0)):  # in whatever order
        earlier = compared(item_of(ROW, Choice(0, asked, "random", None), 1))
        assert new_pairs(ROW, earlier) == [pair for pair in every if pair != Pair(0, 2)]
        assert new_pairs(ROW | {"prompt": "狗？"}, earlier) == every
