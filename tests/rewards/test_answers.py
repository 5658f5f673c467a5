"""Records' answers: read whole by every reward that compares with them, right against themselves, equal as mathematics."""

import importlib.util
import json
from decimal import Decimal

import pytest

from heedful import (
    ConfigError,
    DataError,
    GRPOConfig,
    Message,
    PassAtKConfig,
    Prompt,
    RewardError,
    evaluate_pass_at_k,
    load_rewards,
    train_grpo,
)
from heedful.configs.scoring import RewardOptions
from heedful.rewards import Completion, Ensemble, score, score_tokens
from heedful.rewards.own_answers import unmatched_answers
from heedful.rewards.resolve import check_reward_string, resolve_rewards
from refusals import refused

MATHEMATICS = [  # a record's answer, other right answers, and wrong ones: a part of it, another order, another sign
    ("1, 2", ["1, 2", "2, 1", r"1 \text{ and } 2", r"\{1, 2\}", "x=1, x=2"], ["2", "1", "1, -2", "1, 2, 3"]),
    ("-1, 3", ["3, -1", r"-1 \text{ or } 3"], ["3", "1, 3", "-3, 1"]),
    ("(3, 4)", ["(3,4)", r"\left(3, 4\right)"], ["(4, 3)", "4", "(3, -4)", "[3, 4]"]),
    ("2x", ["2x", r"2 \cdot x", "x+x"], ["2", "x", "-2x"]),
    ("x > 5", ["x>5", "5<x", r"(5, \infty)"], ["5", "x<5", r"x \geq 5"]),
    ("x=1 or x=2", ["x=1, x=2", "1, 2", r"x = 2 \text{ or } x = 1"], ["2", "x=1", "x=1, x=-2"]),
    ("x=1 或 x=2", ["x=1, x=2", "x=2 或 x=1"], ["2", "x=1", "x=1, x=-2"]),
    ("y=2x+1", ["y=2x+1", "2x+1", "y = 1 + 2x"], ["1", "y=2x-1", "2"]),
    ("100,000", ["100000", "100,000", "10^5", r"100\,000"], ["100", "0", "10000"]),
    ("6 - 5i", ["6-5i", "-5i+6"], ["5", "6+5i", "6"]),
    ("[0, 1)", ["[0,1)"], ["[0,1]", "1", "(0,1)"]),
    (r"(-\infty, 1) \cup (2, \infty)", [r"(2,\infty)\cup(-\infty,1)"], ["2", r"(2,\infty)", r"(-\infty,-1)\cup(2,\infty)"]),
    ("(0, infinity)", [r"(0,\infty)"], ["0", "(0,1)", r"[0,\infty)"]),
    ("{1, 2}", [r"\{2,1\}"], ["2", "1", r"\{1,-2\}"]),
    ("5 cm^2", ["5", r"5\text{ cm}^2"], ["25", "2", "6"]),
    ("60 km/h", ["60", r"60 \text{ km/h}"], ["-60", "6", "61"]),
    (r"$\frac{3}{4}$", ["3/4", "0.75"], ["-3/4", "4/3", "4"]),
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"],
        [r"\begin{pmatrix}2&1\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&-4\end{pmatrix}", "1"],
    ),
    ("1 2/3", ["5/3", r"1\frac{2}{3}"], ["1", "2/3", "-5/3"]),
    ("2*sqrt(3)", [r"2\sqrt{3}", r"\sqrt{12}"], ["2", r"\sqrt3", r"-2\sqrt3"]),
    ("x² + 1", ["x^2+1"], ["x", "x^2-1", "2"]),
    ("x^10", ["x^{10}"], ["x", "0", "10"]),
    ("10^-3", ["0.001", r"\frac{1}{1000}"], ["10", "1000", "-1000"]),
    ("1.5e3", ["1500"], ["1.5", "3", "15"]),
    ("3×10^4", ["30000"], ["3", "4", "10^4"]),
    ("2m", ["2m", r"m \cdot 2"], ["2", "m", "-2m"]),
    ("sin(x)", [r"\sin x", r"\sin(x)"], ["x", r"\cos x", r"-\sin x"]),
    ("x = 2, y = 3", ["y=3, x=2", r"x=2 \text{ and } y=3"], ["3", "x=3, y=2", "x=2"]),
    ("(-1, 3), (2, 5)", ["(2,5), (-1,3)"], ["5", "(-1,3)", "(1,3),(2,5)"]),
    ("答案是 1, 2", ["1, 2"], ["2", "1", "1,-2"]),
    ("1 和 2", ["1, 2", "2 和 1"], ["2", "1", "-1, 2"]),
    ("3 hours 20 minutes", [r"3 \text{ hours } 20 \text{ minutes}", "3 hours 20 minutes"], ["20", "3", "2 hours 20 minutes"]),
    ("3小时20分钟", ["3小时20分钟", r"3\text{小时}20\text{分钟}"], ["20", "3", "2小时20分钟"]),
    ("2 apples and 3 pears", ["2 apples and 3 pears"], ["3", "2", "3 apples and 2 pears"]),
    ("He has 3 + 4 = 7 apples", ["7"], ["3", "4", "-7"]),
    ("$x$ = 5", ["5", "x=5"], ["x", "-5", "y=5"]),
    ("($1$, $2$)", ["(1,2)"], ["2", "(2,1)", "1"]),
    ("$5", ["5"], ["-5", "50", "0"]),
    ("$1,234", ["1234"], ["234", "1", "-1234"]),
    ("no solution", [r"\text{no solution}", "No solution"], ["0", r"\text{solution}", r"\text{yes}"]),
    ("Paris", [r"\text{Paris}", "paris"], ["Pairs", r"\text{London}", "0"]),
    ("B", ["B", r"\text{B}", r"\textbf{(B)}"], ["C", "A", "2"]),
    ("甲", ["甲", r"\text{甲}"], ["乙", "1", "甲乙"]),
    ("±3", [r"\pm 3", "3, -3"], ["3", "-3", r"\pm 2"]),
    ("1 < x < 2", ["1<x<2", "(1,2)"], ["2", "x<2", "1<x<3"]),
    ("x <= 5", [r"x \leq 5", r"x \le 5", r"5 \geq x"], ["5", "x<5", r"x\geq 5"]),
    ("3:4", ["3:4", r"\frac34"], ["4", "4:3", "3"]),
    ("45°", ["45", r"45^\circ"], ["-45", "54", "4"]),
    (r"0.\overline{3}", [r"0.\overline{3}"], ["0.3", "3", r"0.\overline{6}"]),
    ("1,000, 2,000", ["1000, 2000"], ["2000", "1000", "0, 1, 2"]),
    ("12 of 20", ["12 of 20"], ["20", "12", "12 of 21"]),
    ("100 000", ["100000"], ["100", "0", "1000"]),
    (r"\langle 1, 2 \rangle", ["(1,2)", r"\langle 1,2\rangle"], ["1.2", "2", "(2,1)"]),
    ("f(x)=2x", ["2x", "f(x)=2x"], ["2", "f(x)=-2x", "x"]),
    ("AB = 5", ["AB=5", "5"], ["AB", "-5", "AC=5"]),
    ("n(n+1)/2", [r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"], ["2", "n(n-1)/2", "n"]),
    ("5!", ["120"], ["5", "24", "-120"]),
    ("5 million", ["5000000", r"5\text{ million}", r"5 \times 10^6"], ["5", "5000", "-5000000"]),
    ("3.5万", ["35000", "3.5万元", r"3.5\text{万}"], ["3.5", "350000", "3.5亿"]),
    ("1亿2000万", ["1亿2000万"], ["1", "20000000", "2000"]),
    ("5千克", ["5", "5千克"], ["5000", "-5", "6"]),
    ("x-y", ["-y+x", r"x - y"], ["y-x", "x", "x+y"]),
    ("√12", [r"2\sqrt{3}", r"\sqrt{12}"], ["2", r"\sqrt{1}", r"\sqrt{2}"]),
    ("10⁻³", ["0.001"], ["10", "1000", "-3"]),
    ("6.02×10²³", [r"6.02 \times 10^{23}"], ["6.02", "23", r"6.02 \times 10^{2}"]),
    ("1½", ["1.5", r"\frac{3}{2}"], ["1", "2", "0.5"]),
    ("5–7", ["5-7", "5–7"], ["-2", "4-6", "5"]),
    ("2024-03-15", ["2024-03-15"], ["2006", "2024-04-14", "15"]),
    ("3/4/2024", ["3/4/2024"], ["6/8/2024", "3/4", "2024"]),
    ("–5", ["-5", "−5"], ["5", "0", "-4"]),
    ("5 pm", ["5 pm", r"5\text{ pm}"], ["5 am", "7 pm", "-5"]),
    ("€5", ["5", "5€"], ["-5", "50", "0"]),
    ("1\u00a0234", ["1234", "1,234"], ["1", "234", "0"]),
    (r"5\,\text{cm}", ["5", "5~\\mathrm{cm}", r"\text{5 cm}"], ["-5", "50", "0"]),
    ("**答案：5**", ["5", "**5**"], ["-5", "50", "0"]),
    ("2**3 + x**2", ["8+x^2"], ["23+x^2", "8", "x^2"]),
    (r"\varnothing", [r"\emptyset", "∅"], ["0", r"\{0\}", "1"]),
    ("1/2, 1/3", [r"\frac13, \frac12", "0.5, 1/3"], ["1/3", "1/2", "1/2, -1/3"]),
    ("3x+2", ["3x+2", "2+3x"], ["3", "3x-2", "3x"]),
    ("3(x-2)", ["3(x-2)", "3x-6"], ["3", "3(x+2)", "x-2"]),
    ("5 m/s", ["5", r"5\text{ m/s}", "5 m/s"], ["-5", "6", "0"]),
    (r"\frac{1}{2}", ["0.5", "1/2", r"50\%"], ["-1/2", "2", "1"]),
    ("√2", [r"\sqrt{2}"], ["2", r"-\sqrt2", r"\sqrt3"]),
    ("1, 2, 3, 4, 5, 6, 7", ["7,6,5,4,3,2,1"], ["7", "1,2,3,4,5,6", "1,2,3,4,5,6,-7"]),
    ("2千米", ["2"], ["2000", "-2", "3"]),
    ("x^2-y^2", ["(x-y)(x+y)"], ["(x-y)(x-y)", "x", "y"]),
    ("2√10", [r"\sqrt{40}"], ["0", "2", r"2\sqrt{1}"]),
]  # fmt: skip


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
    ("42", "The answer needs 3 steps. First we add up all of the numbers in the list one by one; the total is $42$."),
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
    # A policy writes anything: a text of so many words has 2 ** 2000 readings.
    ("7", r"\boxed{word " + " " * 2000 + "+ 5 }"),
    ("7", r"\boxed{" + "is " * 2000 + "5 +}"),
    ("7", r"\boxed{" + "答案是 " * 1000 + "+5}"),
    ("7", r"\boxed{" + "1," * 2000 + "}"),
    ("7", r"\boxed{" + "." * 4000 + "}"),
]


