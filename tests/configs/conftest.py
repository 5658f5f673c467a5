"""Every command's configuration and the least it can be made from."""

import pytest

from heedful import ConfigError
from heedful.cli.command_table import COMMANDS
from heedful.configs.settings import types_of
from heedful.configs.trainers import TRAINERS

RUN = {"model": "模型", "data": "数据.jsonl", "output": "运行/一"}
MEASURE = {"model": "模型", "data": "数据.jsonl"}
PROJECT = {"project": "项目"}
NEEDS = {
    **dict.fromkeys(TRAINERS, RUN),
    "serve-policy": {"model": "模型"},
    "tiny": {"output": "tiny"},
    "sample": {"models": ("模型",), "data": "数据.jsonl", "output": "回答.jsonl"},
    "round": {"project": "标注"},
    "merge": {"adapter": "运行/一/final", "output": "合并"},
    **{name: {} for name in ("demo", "course", "doctor device")},
    **{name: {"lesson": 5} for name in ("course start", "course check")},
    "track": {"run": "运行/一", "to": "wandb"},
    "push": {"run": "运行/一", "to": "org/name", "license": "mit"},
    **{name: {"runs": ("运行/一", "运行/二")} for name in ("report", "watch")},
    "look": {"run": "运行/一"},
    "chat": {"model": "模型"},
    "serve-reward": {"model": "评分"},
    **{f"evaluate {name}": MEASURE for name in ("perplexity", "scores", "best-of-n", "pass-at-k")},
    "evaluate accuracy": {"reward_model": "评分", "data": "数据.jsonl"},
    "evaluate win-rate": MEASURE | {"baseline": "旧"},
    "evaluate kl": MEASURE | {"reference": "旧"},
    "exam": {"reward": "评分"},
    "choose": RUN,
    "migrate": {"file": "脚本.py"},
    "runs": {"folder": "/"},
    **{f"label {name}": PROJECT for name in ("new", "backup", "restore", "serve", "stats", "withdraw", "list")},
    "label invite": PROJECT | {"name": "安娜"},
    "label import": PROJECT | {"data": "数据.jsonl"},
    "label export": PROJECT | {"output": "导出"},
    "label correct": PROJECT | {"label": "0a1b", "answer": "{}"},
    "label simulate": {"project": "标注", "rewards": ("rule:digits",)},
    **{f"plan {trainer}": {"model": "4B"} for trainer in TRAINERS},
    **{f"doctor {trainer}": MEASURE for trainer in TRAINERS},
}
LEAST = {command.settings(): NEEDS[name] for name, command in COMMANDS.items()}


@pytest.fixture
def least():
    """The required settings of every configuration class."""
    return LEAST


@pytest.fixture
def of_own_fields():
    """Configuration classes that have all fields of all: plans and examinations have those of trainers and of SFT's."""
    names = [name for name in COMMANDS if not name.startswith(("plan ", "doctor "))]
    return [COMMANDS[name].settings() for name in (*names, "plan sft", "doctor sft", "doctor device")]


@pytest.fixture
def each_field():
    """(class, field) for every field of all classes; of several classes that inherit one, the first."""
    found = {}
    for kind in LEAST:
        for name in types_of(kind):
            definer = next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", {}))
            found.setdefault((definer, name), kind)
    return [(kind, name) for (_, name), kind in found.items()]


@pytest.fixture
def make():
    """``make(config_class, **settings)``: the required settings and these."""
    return lambda config_class, **settings: config_class(**(LEAST[config_class] | settings))


@pytest.fixture
def refusal(make):
    """``refusal(config_class, **settings)``: what is said of settings that are refused; None if they are accepted."""

    def find(config_class, **settings):
        try:
            make(config_class, **settings)
        except ConfigError as error:
            return str(error)
        return None

    return find
