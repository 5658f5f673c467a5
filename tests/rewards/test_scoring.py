"""What a reward function is given and may return, one score or one per token; several rewards and one score."""

import functools
import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful import ConfigError, Message, Prompt, Reward, RewardError
from heedful.configs.scoring import RewardOptions
from heedful.rewards import Completion, Ensemble, score, score_tokens
from heedful.rewards.resolve import load_rewards
from heedful.rewards.scoring import combine_scores, shares
from heedful.types import MicroBatch, ToolCall
from refusals import refused


def totals(function, completions):
    return score([Reward("f", function)], completions)[0]


def seen_by(completions, *names):
    """What a function that names these arguments is called with."""
    seen = {}
    source = f"def function({', '.join(names)}):\n    seen.update(locals())\n    return [0.0] * {len(completions)}\n"
    scope = {"seen": seen}
    exec(source, scope)
    totals(scope["function"], completions)
    return {name.removeprefix("**"): seen[name.removeprefix("**")] for name in names}


def test_raw_text_arrives_as_strings(completions):
    """The completion is whole, thinking and answer are apart. A response that was cut off in its thought has no answer."""
    texts = ["<think>\n一加一\n</think>\n\n等于2。", "<think>\n红", "你好"]
    thoughtful = [replace(c, response=text) for c, text in zip(completions, texts, strict=True)]
    wanted = {
        "prompts": ["一加一等于几？", "苹果是什么颜色？", "say hi"],
        "completions": texts,
        "completion_ids": [[1, 2], [2, 3], [3, 4]],
        "truncated": [False, False, True],
        "expected": ["2。", "红色", "你好"],
        "难度": [1, 2, 3],
        "thinking_parts": ["一加一", "红", None],
        "answer_parts": ["等于2。", None, "你好"],
    }
    assert seen_by(thoughtful, *wanted) == wanted


def test_a_conversation_arrives_as_messages():
    """TRL's convention: functions written for its GRPO read completion[0]["content"]. Tools and their calls are in the format
    of Hugging Face's templates, with the tools in the first message."""
    tools = [{"type": "function", "function": {"name": "加", "parameters": {}}}]
    turns = (
        Message("user", "1+1?", tools=json.dumps(tools)),
        Message("assistant", "", thinking="算", tool_calls=(ToolCall("加", '{"x": 1}', "c1"),)),
        Message("tool", "2", name="加", tool_call_id="c1"),
    )
    calls = [{"type": "function", "function": {"name": "加", "arguments": {"x": 1}}, "id": "c1"}]
    seen = seen_by([Completion(Prompt(turns, "d:1"), "二")], "prompts", "completions")
    assert seen["completions"] == [[{"role": "assistant", "content": "二"}]]
    assert seen["prompts"] == [
        [
            {"role": "user", "content": "1+1?", "tools": tools},
            {"role": "assistant", "content": "", "reasoning_content": "算", "tool_calls": calls},
            {"role": "tool", "content": "2", "name": "加", "tool_call_id": "c1"},
        ]
    ]


def test_only_what_is_named_is_given_and_kwargs_take_the_rest(completions):
    seen = seen_by(completions, "completions", "**kwargs")
    parts = {"thinking_parts", "answer_parts"}
    assert set(seen["kwargs"]) == {"prompts", "completion_ids", "truncated", "expected", "难度", "weights"} | parts
    assert totals(lambda expected: [len(e) for e in expected], completions) == [2.0, 2.0, 2.0]
    assert totals(lambda: [1, 2, 3], completions) == [1.0, 2.0, 3.0]


def test_a_column_that_some_records_lack_is_none_there(completions):
    mixed = [completions[0], Completion(Prompt("无", "数据.jsonl:9"), "答")]
    assert totals(lambda expected: [0.0 if e is None else 1.0 for e in expected], mixed) == [1.0, 0.0]


def test_defaults_stand_where_there_is_no_such_column(completions):
    def function(completions, weight=2.5, *, expected="none", weights=()):
        assert expected == ["2。", "红色", "你好"]
        return [weight * d for d in weights]

    assert totals(function, completions) == [2.5, 5.0, 7.5]


