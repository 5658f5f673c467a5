"""What a round asks about: items with their columns and choice, and never a pair that was asked about before."""

from pathlib import Path

from heedful.configs.rounds import RoundConfig
from heedful.rounds.pairs import Choice, Pair, compared, item_of, new_pairs
from heedful.rounds.round import how_many

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


def test_a_round_that_asks_about_fewer_pairs_says_so():
    config = RoundConfig(project=Path("项目"), labels=300)
    assert how_many(config, asked=300, prompts=290) == "300 pairs are ready to be labelled"
    few = how_many(config, asked=195, prompts=290)
    assert few.startswith(
        "195 pairs are ready to be labelled, fewer than --labels 300: the 4 answers to each of 290 prompts"
    )
    assert "--pool 1.6 (or more prompts, if these are all)" in few  # 300 / 195, rounded up