@pytest.fixture(scope="module")
def rewards():
    """The rewards that compare with answers, by name."""
    return {name: load_rewards(name) for name in ("verify:math", "rule:exact_number", "rule:contains_expected")}


def column_of(reward):
    return "expected" if reward == "rule:contains_expected" else "answer"


def graded(reward, *pairs):
    """Responses to records with answers; every other one is a conversation."""
    prompts = ("几？", (Message("user", "几？"),))
    return [
        Completion(Prompt(prompts[i % 2], f"题.jsonl:{i}", {column_of(reward): answer}), response)
        for i, (answer, response) in enumerate(pairs, start=1)
    ]


def misjudged(rewards, reward, *cases):
    """Of cases (answer, response, score): those with another score, as in a run."""
    found = score(rewards[reward], graded(reward, *(case[:2] for case in cases)))[0]
    return [(*case, got) for case, got in zip(cases, found, strict=True) if got != pytest.approx(case[2], abs=0.024)]


def test_mathematics_reads_the_whole_answer(rewards):
    cases = []
    for answer, right, wrong in MATHEMATICS:
        cases += [(answer, rf"所以答案是 \boxed{{{one}}}。", 1.0) for one in [answer, *right]]
        cases += [(answer, rf"所以答案是 \boxed{{{one}}}。", 0.0) for one in wrong]
    assert misjudged(rewards, "verify:math", *cases) == []


