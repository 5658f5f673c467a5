"""Rewards by name, and what is said of names that lead nowhere."""

import functools

import pytest

from heedful import CheckpointError, ConfigError, Reward, RewardError
from heedful.rewards import rules, score
from heedful.rewards.functions import load_function
from heedful.rewards.resolve import check_reward_string, resolve_rewards
from heedful.rewards.rules import RULES
from refusals import refused


@pytest.fixture
def source(written):
    """``source(text)`` is the path of a Python file with that text."""
    return lambda text: written("奖励.py", text)


def test_the_three_kinds_of_values(completions, source, cpu):
    path = source("def 长度(completions, **_):\n    return [len(c) for c in completions]\n")

    def mine(completions):
        return [1.0] * len(completions)

    wanted = ["rule:digits", f"python:{path}:长度", mine, Reward("named", mine), functools.partial(mine)]
    resolved = resolve_rewards(wanted, **cpu)
    assert [r.name for r in resolved[:4]] == ["rule:digits", f"python:{path}:长度", "mine", "named"]
    assert resolved[0].function is RULES["digits"]
    assert score(resolved[1:2], completions)[0] == [4.0, 2.0, 2.0]
    assert score(resolved[2:], completions)[0] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("string", ["", "rule:", "ftp://x", "奖励.py:f"])
def test_a_string_of_no_known_form(string):
    with refused(ConfigError, "--rewards", repr(string), "model:PATH", "python:FILE.py:FUNCTION", "rule:NAME"):
        check_reward_string(string)


def test_an_unknown_rule_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean rule:digits\\?; rules are contains_expected, digits"):
        check_reward_string("rule:digit")
    with pytest.raises(ConfigError, match="there is no rule '幽默'; rules are"):
        check_reward_string("rule:幽默")


def test_every_string_is_checked_before_anything_is_loaded(source, tmp_path, cpu):
    """A misspelt rule at the end is told before a file runs or a large model loads."""
    path = source(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nf = 1\n")
    for wrong in ("rule:digit", "nonsense"):
        with pytest.raises(ConfigError, match=wrong):
            resolve_rewards([f"python:{path}:f", f"model:{tmp_path / 'none'}", wrong], **cpu)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError, match="has no function or class 'f'; it has none"):
        resolve_rewards([f"python:{path}:f"], **cpu)
    assert (tmp_path / "ran").exists()


def test_what_names_no_function(source, tmp_path):
    """As its process finds out."""
    path = source("from math import sqrt\nfrom os.path import join\nx = 1\ndef 长度(c): ...\ndef _own(c): ...\n")
    (tmp_path / "f.txt").write_text("def f(): ...", encoding="utf-8")
    for spec, said in (
        (f"{tmp_path / '没有.py'}:f", r"--rewards: the file .*没有\.py .*does not exist"),
        # as people write it who know entry points
        ("heedful.rewards.rules:digits", f"names a file, not a module: write python:{rules.__file__}:digits"),
        ("奖励.py", r"does not name a function; use python:FILE\.py:FUNCTION"),
        (":f", r"does not name a function; use python:FILE\.py:FUNCTION"),
        (f"{tmp_path / 'f.txt'}:f", r"f\.txt is not a Python file"),
        (f"{path}:长", rf"{path} has no function or class '长'; it has join, 长度$"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_function(f"python:{spec}")


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("def f(:\n", ["SyntaxError", "奖励.py, line 1"]),
        ("import sys\nsys.exit('此文件是脚本')\n", ["SystemExit", "此文件是脚本"]),
    ],
    ids=["syntax", "exits"],
)
def test_a_file_that_cannot_be_imported(source, cpu, text, fragments):
    path = source(text)
    with refused(RewardError, str(path), "cannot be imported", *fragments):
        resolve_rewards([f"python:{path}:f"], **cpu)


def test_a_file_with_dataclasses_named_as_a_module(completions, tmp_path, cpu):
    """Dataclasses look their module up in sys.modules; but a file called json.py must not become everybody's json."""
    (tmp_path / "json.py").write_text(
        "from __future__ import annotations\n"
        "import sys\n"
        "from dataclasses import dataclass, field\n"
        "@dataclass\nclass Settings:\n    weight: float = 2.0\n    words: list[str] = field(default_factory=list)\n"
        "def f(completions):\n    sys.modules['json'].dumps({})\n    return [Settings().weight] * len(completions)\n"
    )
    assert score(resolve_rewards([f"python:{tmp_path / 'json.py'}:f"], **cpu), completions)[0] == [2.0, 2.0, 2.0]


def test_a_model_that_does_not_exist(tmp_path, cpu):
    (tmp_path / "评分模型").mkdir()
    with pytest.raises(CheckpointError, match=r"does not exist; did you mean .*评分模型"):
        resolve_rewards([f"model:{tmp_path / '评分模形'}"], **cpu)


def test_a_language_model_is_no_reward_model_yet(tiny, cpu):
    with pytest.raises(CheckpointError, match=r"no reward head.*heedful reward"):
        resolve_rewards([f"model:{tiny('gpt2')}"], **cpu)


def test_equal_names_are_told_apart(cpu):
    """Two rewards of one name would overwrite each other's mean in the metrics."""

    def brevity(completions):
        return [1.0] * len(completions)

    rewards = resolve_rewards(["rule:digits", brevity, "rule:digits", brevity, "rule:digits"], **cpu)
    names = ["rule:digits", "brevity", "rule:digits#2", "brevity#2", "rule:digits#3"]
    assert [reward.name for reward in rewards] == names
