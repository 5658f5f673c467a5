"""The rules, on values worked out by hand."""

import pytest

from heedful.rewards import Completion, Reward, score
from heedful.rewards.rules import RULES, WITH_ARGUMENT, contains_expected, digits
from heedful.types import Message, Prompt


@pytest.mark.parametrize(
    ("response", "expected", "length", "hit"),
    [
        ("4", "4", 1, True),
        ("答案是4。", "4", 4, True),
        ("答案是5。", "4", 4, False),
        ("", "4", 0, False),
        ("我叫通义千问！", "通义千问", 7, True),  # a full-width exclamation mark is a character like any other
        ("通 义，千\n问。", "通义千问", 4, True),
        ("I LIKE: machine-learning.", "I like machine-learning", 21, True),
        ("I like machine learning", "i LIKE machine learning.", 20, True),
        ("它说：“你好”", "你好", 6, True),  # curly quotes stay, the colon goes
        ("  'ok' ", "OK", 2, True),
        ("通义", "通义千问", 2, False),
        ("北京", "北京。", 2, True),
        ("\t一\t二 \n 三,四.五!六?七：八:九\"十'", "一二三四五六七八九十", 10, True),
        ("苹果" * 100, "苹果", 200, True),
    ],
)
def test_contains_expected(response, expected, length, hit):
    """1 or -1, minus 0.002 for each character that is left after normalisation."""
    (value,) = contains_expected([response], expected=[expected])
    assert value == pytest.approx((1 if hit else -1) - 0.002 * length, abs=1e-12)


def test_contains_expected_by_hand():
    assert contains_expected(["答案是4。", "不知道"], expected=["4", "4"]) == pytest.approx([0.992, -1.006], abs=1e-12)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("没有数字", -0.2),
        ("", -0.2),
        ("一二三", -0.2),
        ("1", 0.2),
        ("有3个苹果和12个梨", 0.4),
        ("2024年2月17日", 0.6),
        ("1 2 3 4", 0.8),
        ("1 2 3 4 5", 1.0),
        ("1 2 3 4 5 6", 1.0),
        ("1,2,3,4,5,6,7,8", 1.0),
        ("0", 0.2),
        ("007", 0.2),
        ("-5", 0.2),
        ("a1b", -0.2),
        ("abc123", -0.2),
        ("1st", -0.2),
        ("x_1", -0.2),
        ("a1b 2 c3", 0.2),
        ("第1。", 0.2),
        ("1\n2", 0.4),
        ("１２", -0.2),  # full-width digits are not ASCII
    ],
)
def test_digits(response, value):
    """min(0.2 n, 1) for n whole numbers, -0.2 for none; digits inside a word of letters are none."""
    assert digits([response]) == pytest.approx([value], abs=1e-12)


def test_rules_read_the_response_alone_in_conversations_too():
    """The prompt's numbers must not count: the seed scored prompt and response together."""
    turns = (Message("user", "从1数到5：1 2 3 4 5"),)
    completion = Completion(Prompt(turns, "d:1", {"expected": "12345"}), "好的，12345")
    assert score([Reward("r", RULES["digits"])], [completion])[0] == pytest.approx([0.2])
    assert score([Reward("r", RULES["contains_expected"])], [completion])[0] == pytest.approx([1 - 0.002 * 7])
    raw = Completion(Prompt("1 2 3 4 5", "d:2"), "没有")
    assert score([Reward("r", RULES["digits"])], [raw])[0] == [-0.2]


def test_the_rules_there_are():
    assert set(RULES) == {"contains_expected", "digits", "exact_number", "repetition"}
    assert set(WITH_ARGUMENT) == {"length", "regex", "repetition"}


def test_an_expected_text_that_is_nothing_but_punctuation_is_refused():
    """It would be contained in every response."""
    with pytest.raises(ValueError, match="nothing but spaces and punctuation"):
        RULES["contains_expected"](completions=["好"], expected=["。 !"])
