"""The rules, on values worked out by hand."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful import ConfigError, Message, Prompt, Reward, RewardError
from heedful.rewards import Completion, score
from heedful.rewards.resolve import check_reward_string
from heedful.rewards.rules import RULES, contains_expected, digits, exact_number, final_number, make_rule
from refusals import refused


def test_contains_expected():
    """1 or -1, minus 0.002 for each character that is left after normalisation; a record's gap: the rule does not apply."""
    for response, expected, length, hit in [
        ("4", "4", 1, True),
        ("答案是4。", "4", 4, True),
        ("答案是5。", "4", 4, False),
        ("我叫通义千问！", "通义千问", 6, True),
        ("通 义，千\n问。", "通义千问", 4, True),
        ("I LIKE: machine-learning.", "I like machine-learning", 21, True),
        ("它说：“你好”", "你好", 4, True),
        ("通义", "通义千问", 2, False),
        ("\t一\t二 \n 三,四.五!六?七：八:九\"十'", "一二三四五六七八九十", 10, True),
        ("苹果" * 100, "苹果", 200, True),
        ("42", 42, 2, True),
        ("41", 42, 2, False),
    ]:
        (value,) = contains_expected([response], expected=[expected])
        assert value == pytest.approx((1 if hit else -1) - 0.002 * length, abs=1e-12), response
    assert contains_expected(["随便"], expected=[None]) == [None]
    (problem,) = RULES["contains_expected"](completions=["好"], expected=["。 !"])  # contained in every response
    assert "nothing but spaces and punctuation" in problem


DIGITS = {
    "": -0.2, "一二三": -0.2, "有3个苹果和12个梨": 0.4, "2024年2月17日": 0.6, "1 2 3 4 5": 1.0, "1 2 3 4 5 6": 1.0,
    "007": 0.2, "-5": 0.2, "a1b": -0.2, "x_1": -0.2, "a1b 2 c3": 0.2, "第1。": 0.2, "１２": -0.2,
}  # fmt: skip


def test_digits():
    """min(0.2 n, 1) for n whole numbers in ASCII, -0.2 for none; digits inside a word of letters are none."""
    assert dict(zip(DIGITS, digits([*DIGITS]), strict=True)) == pytest.approx(DIGITS, abs=1e-12)


def test_rules_read_the_response_alone_in_conversations_too():
    """The prompt's numbers must not count: the seed scored prompt and response together."""
    turns = (Message("user", "从1数到5：1 2 3 4 5"),)
    completion = Completion(Prompt(turns, "d:1", {"expected": "12345"}), "好的，12345")
    assert score([Reward("r", RULES["digits"])], [completion])[0] == pytest.approx([0.2])
    assert score([Reward("r", RULES["contains_expected"])], [completion])[0] == pytest.approx([1 - 0.002 * 7])
    raw = Completion(Prompt("1 2 3 4 5", "d:2"), "没有")
    assert score([Reward("r", RULES["digits"])], [raw])[0] == [-0.2]


def scored(spec, *responses, **columns):
    """Scores of responses by a rule's string, through the interface that trainers use."""
    completions = [
        Completion(Prompt("问", f"d:{i}", {name: values[i] for name, values in columns.items()}), response)
        for i, response in enumerate(responses)
    ]
    return score([Reward(spec, make_rule(spec))], completions)[0]


def test_regex():
    """Found anywhere; whatever follows the second colon is the pattern, colons included."""
    for pattern, hit, miss in [
        (r"^好的", "好的，没问题", "ok 好的"),
        (r"\d{4}年", "在2024年", "在24年"),
        (r"(?s)<think>.+</think>", "<think>一\n二</think>三", "<think></think>"),
        (r"a:b", "xa:by", "ab"),
        ("x", "x", "X"),
    ]:
        assert scored(f"regex:{pattern}", hit, miss, "") == [1.0, 0.0, 0.0]


def test_length():
    """Characters, not bytes: 字 is one."""
    for window, by_length in [
        ("4-10", {0: 0.0, 1: 0.25, 3: 0.75, 4: 1.0, 7: 1.0, 10: 1.0, 15: 0.5, 20: 0.0, 25: 0.0}),
        ("0-2", {0: 1.0, 2: 1.0, 3: 0.5, 4: 0.0}),
        ("5-5", {4: 0.8, 5: 1.0, 6: 0.8}),
    ]:
        assert scored(f"length:{window}", *("字" * n for n in by_length)) == pytest.approx(list(by_length.values()))


