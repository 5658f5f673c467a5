"""Splits by prompt: a prompt is on one side, whatever the data around it."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful import ConfigError, DataError, Demonstration, Message, Prompt, Ranking
from heedful.data import prompt_key, split_by_prompt
from refusals import refused

SYSTEM = Message("system", "你是一个礼貌的助手。")


def user(text):
    return (Message("user", text),)


def as_prompt(text):
    return Prompt(text, "a.jsonl:1")


TEXTS = [f"问题 {i}" for i in range(200)]


def test_golden_sides():
    """Written out, so that no release moves a prompt.

    `printf %s 'prompt 14' | sha256sum` begins with 11fb; those of 15 and 19 with 14fc and 0b54; the other 37 of these
    with more than 1999 (0.1).
    """
    train, held_out = split_by_prompt([as_prompt(f"prompt {i}") for i in range(40)], 0.1)
    assert [item.prompt for item in held_out] == ["prompt 14", "prompt 15", "prompt 19"]
    assert len(train) == 37


def test_the_key_of_a_prompt_is_its_first_question():
    """A later turn holds the earlier ones as its context, so they may not fall on different sides."""
    assert prompt_key("你好") == prompt_key(user("你好")) == prompt_key((SYSTEM, *user("你好"))) == "你好"
    turns = (*user("a"), Message("assistant", "b"), Message("user", "c"))
    tool = Message("tool", "x")
    assert prompt_key((SYSTEM, *turns)) == prompt_key(turns) == prompt_key((tool, *user("a"))) == "a"
    assert len({prompt_key(p) for p in ["ab", "a", "", user("b"), user("ba"), (tool, *user("c"))]}) == 6


KINDS = [
    lambda text: Prompt(text, "p"),
    lambda text: Prompt(user(text), "p"),
    lambda text: Demonstration((SYSTEM, *user(text)), f"answer to {text}", "d"),
    lambda text: Ranking(user(text), ("good", "bad"), (0, 1), "r"),
]


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1),
    fraction=st.floats(0.1, 0.9),
    seed=st.integers(),
)
def test_the_side_depends_on_the_prompt_alone(texts, fraction, seed):
    """Every kind of record, in any order, as raw text or as a conversation, in any company: the same side."""
    items = [kind(text) for text in texts for kind in KINDS]
    random.Random(seed).shuffle(items)
    # With 200 prompts more, neither side is empty at these fractions.
    train, held_out = split_by_prompt([*items, *map(as_prompt, TEXTS)], fraction)
    held_out_keys = {prompt_key(item.prompt) for item in held_out}
    assert held_out_keys.isdisjoint(prompt_key(item.prompt) for item in train)
    company = [as_prompt(f"company {i}") for i in range(200)]
    for text in texts:
        alone = split_by_prompt([as_prompt(text), *company], fraction)[1]
        assert (as_prompt(text) in alone) == (text in held_out_keys)


def test_order_is_kept_and_nothing_is_lost():
    items = [as_prompt(text) for text in TEXTS]
    train, held_out = split_by_prompt(items, 0.3)
    assert sorted(train + held_out, key=items.index) == items
    assert train == sorted(train, key=items.index)
    assert held_out == sorted(held_out, key=items.index)


def test_a_larger_fraction_only_adds_to_eval():
    items = [as_prompt(f"提示 {i}") for i in range(2000)]
    sides = [{item.prompt for item in split_by_prompt(items, fraction)[1]} for fraction in (0.05, 0.2, 0.5, 0.9)]
    assert all(small < large for small, large in itertools.pairwise(sides))
    # Binomial with n = 2000: four standard deviations are 0.02, 0.036, 0.045 and 0.027.
    assert [len(side) / 2000 for side in sides] == pytest.approx([0.05, 0.2, 0.5, 0.9], abs=0.045)


def test_rankings_without_a_prompt_are_split_by_their_first_response():
    """As a plain text or a prompt of that string: a text is on one side wherever it is met."""
    pairs = [Ranking("", (text, "worse"), (0, 1), "r") for text in TEXTS]
    ranked = [Ranking("", (text, "better", "best"), (2, 1, 0), "r") for text in TEXTS]
    texts = [Demonstration("", text, "d") for text in TEXTS]
    expected = [p.prompt for p in split_by_prompt(map(as_prompt, TEXTS), 0.5)[1]]
    assert 80 < len(expected) < 120
    for rankings in (pairs, ranked):
        train, held_out = split_by_prompt([*rankings, *texts], 0.5)
        assert [item.responses[0] for item in held_out if isinstance(item, Ranking)] == expected
        assert [item.response for item in held_out if isinstance(item, Demonstration)] == expected
        assert len(train) + len(held_out) == 2 * len(TEXTS)
    together = [Ranking("same", (text, "worse"), (0, 1), "r") for text in TEXTS]  # with a prompt, by that
    train, held_out = split_by_prompt([*together, *map(as_prompt, TEXTS)], 0.5)
    assert sum(isinstance(item, Ranking) for item in train) in (0, len(TEXTS))


def test_fraction_zero_holds_nothing_out():
    items = [as_prompt("only one")]
    assert split_by_prompt(items, 0) == (items, [])
    assert split_by_prompt([], 0) == ([], [])


def test_an_empty_side_is_an_error():
    for fraction in (-0.1, 1, float("nan")):
        with pytest.raises(ConfigError, match=f"--eval-fraction is {fraction}; it must be at least 0 and less than 1"):
            split_by_prompt([as_prompt("a")], fraction)
    for fraction, train, held_out in ((1e-9, 6, 0), (1 - 1e-9, 0, 6)):
        items = [as_prompt(text) for text in TEXTS[:3]] * 2
        said = f"--eval-fraction {fraction} leaves {train} records to train on and {held_out} to evaluate on"
        with refused(
            DataError, said, "the data have 3 different prompts", "Give more prompts, another --eval-fraction"
        ):
            split_by_prompt(items, fraction)