def test_what_is_equal_as_mathematics(rewards):
    cases = [(*one, 1.0) for one in RIGHT] + [(*one, 0.0) for one in WRONG]
    assert misjudged(rewards, "verify:math", *cases) == []


LISTED = [
    ("verify:math", ["4", "5"], [r"\boxed{4}", r"\boxed{5}", r"\boxed{4, 5}", r"\boxed{45}"], [1, 1, 0, 0]),
    ("verify:math", ["1/2", r"\frac{2}{3}"], ["$0.5$", "$2/3$", "$3$"], [1, 1, 0]),
    ("verify:math", ["巴黎", "Paris"], [r"\boxed{Paris}", r"\boxed{\text{巴黎}}", r"\boxed{Pairs}"], [1, 1, 0]),
    ("verify:math", 4.0, [r"\boxed{4}", r"\boxed{40}"], [1, 0]),
    ("verify:math", True, [r"\boxed{\text{true}}", r"\boxed{1}"], [1, 0]),
    ("rule:exact_number", ["4", "5"], ["是 4", "是 5", "是 45", "没有"], [1, 1, 0, 0]),
    ("rule:exact_number", Decimal("1.50"), ["1.5", "1"], [1, 0]),
    ("rule:exact_number", [4, 5.5], ["4.0", "5.50", "5"], [1, 1, 0]),
    ("rule:exact_number", "x = 1,200 元", ["1200", "1"], [1, 0]),
    ("rule:exact_number", "5 million", ["5,000,000", "5", "5 million 元", "500万"], [1, 0, 1, 1]),
    ("rule:exact_number", "3.5万", ["35000", "3.5", "3.5万"], [1, 0, 1]),
    ("rule:exact_number", "#### **–5**", ["–5", "−5", "**-5**", "5"], [1, 1, 1, 0]),
    ("rule:exact_number", "48 - 2 * 3 = 42\n#### 42 cm^2", ["42", "2"], [1, 0]),
    ("rule:contains_expected", ["Paris", "paris city"], ["PARIS", "in paris, city", "伦敦"], [1, 1, -1]),
    ("rule:contains_expected", ["北京", 4.0], ["在北 京", "4个", "14个", "40", "4.5"], [1, 1, -1, -1, -1]),
    ("rule:contains_expected", "3.5", ["3.5米", "35", "13.5", "是3.5。"], [1, -1, -1, 1]),
    ("rule:contains_expected", "12345", ["1, 2, 3, 4, 5", "123456"], [1, -1]),
    ("rule:contains_expected", "4", ["-4", "是-4", "4", "3-4", "是４", "−4"], [-1, -1, 1, 1, 1, -1]),
    ("rule:contains_expected", "−4", ["是-4", "4"], [1, -1]),
    ("rule:contains_expected", "no", ["No.", "I know", "nothing", "说no的"], [1, -1, -1, 1]),
    ("rule:contains_expected", "B", ["(B)", "选B", "Ｂ", "Because", "A"], [1, 1, 1, -1, -1]),
    ("rule:contains_expected", "don't", ["Don’t!", "cafe"], [1, -1]),
    ("rule:contains_expected", "café", ["cafe\u0301", "CAFÉ", "cafés"], [1, 1, -1]),
    ("rule:contains_expected", "서울", ["서울입니다"], [1]),
]  # fmt: skip