def test_a_column_cannot_replace_what_was_sampled():
    """A data file may well have a column called completions; which of the two a reward means would be a guess."""
    for name in ("prompts", "completions", "completion_ids", "truncated", "thinking_parts", "answer_parts"):
        with pytest.raises(RewardError, match=f"column '{name}'.*rename it"):
            totals(lambda completions: [1.0], [Completion(Prompt("问", "d:1", {name: "旧"}), "新")])


class Length:
    """A callable object, as a function with settings is written."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, completions, **_):
        return [self.weight * len(c) for c in completions]

    def score(self, completions):
        return self(completions)


def weighted(weight, completions, offset=0.0):
    return [weight * len(c) + offset for c in completions]


def test_anything_that_can_be_called(completions):
    for function in (
        Length(0.5),
        Length(0.5).score,
        functools.partial(weighted, 0.5),
        functools.partial(weighted, weight=0.5, offset=0.0),
        functools.wraps(Length(0.5).score)(Length(0.5)),
    ):
        assert totals(function, completions) == [2.0, 1.0, 1.0]


def test_numbers_of_every_kind(completions):
    """A reward model's own code returns tensors, numpy code arrays: both are numbers to us."""
    for result in (
        (1.0, 0.0, -2.0),
        [np.float64(1), np.int64(0), np.float32(-2)],
        [np.array(1.0), np.array([0.0]), np.array([[-2.0]])],
        np.array([1, 0, -2], dtype=np.int32),
        np.array([[1.0], [0.0], [-2.0]]),
        [torch.tensor(1.0), torch.tensor([0.0]), torch.tensor(-2)],
        torch.tensor([1.0, 0.0, -2.0], dtype=torch.bfloat16),
        torch.tensor([1.0, 0.0, -2.0], requires_grad=True),
        torch.tensor([[1.0], [0.0], [-2.0]]),
        [True, False, Fraction(-4, 2)],
        [np.bool_(True), np.bool_(False), -2],
    ):
        scores = totals(lambda result=result: result, completions)
        assert scores == [1.0, 0.0, -2.0]
        assert all(type(s) is float for s in scores)


def test_no_reward_applies(completions):
    with refused(RewardError, "甲, 乙", "None", "苹果是什么颜色？", "数据.jsonl:2", "红色"):
        score([Reward("甲", lambda: [1.0, None, 1.0]), Reward("乙", lambda: [1.0, None, 1.0])], completions)


@pytest.mark.parametrize(
    "value",
    [math.nan, -math.inf, "1.0", [1.0], {}, 10**400, np.array([1.0, 2.0, 3.0]), torch.tensor(math.nan), torch.ones(2, 2),
     [1.0, None], ["1", "2"]],
    ids=lambda v: f"{type(v).__name__}-{v!s:.12}",
)  # fmt: skip
def test_something_that_is_no_finite_number(completions, value):
    """The function is named, and of the samples the one it failed on, with its file and line."""
    reward = Reward("我的奖励", lambda completions: [value if c == "红色" else 1.0 for c in completions])
    with refused(RewardError, "我的奖励", "one finite number", "苹果是什么颜色？", "数据.jsonl:2", "红色") as error:
        score([reward], completions)
    assert "数据.jsonl:1" not in str(error.value)


def test_the_wrong_number_of_scores_or_no_list(completions):
    """A set would give the scores in no order, a dictionary its keys."""
    for result, said in (
        ([], "0 scores for 3 responses"),
        ([1.0] * 4, "4 scores for 3 responses"),
        (None, "None"),
        (torch.tensor(1.0), "Tensor"),
        ("abc", "str"),
        ((1.0 for _ in range(3)), "generator"),
        ({0: 1.0, 1: 2.0, 2: 3.0}, "dict"),
        ({1.0, 2.0, 3.0}, "set"),
    ):
        with refused(RewardError, "reward f returned", said, "一加一等于几？", "数据.jsonl:1"):
            totals(lambda result=result: result, completions)


