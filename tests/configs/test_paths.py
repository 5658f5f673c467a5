"""``~`` in every setting that is a path is expanded once, when the configuration is made."""

import dataclasses
import typing
from pathlib import Path

import pytest

from heedful import (
    BestOfNConfig,
    DPOConfig,
    GRPOConfig,
    MergeConfig,
    PPOConfig,
    RewardConfig,
    WinRateConfig,
)
from heedful.configs.parse import parse, to_yaml
from heedful.configs.report import ReportConfig
from heedful.configs.settings import PATHS, REWARDS, types_of

NO_PATHS = {
    "device", "columns", "system_prompt", "lora_targets", "value_freeze", "host", "chat_template_kwargs", "allow",
    "allow_change", "token_env", "allowed_hosts", "track_project", "project", "name", "to", "license", "base_model",
    "language", "message", "tasks", "judge_columns", "extra", "without", "url", "stop_on",
    "public_url", "criteria", "reason", "batch", "items", "person", "search", "label", "answer", "by", "version", "arguments",
}  # fmt: skip
"""Settings that are text."""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "家"))
    return str(tmp_path / "家")


def test_every_setting_of_text_is_a_path_or_known_to_be_none(least):
    """A new setting must be put into one of the lists."""
    texts = {
        name
        for kind in least
        for name, hint in typing.get_type_hints(kind).items()
        if name in types_of(kind) and {str, Path} & {hint, *typing.get_args(hint)}
    }
    assert texts <= {*PATHS, *REWARDS, *NO_PATHS}
    assert {"model", "project", "output"} < texts


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda p: RewardConfig(model=p, data=p, output=Path(p), eval_data=p, offset_data=p, chat_template=p),
         ["model", "data", "output", "eval_data", "offset_data", "chat_template"]),
        (lambda p: PPOConfig(model=p, data=p, output=Path(p), reference=p, critic="separate", value_model=p, ptx_data=p,
                             ptx_coef=1.0),
         ["model", "data", "output", "reference", "value_model", "ptx_data"]),
        (lambda p: WinRateConfig(model=p, data=p, baseline=p), ["model", "data", "baseline"]),
        (lambda p: MergeConfig(adapter=p, output=Path(p)), ["adapter", "output"]),
    ],
)  # fmt: skip
def test_paths_are_expanded(make, fields, home):
    config = make("~/数据/一")
    assert {field: str(getattr(config, field)) for field in fields} == dict.fromkeys(fields, f"{home}/数据/一")
    assert isinstance(config.output, Path | None)


def test_paths_in_rewards_are_expanded(home):
    rewards = ("model:~/评分", "python:~/奖励.py:分", "rule:regex:~", "http://h/~x")
    expanded = (f"model:{home}/评分", f"python:{home}/奖励.py:分", "rule:regex:~", "http://h/~x")
    config = GRPOConfig(model="m", data="d", output=Path("o"), rewards=rewards, selection_rewards=("model:~/评委",))
    assert (config.rewards, config.selection_rewards) == (expanded, (f"model:{home}/评委",))
    assert (
        DPOConfig(model="m", data="d", output=Path("o"), loss="python:~/损失.py:f").loss == f"python:{home}/损失.py:f"
    )
    assert BestOfNConfig(model="m", data="d", rewards=("a",), judge=("model:~/评委",)).judge == (f"model:{home}/评委",)
    assert ReportConfig(runs=("~/a", "b"), output=Path("~/c.png")).runs == (f"{home}/a", "b")


def test_what_is_no_path_stays(home):
    config = PPOConfig(model="org/name", data="modelscope:a/b", output=Path("o"), chat_template="plain", columns="a=~")
    found = (config.model, config.data, config.chat_template, config.columns)
    assert found == ("org/name", "modelscope:a/b", "plain", "a=~")


def test_the_saved_configuration_has_the_real_path(home, tmp_path):
    config = parse(PPOConfig, ["--model", "~/m", "--data", "~/d.jsonl", "--output", "~/o"], prog="p")
    (tmp_path / "c.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert f"data: {home}/d.jsonl" in (tmp_path / "c.yaml").read_text(encoding="utf-8")
    assert parse(PPOConfig, [str(tmp_path / "c.yaml")], prog="p") == config


@pytest.mark.parametrize(("field", "value", "said"), [
    ("model", "~nosuchuser7/x", "~nosuchuser7 is a user's home, but there is no such user"),
    ("output", "~nosuchuser7/x", "./~nosuchuser7"),
    ("rewards", "~nosuchuser7/x", "./~nosuchuser7"),
    ("data", "a\0b", "holds a NUL byte"),
    ("rewards", "a\0b", "holds a NUL byte"),
])  # fmt: skip
def test_paths_that_cannot_be(refusal, field, value, said):
    given = refusal(PPOConfig, **{field: {"rewards": (f"model:{value}",)}.get(field, value)})
    assert f"--{field}" in given
    assert said in given


def test_nothing_else_is_changed():
    """The same configuration again is equal: expanding is done once."""
    config = PPOConfig(model="~/m", data="d", output=Path("o"))
    assert dataclasses.replace(config) == config
