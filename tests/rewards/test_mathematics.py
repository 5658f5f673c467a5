"""verify:math: what is equal as mathematics, and what a computer algebra system cannot finish."""

import importlib.util

import pytest

from heedful.configs.scoring import RewardOptions
from heedful.errors import ConfigError
from heedful.rewards import Completion, Ensemble, score, score_tokens
from heedful.rewards.mathematics import same_mathematics
from heedful.rewards.resolve import check_reward_string, resolve_rewards
from heedful.types import Prompt

RIGHT = [
    ("1/2", "The answer is $0.5$."),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    (r"\frac{3}{4}", "so it is 3/4"),
    (r"$\sqrt{2}/2$", r"First $1$, then $\frac{1}{\sqrt2}$."),
    ("x^2+x", r"thus $x(x+1)$"),
    ("50%", "0.5"),
    ("$6$ boxes of 12\n#### 72", "It is 72 apples."),
    ("1,234", "1234"),
    (r"\{1,2\}", r"$\{2,1\}$"),
    ("12", "答案是 １２。"),
    ("-5", "答案是 −5。"),
    ("42", "<think>43</think>42"),
    (7, r"所以 \boxed{7}，不是 8"),
    ("10000000000000000000000", "$10^{22}$"),
]
WRONG = [
    ("42", "it is 43"),
    ("42", ""),
    ("42", "我不知道"),
    ("2/3", "0.6667"),
    ("42", "<think>42"),
    ("x^2+x", "$x^2-x$"),
]


@pytest.mark.parametrize(("answer", "response"), RIGHT)
def test_equal(answer, response):
    assert same_mathematics([response], answer=[answer]) == [1.0]
    assert same_mathematics([[{"role": "assistant", "content": response}]], answer=[answer]) == [1.0]


@pytest.mark.parametrize(("answer", "response"), WRONG)
def test_not_equal(answer, response):
    assert same_mathematics([response], answer=[answer]) == [0.0]


def test_a_record_without_an_answer_gets_no_score():
    assert same_mathematics(["1", "1"], answer=[None, 1]) == [None, 1.0]


def graded(*pairs):
    return [
        Completion(Prompt("算", f"d.jsonl:{i}", {"answer": answer}), text) for i, (answer, text) in enumerate(pairs)
    ]


def test_what_cannot_be_compared_is_a_failure_and_never_0(cpu):
    """In its process: a power that no memory holds, digits without end, a record without an answer. The others are scored."""
    (reward,) = resolve_rewards(["verify:math"], RewardOptions(), **cpu)
    pairs = (("7", "$9^{9^{9^{9}}}$"), ("7", "9" * 5000), (" ", "7"), ("7", "7"), ("7", "8"))
    found = score_tokens(Ensemble((reward,), max_failed=0.7), graded(*pairs))
    assert found.failed == (0, 1, 2)
    assert found.without_failed().totals == [1.0, 0.0]
    assert "took longer than 3 s to compare" in found.note
    assert score([reward], graded(("7", "7")))[0] == [1.0]


def test_the_limit_of_functions_holds_too(cpu):
    """What no alarm of its own ends, as nothing does within C, is ended with its process."""
    (reward,) = resolve_rewards(["verify:math"], RewardOptions(reward_timeout=2), **cpu)
    score([reward], graded(("7", "7")))  # which loads the library
    found = score_tokens(Ensemble((reward,), max_failed=0.7), graded(("7", "$9^{9^{9^{9}}}$"), ("7", "7")))
    assert found.failed == (0,)
    assert "did not end within 2 s and was stopped" in found.note


@pytest.mark.parametrize("name", ["maths", "", "math:x"])
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match=r"there is no verify:|is not a reward"):
        check_reward_string(f"verify:{name}")


def test_without_the_library_the_line_that_installs_it_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'verify:math needs math-verify: pip install "heedful\[math\]"'):
        check_reward_string("verify:math")
