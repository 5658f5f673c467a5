"""Rewards by name, and what is said of names that lead nowhere."""

import functools

import pytest
import torch

from heedful import CheckpointError, ConfigError, Reward, RewardError
from heedful.rewards import rules, score
from heedful.rewards.resolve import check_reward_string, resolve_rewards
from heedful.rewards.rules import RULES


@pytest.fixture
def source(tmp_path):
    """``source(text)`` is the path of a Python file with that text."""

    def write(text):
        path = tmp_path / "奖励.py"
        path.write_text(text, encoding="utf-8")
        return path

    return write


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
def test_a_string_of_no_known_form(string, cpu):
    with pytest.raises(ConfigError) as error:
        resolve_rewards([string], **cpu)
    for fragment in ("--rewards", repr(string), "model:PATH", "python:FILE.py:FUNCTION", "rule:NAME"):
        assert fragment in str(error.value)


def test_an_unknown_rule_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean rule:digits\\?; rules are contains_expected, digits"):
        check_reward_string("rule:digit")
    with pytest.raises(ConfigError, match="there is no rule '幽默'; rules are"):
        check_reward_string("rule:幽默")


@pytest.mark.parametrize("wrong", ["rule:digit", "nonsense"])
def test_every_string_is_checked_before_anything_is_loaded(source, tmp_path, cpu, wrong):
    """A misspelt rule at the end is told before a file runs or a large model loads."""
    path = source(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef f(completions): return [1.0] * len(completions)\n"
    )
    with pytest.raises(ConfigError, match=wrong):
        resolve_rewards([f"python:{path}:f", f"model:{tmp_path / 'none'}", wrong], **cpu)
    assert not (tmp_path / "ran").exists()
    resolve_rewards([f"python:{path}:f"], **cpu)
    assert (tmp_path / "ran").exists()


def test_a_missing_file(tmp_path, cpu):
    with pytest.raises(ConfigError, match=r"--rewards: the file .*没有\.py .*does not exist"):
        resolve_rewards([f"python:{tmp_path / '没有.py'}:f"], **cpu)


def test_a_module_is_no_file(cpu):
    """As people write it who know entry points; the path of its file is named."""
    with pytest.raises(ConfigError, match=rf"names a file, not a module: write python:{rules.__file__}:digits"):
        resolve_rewards(["python:heedful.rewards.rules:digits"], **cpu)


@pytest.mark.parametrize("spec", ["奖励.py", ":f"])
def test_no_function_named(spec, cpu):
    with pytest.raises(ConfigError, match=r"does not name a function; use python:FILE\.py:FUNCTION"):
        resolve_rewards([f"python:{spec}"], **cpu)


def test_a_missing_function_lists_those_there_are(source, cpu):
    path = source("from math import sqrt\nfrom os.path import join\nx = 1\ndef 长度(c): ...\ndef _own(c): ...\n")
    with pytest.raises(ConfigError) as error:
        resolve_rewards([f"python:{path}:长"], **cpu)
    for fragment in (str(path), "no function '长'", "长度"):
        assert fragment in str(error.value)
    assert "_own" not in str(error.value)
    with pytest.raises(ConfigError, match="no function 'x'"):
        resolve_rewards([f"python:{path}:x"], **cpu)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("import 没有这个模块\n", ["ModuleNotFoundError", "没有这个模块"]),
        ("def f(:\n", ["SyntaxError", "奖励.py, line 1"]),
        ("import sys\nsys.exit('此文件是脚本')\n", ["SystemExit", "此文件是脚本"]),
    ],
    ids=["import", "syntax", "exits"],
)
def test_a_file_that_cannot_be_imported(source, cpu, text, fragments):
    path = source(text)
    with pytest.raises(RewardError) as error:
        resolve_rewards([f"python:{path}:f"], **cpu)
    for fragment in [str(path), "cannot be imported", *fragments]:
        assert fragment in str(error.value)


def test_a_file_that_is_no_python(tmp_path, cpu):
    path = tmp_path / "f.txt"
    path.write_text("def f(): ...", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"f\.txt is not a Python file"):
        resolve_rewards([f"python:{path}:f"], **cpu)


def test_a_file_with_dataclasses(completions, source, cpu):
    """Dataclasses look their module up in sys.modules, so a module that is only executed breaks them."""
    path = source(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, field\n"
        "@dataclass\nclass Settings:\n    weight: float = 2.0\n    words: list[str] = field(default_factory=list)\n"
        "def f(completions):\n    return [Settings().weight] * len(completions)\n"
    )
    assert score(resolve_rewards([f"python:{path}:f"], **cpu), completions)[0] == [2.0, 2.0, 2.0]


def test_a_file_does_not_replace_a_module_of_its_name(tmp_path, completions, cpu):
    """A reward file called json.py must not become everybody's json."""
    import json

    (tmp_path / "json.py").write_text("def f(completions): return [1] * len(completions)")
    resolve_rewards([f"python:{tmp_path / 'json.py'}:f"], **cpu)
    import sys

    assert sys.modules["json"] is json


def test_a_model_that_does_not_exist(tmp_path, cpu):
    (tmp_path / "评分模型").mkdir()
    with pytest.raises(CheckpointError, match=r"does not exist; did you mean .*评分模型"):
        resolve_rewards([f"model:{tmp_path / '评分模形'}"], **cpu)


def test_a_language_model_is_no_reward_model_yet(tiny, cpu):
    with pytest.raises(CheckpointError, match=r"no reward head.*heedful reward"):
        resolve_rewards([f"model:{tiny('gpt2')}"], **cpu)


def test_equal_names_are_told_apart():
    """Two rewards of one name would overwrite each other's mean in the metrics."""

    def brevity(completions):
        return [1.0] * len(completions)

    rewards = resolve_rewards(
        ["rule:digits", brevity, "rule:digits", brevity, "rule:digits"],
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
    )
    assert [reward.name for reward in rewards] == [
        "rule:digits",
        "brevity",
        "rule:digits#2",
        "brevity#2",
        "rule:digits#3",
    ]
