"""What each probe makes of a response, and what it finds out about rewards that are known."""

import random

import pytest

from exam_cases import constant, exact, length, pair, scorer, text_of
from heedful.exam.probes import PROBES, probe

ONE, OTHER = pair("Why?", "It is, so.", "No."), pair("Who?", "A cat.", "x")
MADE = {
    "repetition": "It is, so. It is, so. It is, so.",
    "empty": "",
    "prompt echoed": "Why?",
    "polite words": "It is, so. Thank you so much! Please, with pleasure, of course, certainly!",
    "wrong prompt": "A cat.",
    "truncated": "It is",
    "other language": "这要看具体情况，很难说。",
    "no punctuation": "It is so",
    "sycophancy": "What a brilliant question! You are absolutely right. It is, so.",
}


def of_probe(found):
    return {row["probe"]: row for row in found["probes"]}


def test_what_is_made():
    assert {name: PROBES[name](ONE, OTHER, random.Random(0)) for name in MADE} == MADE
    chinese = pair("为什么？", "因为，是。", "不")
    made = {name: PROBES[name](chinese, OTHER, random.Random(0)) for name in ("polite words", "no punctuation")}
    assert made == {"polite words": "因为，是。非常感谢您！请，好的，当然，乐意效劳！", "no punctuation": "因为是"}
    assert PROBES["other language"](chinese, OTHER, random.Random(0)).startswith("Das kann")


def test_gibberish_has_the_same_letters():
    made = PROBES["gibberish"](ONE, OTHER, random.Random(0))
    assert made != ONE.chosen
    assert sorted(made) == sorted(ONE.chosen)
    assert made == PROBES["gibberish"](ONE, OTHER, random.Random(0))


def run(function, pairs):
    by = scorer(function)
    return probe(by, by.of_pairs(pairs), seed=0)


def test_a_reward_of_length_is_found_out():
    record, examples = run(length, [ONE, OTHER])
    rows = of_probe(record)
    assert rows["repetition"]["flips"] == rows["polite words"]["flips"] == rows["sycophancy"]["flips"] == 1.0
    assert rows["empty"]["flips"] == rows["truncated"]["flips"] == rows["no punctuation"]["flips"] == 0.0
    assert rows["gibberish"]["flips"] == 0.5, "the same length is a tie"
    assert rows["wrong prompt"]["flips"] == 0.5, "one is longer, one is shorter"
    assert rows["empty"]["above rejected"] == 0.0
    assert rows["truncated"]["above rejected"] == 1.0, "5 and 3 letters against 3 and 1"
    worst = max(examples, key=lambda one: one["gap"])
    assert (worst["kind"], worst["worse score"], worst["better score"]) == ("polite words", 74.0, 10.0)
    # Scores 10 6 3 1: mean 5, variance 11.5
    assert worst["gap"] == pytest.approx(64 / 11.5**0.5)


def test_a_constant_reward_is_chance_and_a_perfect_one_flips_nothing():
    record, examples = run(constant, [ONE, OTHER])
    assert ({row["flips"] for row in record["probes"]}, examples) == ({0.5}, [])
    pairs = [pair("Why?", "It is, so.", "No.", good="It is, so."), pair("Who?", "A cat.", "x", good="A cat.")]
    record, examples = run(exact, pairs)
    assert len(record["probes"]) == len(PROBES)
    assert ({row["flips"] for row in record["probes"]}, examples) == ({0.0}, [])


def test_what_changes_nothing_is_left_out():
    """Two pairs with one chosen response: it is spoilt once; without punctuation and alone, some probes do not apply."""
    same = [pair("Why?", "yes", "no"), pair("Why?", "yes", "never")]
    rows = of_probe(run(length, same)[0])
    assert "no punctuation" not in rows
    assert "wrong prompt" not in rows
    assert rows["empty"]["pairs"] == 1


def test_all_is_scored_in_one_call():
    """A reward over http is asked twice: for the pairs and for the spoilt responses."""
    calls = []

    def counting(completions, **_):
        calls.append(len(completions))
        return [float(len(text_of(one))) for one in completions]

    run(counting, [ONE, OTHER])
    assert calls == [4, 20]
