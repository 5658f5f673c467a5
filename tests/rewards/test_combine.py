"""Several rewards and one score: combinations by hand, weights, what None leaves out, and settings that do not fit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.configs.scoring import RewardOptions
from heedful.errors import ConfigError
from heedful.rewards import Ensemble, Reward, score
from heedful.rewards.resolve import load_rewards
from heedful.rewards.scoring import combine_scores, shares
from heedful.types import MicroBatch

SCORES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6)
WAYS = ("sum", "mean", "min", "mean-std")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sum", 1.0 + 2.0 + 6.0),
        ("mean", (1.0 + 2.0 + 6.0) / 3),
        ("min", 1.0),
        ("mean-std", 3.0 - 0.5 * math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 3)),
    ],
)
def test_golden_combinations(how, expected):
    assert combine_scores([1.0, 2.0, 6.0], how, std_coef=0.5) == pytest.approx(expected, rel=1e-12)


@given(scores=SCORES)
def test_identities_of_combinations(scores):
    """mean-std with no price is the mean; the smallest is below the mean; the order of rewards does not matter."""
    mean, smallest = combine_scores(scores, "mean"), combine_scores(scores, "min")
    assert combine_scores(scores, "mean-std", std_coef=0.0) == mean
    assert combine_scores(scores, "sum") == pytest.approx(len(scores) * mean, rel=1e-9, abs=1e-6)
    assert smallest <= mean + 1e-6
    assert combine_scores(scores, "mean-std") <= mean
    for how in WAYS:
        assert combine_scores(scores[::-1], how) == pytest.approx(combine_scores(scores, how), rel=1e-6, abs=1e-6)


@given(value=st.floats(-1e6, 1e6), n=st.integers(1, 6))
def test_rewards_that_agree_are_taken_at_their_word(value, n):
    for how in ("mean", "min", "mean-std"):
        assert combine_scores([value] * n, how) == pytest.approx(value, rel=1e-9, abs=1e-9)


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
        ({"reward_combine": "mean-std", "reward_std_coef": 3.0}, [2.0 - 3.0, 2.0, -4.0]),
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
    rewards = load_rewards([Reward("a", first, 2.0), second], RewardOptions(), micro_batch=MicroBatch(8), **cpu)
    assert score(rewards, completions)[0] == [2 * 1.0 + 3.0, 4.0, -4.0]
    twice = load_rewards([Reward("a", first, 2.0)] * 2, RewardOptions(), micro_batch=MicroBatch(8), **cpu)
    assert [(reward.name, reward.weight) for reward in twice] == [("a", 2.0), ("a#2", 2.0)]


def test_a_plain_list_of_rewards_is_summed(completions):
    rewards = [Reward("a", first), Reward("b", second)]
    assert score(rewards, completions) == score(Ensemble(tuple(rewards)), completions)
    assert list(Ensemble(tuple(rewards))) == rewards
    assert Ensemble(tuple(rewards))[:1] == (rewards[0],)


@pytest.mark.parametrize(
    ("wanted", "options", "message"),
    [
        ([], {"reward_weights": (1.0,)}, "--rewards is missing: model:PATH.* python:FILE.py:FUNCTION.* rule:NAME.* http://"),
        ([first], {"reward_weights": (1.0, 2.0)}, "--reward-weights has 2 numbers for 1 reward; give one for each"),
        ([first, "rule:digits"], {"reward_weights": (1.0,)}, "--reward-weights has 1 number for 2 rewards"),
        ([first, Reward("我的", second, 3.0)], {"reward_weights": (1.0, 2.0)}, "--reward-weights gives a weight to 我的"),
        ([Reward("我的", first, math.nan)], {}, "weight of reward 我的 must be a finite number, got nan"),
        *(([first], {"reward_combine": how}, f"--reward-combine {how} .*there is only one; add more") for how in WAYS[1:]),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_rewards(cpu, wanted, options, message):
    with pytest.raises(ConfigError, match=message):
        load_rewards(wanted, RewardOptions(**options), micro_batch=MicroBatch(8), **cpu)


def test_columns_reach_every_reward(completions, cpu):
    """Each of several rewards is given the columns that it names, whatever the others name."""
    seen = {}

    def one(expected):
        seen["one"] = expected
        return [0.0] * len(expected)

    def two(completions, hint=None, weights=()):
        seen["two"] = (hint, weights)
        return [0.0] * len(completions)

    def three(**columns):
        seen["three"] = columns["weights"]
        return [0.0] * len(columns["weights"])

    score(
        load_rewards([one, two, three, "rule:contains_expected"], RewardOptions(), micro_batch=MicroBatch(8), **cpu),
        completions,
    )
    assert seen == {"one": ["2。", "红色", "你好"], "two": (None, [1, 2, 3]), "three": [1, 2, 3]}