def test_any_listed_answer_is_right(rewards):
    """`rule:contains_expected` takes up to 0.002 per character from them."""
    for reward, answer, responses, scores in LISTED:
        cases = [(answer, *one) for one in zip(responses, scores, strict=True)]
        assert misjudged(rewards, reward, *cases) == []
    hostile = [("a b. 5.5 是", response) for answer, response in WRONG if len(response) > 1000]
    assert max(score(rewards["rule:contains_expected"], graded("rule:contains_expected", *hostile))[0]) < -1


def test_what_cannot_be_compared_is_a_failure_and_never_0(tmp_path):
    """In its process: a power that no memory holds, digits without end, a record without an answer. The others are scored."""
    file = tmp_path / "快.py"  # with a limit of 1 s in place of 3
    file.write_text(
        "from heedful.rewards import mathematics\nmathematics.LONGEST = 1\nf = mathematics.same_mathematics\n"
    )
    (reward,) = load_rewards(f"python:{file}:f")
    pairs = (("7", "$9^{9^{9^{9}}}$"), ("7", "9" * 5000), (" ", "7"), ("7", "7"), ("7", "8"), (None, "8"))
    found = score_tokens(Ensemble((reward,), max_failed=0.7), graded("", *pairs))
    assert found.failed == (0, 1, 2, 5)
    assert found.without_failed().totals == [1.0, 0.0]
    assert "took longer than 1 s to compare" in found.note
    assert score([reward], graded("", ("7", "7")))[0] == [1.0]