def test_a_function_that_raises(completions):
    """It is called once with the whole batch; which sample it was is found by calling it again, one at a time."""

    def function(completions):
        return [1.0 / (len(c) - 2) if c == "红色" else 1.0 for c in completions]

    with refused(RewardError, "reward f raised ZeroDivisionError", "苹果是什么颜色？", "数据.jsonl:2", "红色") as error:
        totals(function, completions)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_missing_column_names_those_there_are(completions):
    with refused(
        RewardError, "reward f", "columns answer, hint", "expected, weights, 难度", "--columns", "数据.jsonl:1"
    ):
        totals(lambda completions, answer, hint: [1.0] * len(completions), completions)


def test_a_failure_where_only_some_records_have_the_column(completions):
    """The function's own error and the sample that it failed on, not "needs the column" within "raised"."""
    without = Completion(Prompt("没有答案", "数据.jsonl:9", {}), "四")

    def function(completions, expected):
        return [len(e) for e in expected]

    for order in ([without, *completions], [*completions, without]):
        with refused(RewardError, "reward f raised TypeError", "数据.jsonl:9") as error:
            score([Reward("f", function)], order)
        assert str(error.value).count("reward f") == 1
        assert "needs the column" not in str(error.value)
        assert not isinstance(error.value.__cause__, RewardError)


SCORES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6)
WAYS = ("sum", "mean", "min", "mean-std")


def test_golden_combinations():
    deviation = math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 3)
    found = [combine_scores([1.0, 2.0, 6.0], how) for how in WAYS]
    assert found == pytest.approx([9.0, 3.0, 1.0, 3.0 - deviation], rel=1e-12)


@given(scores=SCORES)
def test_shares_give_back_the_combination(scores):
    """What the shares leave out (the deviation) is no part of any reward."""
    for how in ("sum", "mean", "min"):
        total = sum(share * s for share, s in zip(shares(scores, how), scores, strict=True))
        assert total == pytest.approx(combine_scores(scores, how), rel=1e-9, abs=1e-6)
    assert shares(scores, "mean-std") == shares(scores, "mean")


def first(completions):
    return [1.0, 2.0, None]


def second(completions):
    return [3.0, None, -4.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0 + 3.0, 2.0, -4.0]),
        ({"reward_weights": (2.0, -0.5)}, [2 * 1.0 - 0.5 * 3.0, 2 * 2.0, -0.5 * -4.0]),
        ({"reward_weights": (0.0, 1.0)}, [3.0, 0.0, -4.0]),
        ({"reward_combine": "mean"}, [2.0, 2.0, -4.0]),
        ({"reward_combine": "mean", "reward_weights": (3.0, 1.0)}, [3.0, 6.0, -4.0]),
        ({"reward_combine": "min", "reward_weights": (4.0, 1.0)}, [3.0, 8.0, -4.0]),
        ({"reward_combine": "mean-std"}, [2.0 - 1.0, 2.0, -4.0]),
    ],
    ids=str,
)
def test_scores_by_hand(completions, cpu, options, expected):
    """None is left out of every combination; the mean of each reward is told as the reward gave it, without its weight."""
    rewards = load_rewards([first, second], RewardOptions(**options), micro_batch=MicroBatch(8), **cpu)
    scores, means = score(rewards, completions)
    assert scores == pytest.approx(expected, abs=1e-12)
    assert means == {"first": 1.5, "second": -0.5}


def test_a_reward_may_bring_its_weight(completions, cpu):
    rewards = load_rewards([Reward("a", first, 2.0), second], RewardOptions(), **cpu)
    assert score(rewards, completions)[0] == [2 * 1.0 + 3.0, 4.0, -4.0]
    twice = load_rewards([Reward("a", first, 2.0)] * 2, RewardOptions(), **cpu)
    assert [(reward.name, reward.weight) for reward in twice] == [("a", 2.0), ("a#2", 2.0)]


