"""verify:math: what is equal as mathematics, and what a computer algebra system cannot finish."""

import importlib.util

import pytest

from heedful import ConfigError, Prompt
from heedful.configs.scoring import RewardOptions
from heedful.rewards import Completion, Ensemble, score, score_tokens
from heedful.rewards.mathematics import same_mathematics
from heedful.rewards.resolve import check_reward_string, resolve_rewards

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
    (
        "42",
        "The answer needs 3 steps. First we add up all of the numbers in the list one by one, and the total is $42$.",
    ),
    ("42", "The answer needs 3 steps, and the total is 42."),
    ("7", "The answer $5$ is of the first line; in all it is $7$, in 3 lines."),
    ("42", "答案需要3步：先把所有的数一个一个加起来，因此总数是$42$。"),
    ("1/2", "The final answer is 3 at first, 然后得到 \\(\\frac12\\)，共 2 步"),
    (r"\frac{1}{2}", "$$\n\\frac{1}{2}\n$$"),
    ("10", "She pays $5 and has $10 left."),
    ("6", "2 $ or, with the answer, 6 $ now"),
    (r"\{1,2\}", r"$x=5$，所以 $1$ 或 $2$"),
    (r"\{1,2\}", r"$\boxed{1}$ and $\boxed{2}$"),
    (r"\frac{\sqrt{3}}{2}", r"\boxed{1}, rather \boxed{\frac{\sqrt{3}}{2}}. The answer is 1."),
    ("3", r"\boxed{3}, or \boxed{4"),
    ("0.5", r"$\boxed{50}\%$"),
    (r"\{1,2\}", r"\boxed{\left\{1, 2\right\}}"),
]
WRONG = [
    ("42", "it is 43"),
    ("42", ""),
    ("42", "我不知道"),
    ("2/3", "0.6667"),
    ("42", "<think>42"),
    ("x^2+x", "$x^2-x$"),
    ("3", r"\boxed{3}, no: \boxed{\foo}"),
    ("3", "The answer is $3$ at first, but in the end, after all that was said before, it is $4$."),
    ("3", "答案是 3 吗？不对，因为还少了一个，所以最后的总数是 4"),
    ("5", "so $7$ in 5 steps"),
    ("7", r"$7$, 所以 \boxed{8}。The answer is 7"),
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


@pytest.mark.exhaustive
def test_the_limit_of_functions_holds_too(cpu):
    """What no alarm of its own ends, as nothing does within C, is ended with its process."""
    (reward,) = resolve_rewards(["verify:math"], RewardOptions(reward_timeout=5), **cpu)
    score([reward], graded(("7", "7")))  # which loads the library
    found = score_tokens(Ensemble((reward,), max_failed=0.7), graded(("7", "$9^{9^{9^{9}}}$"), ("7", "7")))
    assert found.failed == (0,)
    assert "did not end within 5 s and was stopped" in found.note


@pytest.mark.parametrize("name", ["maths", "", "math:x"])
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match=r"there is no verify:|is not a reward"):
        check_reward_string(f"verify:{name}")


def test_without_the_library_the_line_that_installs_it_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'verify:math needs math-verify: pip install "heedful\[math\]"'):
        check_reward_string("verify:math")
