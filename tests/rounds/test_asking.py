"""What a round asks about: items with their columns and choice, and never a pair that was asked about before."""

from pathlib import Path

import pytest

from heedful.configs.rounds import RoundConfig
from heedful.rounds.active import Choice, Pair
from heedful.rounds.asking import _new_pairs, compared, how_many, item_of

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
    every = _new_pairs(ROW, set())
    assert every == [Pair(0, 1), Pair(0, 2), Pair(0, 3), Pair(1, 2), Pair(1, 3), Pair(2, 3)]
    for asked in (Pair(0, 2), Pair(2, 0)):  # in whatever order
        earlier = compared(item_of(ROW, Choice(0, asked, "random", None), 1))
        assert _new_pairs(ROW, earlier) == [pair for pair in every if pair != Pair(0, 2)]
        assert _new_pairs(ROW | {"prompt": "狗？"}, earlier) == every


@pytest.mark.parametrize(
    ("asked", "prompts", "said"),
    [
        (300, 300, None),
        (195, 300, "For more in the next round: --pool 1.6 (answers to more prompts), a higher --answers"),
        (195, 250, "For more in the next round: more prompts, a higher --answers"),  # all prompts there are
    ],
)
def test_a_round_that_asks_about_fewer_pairs_says_so(asked, prompts, said):
    message = how_many(RoundConfig(project=Path("项目"), labels=300), asked, prompts)
    assert message.startswith(f"{asked} pairs are ready to be labelled")
    if said is None:
        assert message == "300 pairs are ready to be labelled"
    else:
        assert f"fewer than --labels 300: the 4 answers to each of {prompts} prompts" in message
        assert said in message