@pytest.mark.parametrize(
    ("wanted", "options", "message"),
    [
        ([], {"reward_weights": (1.0,)}, "--rewards is missing: model:PATH.* python:FILE.py:FUNCTION.* rule:NAME.* http://"),
        ([first], {"reward_weights": (1.0, 2.0)}, "^reward_weights has 2 numbers for 1 reward; give one for each"),
        ([first, "rule:digits"], {"reward_weights": (1.0,)}, "^reward_weights has 1 number for 2 rewards"),
        ([first, Reward("我的", second, 3.0)], {"reward_weights": (1.0, 2.0)}, "^reward_weights gives a weight to 我的"),
        ([Reward("我的", first, math.nan)], {}, "weight of reward 我的 must be a finite number, got nan"),
        *(([first], {"reward_combine": how}, f"^reward_combine {how} .*there is only one; add more") for how in WAYS[1:]),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_rewards(cpu, wanted, options, message):
    with pytest.raises(ConfigError, match=message):
        load_rewards(wanted, RewardOptions(**options), micro_batch=MicroBatch(8), **cpu)


# One score per token --------------------------------------------------------------------------------------------------

COMPLETIONS = [
    Completion(Prompt("问", "d:1"), "二个", ids=(7, 8)),
    Completion(Prompt("问", "d:2"), "一个长的", ids=(7, 8, 9)),
    Completion(Prompt("问", "d:3"), ""),
]
DENSE = [[1.0, 2.0], [0.5, -0.5, 3.0], []]


def dense():
    return DENSE


def test_lists_of_every_kind():
    for result in (
        DENSE,
        [np.array(row) for row in DENSE],
        [torch.tensor(row, dtype=torch.bfloat16) for row in DENSE],
        [[torch.tensor(x) for x in row] for row in DENSE],
    ):
        scores = score_tokens([Reward("密", lambda completions, result=result: result)], COMPLETIONS)
        assert scores.tokens == DENSE
        assert scores.totals == [3.0, 3.0, 0.0]
        assert scores.means == {"密": 2.0}
        assert all(type(x) is float for row in scores.tokens for x in row)


@pytest.mark.parametrize(
    ("combine", "totals", "tokens"),
    [
        ("sum", [2 * 3.0 + 10, 6.0, 30.0], [[2.0, 4.0], [1.0, -1.0, 6.0], []]),
        ("mean", [(6.0 + 10) / 2, 6.0, (0 + 30) / 2], [[1.0, 2.0], [1.0, -1.0, 6.0], []]),
        ("min", [6.0, 6.0, 0.0], [[2.0, 4.0], [1.0, -1.0, 6.0], []]),
        ("mean-std", [8.0 - 2.0, 6.0, 15.0 - 15.0], [[1.0, 2.0], [1.0, -1.0, 6.0], []]),
    ],
)
def test_mixed_with_a_scalar(combine, totals, tokens):
    """The scalar has no place, so it is in the total alone; the dense reward's weight is 2."""
    rewards = Ensemble((Reward("密", dense, 2.0), Reward("s", lambda: [10.0, None, 30.0])), combine)
    scores = score_tokens(rewards, COMPLETIONS)
    assert scores.totals == pytest.approx(totals)
    assert scores.tokens == [pytest.approx(row) for row in tokens]
    assert score(rewards, COMPLETIONS) == (scores.totals, scores.means)


def test_two_dense_rewards_are_added_token_by_token():
    scores = score_tokens([Reward("a", dense), Reward("b", lambda: [[1.0, 1.0], None, []])], COMPLETIONS)
    assert scores.tokens == [[2.0, 3.0], DENSE[1], []]
    assert scores.totals == [5.0, 3.0, 0.0]


def test_what_does_not_fit_the_tokens():
    for row, *fragments in (
        ([1.0], "returned 1 score for a response of 2 tokens", "completion_ids"),
        ([1.0, 2.0, 3.0], "returned 3 scores for a response of 2 tokens", "the token that ended the response is not"),
        (torch.ones(3), "returned 3 scores for a response of 2 tokens"),
        ([1.0, float("nan")], "nan (float)", "one finite number"),
        ([1.0, None], "None (NoneType)"),
        (["1", "2"], "'1' (str)"),
    ):
        with refused(RewardError, "reward 密", "d:1", "二个", *fragments):
            score([Reward("密", lambda completions, row=row: [row, *DENSE[1:]])], COMPLETIONS)