@pytest.mark.exhaustive
def test_the_limit_of_functions_holds_too(cpu):
    """Below the seconds that a comparison may take, it ends the comparison with its process."""
    (reward,) = resolve_rewards(["verify:math"], RewardOptions(reward_timeout=2), **cpu)
    score([reward], graded("", ("7", "7")))  # which loads the library
    found = score_tokens(Ensemble((reward,), max_failed=0.7), graded("", ("7", "$9^{9^{9^{9}}}$"), ("7", "7")))
    assert found.failed == (0,)
    assert "did not end within 2 s and was stopped" in found.note


def test_other_names_are_refused_and_the_line_that_installs_the_library_is_said(monkeypatch):
    for string, said in (
        ("verify:maths", r"there is no verify:maths; did you mean verify:math\?"),
        ("verify:math:x", "there is no verify:math:x; .*there is verify:math$"),
        ("verify:", "'verify:' is not a reward; use model:PATH"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_reward_string(string)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'verify:math needs math-verify: pip install "heedful\[math\]"'):
        check_reward_string("verify:math")


UNMATCHED = {
    "verify:math": [
        ({"a": 1}, "is an object; it must be a text or a number, or a list of them"),
        ([], "is an empty list; leave the field out, or give null"),
        (["4", None], "is null in a list"),
        ([["4"]], "is a list in a list"),
        ("  ", "is an empty text; leave the field out, or give null"),
        (["4", ""], "is an empty text in a list"),
        ("He bought 12 apples and ate 3", "has words among its numbers or formulas"),
        ("除了 2 以外", "has words among its numbers or formulas"),
        ("at least 5", "has words among its numbers or formulas"),
        ("['4', '五']", "is a list as text; write it as a list"),
        ('["4"]', "is a list as text; write it as a list"),
        ("?!", "holds no number, no letter and no formula"),
        (r"\frac{1", "the response"),
    ],
    "rule:exact_number": [
        ([], "is an empty list"),
        ("1, 2", "is not one number alone; verify:math reads formulas and lists"),
        ("1/2", "is not one number alone"),
        ("2x", "is not one number alone"),
        ("48 / 2 = 24", "is not one number alone"),
        (["4", "四"], "contains no number"),
        (True, "contains no number"),
    ],
    "rule:contains_expected": [
        ([], "is an empty list"),
        ("。 !", "is nothing but spaces and punctuation"),
        ("很" * 1000, "the response"),
    ],
}


@pytest.mark.parametrize("reward", UNMATCHED)
def test_answers_that_no_response_can_match(rewards, reward):
    """They are found among others, and a score of such a record is a failure that says the same, never 0."""
    answers = [answer for answer, _ in UNMATCHED[reward]]
    fine = [3, None, ["4"], -2.5, *(f"{i}.50" for i in range(40))]
    if reward == "verify:math":
        fine += [answer for answer, _, _ in MATHEMATICS[:20]]
    prompts = [one.prompt for one in graded(reward, *((answer, "3") for answer in [*answers, *fine]))]
    found = {one.source: one for one in unmatched_answers(rewards[reward], prompts)}
    assert set(found) == {prompt.source for prompt in prompts[: len(answers)]}
    for prompt, (answer, why) in zip(prompts, UNMATCHED[reward], strict=False):
        one = found[prompt.source]
        assert one.reward == reward
        assert one.because.startswith(f"{column_of(reward)} {answer!r:.60}")
        assert why in one.because
        if why != "the response":
            with refused(RewardError, f"cannot read the record's {column_of(reward)} ", why, prompt.source):
                score(rewards[reward], [Completion(prompt, "3")])


SMALL = {"rollout_batch_size": 16, "minibatch_size": 16, "samples_per_prompt": 2, "steps": 1, "eval_fraction": 0}


@pytest.fixture
def settings(tiny, written):
    """``settings(reward, answer)`` are those of a command on eight prompts, the fifth of which has this answer."""

    def make(reward, answer, **more):
        records = [{"prompt": f"{i} 加 1？", column_of(reward): answer if i == 4 else i + 1} for i in range(8)]
        files = {"model": tiny("gpt2"), "data": written("题.jsonl", records)}
        return files | {"max_new_tokens": 4, "dtype": "float32", "device": "cpu"} | more

    return make


def test_a_run_does_not_start_with_such_an_answer(heedful, settings, tmp_path):
    """The doctor names it too, and a run that allows it fails on it."""
    given = settings("rule:exact_number", "1/2", rewards="rule:exact_number", output=tmp_path / "运行", **SMALL)
    refused = heedful("grpo", **given)
    assert refused.status == 2
    said = "own-answer: rule:exact_number scores no response as right for 1 answer in 8 records"
    assert f"ConfigError: {said}" in refused.message
    assert "题.jsonl:5: answer '1/2'" in refused.message
    assert "--allow own-answer begins all the same" in refused.message
    assert not (tmp_path / "运行").exists()
    outcome = heedful("doctor", "grpo", "--json", **given)
    assert outcome.status == 2
    (finding,) = [one for one in json.loads(outcome.out)["findings"] if one["check"] == "own-answer"]
    assert finding["level"] == "fail"
    assert "题.jsonl:5: answer '1/2' is not one number alone" in finding["evidence"]
    outcome = heedful("grpo", **given, allow="own-answer", max_failed_rewards=0)
    assert outcome.status == 4
    assert f"WARNING: {said}" in outcome.message
    assert "RewardError: reward rule:exact_number cannot read the record's answer '1/2'" in outcome.message


def test_measures_refuse_more_such_answers_than_may_fail(settings, capsys):
    def measured(most):
        given = settings("rule:exact_number", {"a": 1}, samples_per_prompt=2, k=(1,), max_failed_rewards=most)
        return evaluate_pass_at_k(PassAtKConfig(**given, rewards=("rule:exact_number",)))

    said = "rule:exact_number scores no response as right for 1 answer in 8 "
    with refused(DataError, said, "题.jsonl:5: answer"):
        measured(0.1)
    assert measured(0.2)["failed"] == 1
    assert f"WARNING: {said}" in capsys.readouterr().err


def test_messages_to_python_name_what_python_has(settings, tmp_path):
    said = r"^rewards: there is no rule 'exact_numbr'; did you mean rule:exact_number\?"
    with pytest.raises(ConfigError, match=said):
        load_rewards("rule:exact_numbr")
    config = GRPOConfig(**settings("verify:math", 1), output=tmp_path / "运行", reward_weights=(1.0, 2.0), **SMALL)
    with pytest.raises(ConfigError, match=r"^reward_weights has 2 numbers for 1 reward; give one for each"):
        train_grpo(config, rewards=[lambda completions: [1.0] * len(completions)])
    with pytest.raises(ConfigError, match=r"^--rewards is missing: .*; in Python, rewards= takes functions too"):
        train_grpo(config)
