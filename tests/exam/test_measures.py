"""Every statistic of an exam against numbers by hand."""

import math

import pytest

from exam_cases import pair
from heedful.core import share_interval
from heedful.exam import measures
from heedful.exam.inputs import ScoredPairs


@pytest.fixture
def four():
    """Four pairs of three prompts with margins 2, -1, 0 and 3."""
    pairs = [pair("甲", "aaaa", "aa"), pair("甲", "b", "bb"), pair("乙", "cc", "dd"), pair("丙", "eeeeee", "eee")]
    return ScoredPairs(pairs, [4.0, 1.0, 2.0, 6.0], [2.0, 2.0, 2.0, 3.0])


def test_accuracy(four):
    """Two of four margins are above 0; 0 is not right; the two pairs of one prompt are one group."""
    found = measures.accuracy(four)
    assert (found["accuracy"], found["pairs"], found["prompts"], found["ties"]) == (0.5, 4, 3, 1)
    assert found["interval_95"] == share_interval([[1.0, 0.0], [0.0], [1.0]])


def test_calibration(four):
    """sigmoid(2) = 0.881, sigmoid(1) = 0.731 and wrong, 1/2 and half right, sigmoid(3) = 0.953."""
    found = measures.calibration(four)
    sure = [1 / (1 + math.exp(-margin)) for margin in (0.0, 1.0, 2.0, 3.0)]
    rows = [(row["pairs"], row["mean confidence"], row["right"]) for row in found["reliability"]]
    assert rows == [pytest.approx((1, of, right)) for of, right in zip(sure, (0.5, 0, 1, 1), strict=True)]
    bins = ["0.50 to 0.55", "0.70 to 0.75", "0.85 to 0.90", "0.95 to 1.00"]
    assert [row["confidence"] for row in found["reliability"]] == bins
    assert found["ece"] == pytest.approx((0 + sure[1] + (1 - sure[2]) + (1 - sure[3])) / 4)


def test_margins(four):
    """Sorted -1, 0, 2, 3: the median lies between 0 and 2. Scores 4 1 2 6 2 2 2 3: mean 2.75, variance 2.1875."""
    found = measures.margins(four)
    assert (found["50 %"], found["mean"]) == (1.0, 1.0)
    assert found["5 %"] == pytest.approx(-0.85)
    assert found["scale"] == pytest.approx(2.1875**0.5)
    assert ScoredPairs(four.pairs[:1], [1.0], [1.0]).scale == 1.0, "the unit of a constant reward"
    assert measures.margins(ScoredPairs(four.pairs[:1], [3.0], [1.0]))["95 %"] == 2.0, "of one pair"


def test_length(four):
    found = measures.by_length(four)
    rows = [(row["lengths"], row["pairs"], row["accuracy"]) for row in found["buckets"]]
    assert rows == [("chosen is shorter", 1, 0.0), ("similar", 1, 0.0), ("chosen is longer", 2, 1.0)]
    assert found["length_correlation"] == 1.0, "the scores are the lengths"
    assert measures.by_length(ScoredPairs(four.pairs, [1.0] * 4, [1.0] * 4))["length_correlation"] is None


def test_the_longer_one(four):
    """It is right on two, wrong on one and undecided on one; of three pairs with an order on both sides all are the same."""
    longer = measures.baselines(four, 0)["baselines"][0]
    assert (longer["its accuracy"], longer["the reward's"]) == (2.5 / 4, 2.5 / 4)
    assert longer["same order"] == 1.0
    reverse = measures.baselines(ScoredPairs(four.pairs, four.rejected, four.chosen), 0)["baselines"][0]
    assert (reverse["the reward's"], reverse["same order"]) == (1.5 / 4, 0.0)


def test_a_tie_of_either_has_no_order():
    """Of the reward, of the lengths, of the reward where the longer one is rejected: beside a pair of the same order and one
    of the other, it changes nothing."""
    for texts, margin in ((("长答案", "短"), 0.0), (("甲乙", "丙丁"), 1.0), (("甲", "乙丙"), 0.0)):
        pairs = [pair("一", "aaa", "a"), pair("二", "b", "bbb"), pair("三", *texts)]
        longer = measures.baselines(ScoredPairs(pairs, [1.0, 1.0, margin], [0.0, 0.0, 0.0]), 0)["baselines"][0]
        assert (longer["pairs"], longer["same order"]) == (3, 0.5)
        only = measures.baselines(ScoredPairs(pairs[2:], [margin], [0.0]), 0)["baselines"][0]
        assert only["same order"] is None


def test_a_bag_of_words_learns_words_and_forgets_order():
    """It is fitted on other prompts than it is tested on; 好 is a word of its own."""
    train = [pair("a", "good cat", "bad cat"), pair("b", "好的", "坏的")]
    test = [
        pair("c", "a good dog", "a bad dog"),
        pair("d", "好", "坏"),
        pair("e", "cat", "dog"),
        pair("f", "x y", "y x"),
    ]
    good, chinese, unknown, order = measures.bag_of_words(train, test)
    assert good > 0.5
    assert chinese > 0.5
    assert (unknown, order) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6))
    # w(bad) = -w(good), and at the minimum -sigmoid(-2 w) / 2 + 0.01 w = 0.
    weight = good / 2
    assert weight == pytest.approx(1 / (1 + math.exp(2 * weight)) / 2 / 0.01, abs=1e-3)


def test_the_bag_of_words_is_tested_on_the_other_half():
    pairs = [pair(f"第{i}问", "good", "bad") for i in range(6)]
    row = measures.baselines(ScoredPairs(pairs, [1.0] * 6, [0.0] * 6), 0)["baselines"][1]
    assert (row["pairs"], row["its accuracy"], row["same order"]) == (3, 1.0, 1.0)
    alone = ScoredPairs([pair("甲", "a", "b")], [1.0], [0.0])
    assert len(measures.baselines(alone, 0)["baselines"]) == 1, "one prompt has no two halves"


def test_ensemble(four):
    """Margins 2 -1 0 3 against 2 1 1 -3: the same, another, a tie against an order (one half), another order."""
    other = ScoredPairs(four.pairs, [2.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 3.0])
    row = measures.ensemble(four, [("zweite", other)])["members"][0]
    assert (row["reward"], row["its accuracy"]) == ("zweite", 0.75)
    assert row["other order"] == (0 + 1 + 0.5 + 1) / 4
    x, y = (2, -1, 0, 3), (2, 1, 1, -3)
    covariance = sum((a - 1) * (b - 0.25) for a, b in zip(x, y, strict=True))
    assert row["correlation"] == pytest.approx(covariance / (10 * 14.75) ** 0.5)
    same = ScoredPairs(four.pairs, [1.0] * 4, [1.0] * 4)
    assert measures.ensemble(four, [("c", same)])["members"][0]["correlation"] is None


def test_chrf():
    """ "abc" against "abd": 2 of 3 letters, 1 of 2 bigrams, no trigram, on both sides: 7/18. Spaces do not count."""
    assert measures.chrf("abc", "abd") == pytest.approx(7 / 18)
    assert measures.chrf("a bc", "ab d") == pytest.approx(7 / 18)
    assert measures.chrf("ab", "abab") == pytest.approx(5 * 1 * (5 / 12) / (4 * 1 + 5 / 12))
    assert measures.chrf("大猫", "大猫") == 1.0
    assert (measures.chrf("", "a"), measures.chrf("", " "), measures.chrf("x", "a")) == (0.0, 1.0, 0.0)