NUMBERS = {
    "The answer is 42.": "42", "答案是42。": "42", "答案是-42": "-42", "答案是−4.50元": "-4.5", "共１２，３个": "3",
    "共１２３个": "123",
    "1,234,567.89 dollars": "1234567.89", "$1,000": "1000", "-$5": "-5", "¥3.50": "3.5", "\\$12": "12", "1,23": "23",
    "12,3456": "3456", "10-3=7": "7", "pages 10-12": "12", "(3)-5": "5", "x = -5": "-5", "+5": "5", "50%": "50",
    ".5": "0.5", "0.50": "0.5", "3.": "3", "1.5e3": "1500", "2 eggs": "2", "first 3 then 4 and then": "4",
    "so 5\n#### 18": "18", "#### 18 because 3 * 6 = 18 and not 20": "18", "#### 1\n#### 2\nend 3": "2", "####": None,
    "#### none, 7": "7", "10 #### x": "10", "\\boxed{42} and 43 more": "42", "\\boxed{1} \\boxed{2} 3": "2",
    "\\boxed{\\text{about } 1{,}000\\,km}": "1000", "\\boxed{x} 9": "9", "The area is 25 cm^2.": "25",
    "面积是 \\boxed{25\\text{ cm}^{2}}": "25", "\\boxed{\\frac{1}{2}}": "0.5", "\\boxed{-1\\dfrac34}": "-1.75",
    "that is 1 1/2": "1.5", "1/0": None, "born 3/4/2024": "2024", "2 \\times 10^{5} 人": "200000", "10^-3": "0.001",
    "so \\boxed{2^{10}}": None, "5 million": "5000000", "1.2 亿元": "120000000", "5千克": "5", "2百分点": "2", "–5": "-5",
    "pages 10–12": "12", "1\u202f234": "1234", "no number": None, "一百": None, "": None,
}  # fmt: skip
"""Texts and their final number: a full-width comma separates numbers; 1,23 has no thousands."""


def test_final_number():
    wanted = {text: None if value is None else Decimal(value) for text, value in NUMBERS.items()}
    assert {text: final_number(text) for text in NUMBERS} == wanted


@given(number=st.decimals(-(10**9), 10**9, places=2, allow_nan=False), before=st.sampled_from(["", "所以", "= ", "so $"]),
       after=st.sampled_from(["", ".", "。", " 元", "%", "\n"]))  # fmt: skip
def test_every_spelling_of_a_number_is_that_number(number, before, after):
    sign = "-" if number < 0 else ""
    for digits_ in (f"{abs(number):f}", f"{abs(number):,f}"):
        text = f"7 {sign}{before}{digits_}" if before == "so $" else f"7 {before}{sign}{digits_}"
        assert final_number(f"{text}{after}") == (abs(number) if before == "so $" else number)


def test_exact_number():
    """GSM8K's answers end in '#### 18'; a number in the data is one too; a record without an answer has no score."""
    gsm = "Janet sells 16 - 3 - 4 = 9 eggs.\nShe makes 9 * 2 = $18.\n#### 18"
    answers = [gsm, gsm, 3.5, -7, "1,200", "答：约 12 米"]
    responses = ["她每天赚18美元。", "17", "\\boxed{3.50}，不是7", "-7.0", "1200.00", "12"]
    assert scored("exact_number", *responses, answer=answers) == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert exact_number(["1", "1"], answer=[None, "1"]) == [None, 1.0]
    assert scored("exact_number", "没有数字", answer=["1"]) == [0.0]
    with pytest.raises(RewardError, match=r"the record's answer '不知道': it contains no number; .*d:1"):
        scored("exact_number", "1", "1", answer=["1", "不知道"])


def test_repetition():
    """Minus the share of n-grams that stood there before."""
    for spec, text, value in [
        ("repetition:2", "a b a b a b", -(1 - 2 / 5)),
        ("repetition:1", "the cat and the dog", -(1 - 4 / 5)),
        ("repetition", "one two three one two three", -(1 - 3 / 4)),
        ("repetition:3", "one two three one two three", -(1 - 3 / 4)),
        ("repetition:4", "one two three one two three", 0.0),
        ("repetition:2", "好好好好", -(1 - 1 / 3)),
        ("repetition:2", "我们学习，我们生活", -(1 - 7 / 8)),
        ("repetition:1", "你好 你好", -(1 - 2 / 4)),  # with a space in it, Chinese still goes by characters
        ("repetition:1", "用 Python 写 Python 。 。", -(1 - 4 / 6)),
        ("repetition:1", "no! no! no!", -(1 - 2 / 6)),
        ("repetition:3", "!!!!!!", -(1 - 1 / 4)),
        ("repetition:2", "abababab", -(1 - 2 / 7)),  # without a space: by characters
        ("repetition:3", "ab", 0.0),
        ("repetition", "", 0.0),
        ("repetition", " \n ", 0.0),
    ]:
        assert scored(spec, text) == pytest.approx([value], abs=1e-12), (spec, text)


def test_a_wrong_argument_is_told_before_anything_loads():
    for spec, *fragments in [
        ("regex", "rule:regex:PATTERN", "missing"),
        ("regex:", "rule:regex:PATTERN", "missing"),
        ("regex:(好", "rule:regex:PATTERN", "unterminated subpattern"),
        ("length", "rule:length:MIN-MAX", "20-200"),
        ("length:5", "rule:length:MIN-MAX", "'5'"),
        ("length:9-5", "at least the first", "'9-5'"),
        ("length:0-0", "above 0"),
        ("length:-5-9", "'-5-9'"),
        ("repetition:", "rule:repetition:N", "above 0"),
        ("repetition:0", "rule:repetition:N", "above 0", "'0'"),
        ("digits:3", "rule:digits takes no argument", "'3'"),
        ("regexp:x", "no rule 'regexp'", "did you mean rule:regex?", "regex:PATTERN", "length:MIN-MAX", "exact_number"),
        *((spec, "rule:json:KEY,KEY: names of keys") for spec in ("json:", "json:name,", "json:,")),
    ]:
        with refused(ConfigError, "--rewards", *fragments):
            check_reward_string(f"rule:{spec}")


def test_no_column_takes_the_place_of_an_argument():
    """A data file may have a column of any name, such as those that the rules use themselves."""
    columns = {"pattern": ["z"], "n": [9], "shortest": [9], "longest": [9]}
    assert scored("regex:好", "好", **columns) == [1.0]
    assert scored("length:1-2", "好", **columns) == [1.0]
    assert scored("repetition:1", "好好", **columns) == [-0.5]


def test_valid_json():
    for response, is_json, has_keys in [
        ('{"name": "猫", "legs": 4}', 1.0, 1.0),
        (' {"legs": 4, "name": null, "more": []}\n', 1.0, 1.0),
        ('{"name": "猫"}', 1.0, 0.0),
        ('[{"name": "猫", "legs": 4}]', 1.0, 0.0),
        ("3", 1.0, 0.0),
        ('"name, legs"', 1.0, 0.0),
        ("", 0.0, 0.0),
        ("{'name': 1, 'legs': 4}", 0.0, 0.0),
        ('{"name": 1, "legs": NaN}', 0.0, 0.0),
        ('Here: {"name": 1, "legs": 4}', 0.0, 0.0),
        ('```json\n{"name": 1, "legs": 4}\n```', 0.0, 0.0),
        ('{"name": 1, "legs": 4} {}', 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
    ]:
        chat = [{"role": "assistant", "content": response}]
        assert make_rule("json")(completions=[response, chat]) == [is_json, is_json]
        assert make_rule("json:name, legs")(completions=[response]) == [has_keys]


@pytest.mark.parametrize("spec", ["contains_expected", "digits", "exact_number", "json", "length:1-2"])
def test_the_answer_is_judged_without_its_thinking(spec):
    """Also where the thought would pass; a thought without an end is an empty answer."""

    def judged(text):
        completions = [text, [{"role": "assistant", "content": text}]]
        one, other = make_rule(spec)(completions=completions, expected=["4", "4"], answer=["4", "4"])
        assert one == other
        return one

    for thought in ("4", "5 或 6，很长很长的思考", ""):
        assert judged(f"<think>\n{thought}\n</think>\n\n4") == judged("4")
        assert judged(f"<think>\n{thought}") == judged("")
    assert judged("4") != judged("")


def test_form_and_repetition_are_judged_of_all_that_was_written():
    """A format that asks for thinking must see it, and a thought may loop too."""
    text = "<think>\n想 想 想 想 想 想\n</think>\n\n四"
    assert make_rule("regex:</think>")(completions=[text]) == [1.0]
    assert make_rule("repetition:1")(completions=[text])[0] < make_rule("repetition:1")(completions=["四"])[0]
