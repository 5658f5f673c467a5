"""Every command's configuration and the least it can be made from."""

import pytest

from cases import often
from heedful import (
    A2CConfig,
    AccuracyConfig,
    BestOfNConfig,
    ChatConfig,
    DemoConfig,
    DPOConfig,
    GRPOConfig,
    KLConfig,
    KTOConfig,
    MergeConfig,
    OnlineDPOConfig,
    PassAtKConfig,
    PerplexityConfig,
    PPOConfig,
    RewardConfig,
    ScoresConfig,
    ServeRewardConfig,
    SFTConfig,
    WinRateConfig,
)
from heedful.configs.course import CourseCheckConfig, CourseConfig, CourseStartConfig
from heedful.configs.doctor import DoctorDeviceConfig, doctor_settings
from heedful.configs.exam import ExamConfig
from heedful.configs.label import BackupConfig, NewProjectConfig, RestoreConfig
from heedful.configs.label_data import (
    CorrectConfig,
    ExportConfig,
    ImportConfig,
    ListConfig,
    StatsConfig,
    WithdrawConfig,
)
from heedful.configs.label_server import InviteConfig, LabelServeConfig
from heedful.configs.plan import plan_settings
from heedful.configs.report import LookConfig, ReportConfig, WatchConfig
from heedful.configs.rounds import RoundConfig, SimulateConfig
from heedful.configs.tools import PushConfig, RunsConfig, SampleConfig, ServePolicyConfig, TinyConfig
from heedful.configs.tracking import TrackConfig
from trainers import TRAIN

RUN = {"model": "模型", "data": "数据.jsonl", "output": "运行/一"}
MEASURE = {"model": "模型", "data": "数据.jsonl"}
LEAST = {
    SFTConfig: RUN,
    RewardConfig: RUN,
    PPOConfig: RUN,
    A2CConfig: RUN,
    DPOConfig: RUN,
    KTOConfig: RUN,
    GRPOConfig: RUN,
    OnlineDPOConfig: RUN,
    ServePolicyConfig: {"model": "模型"},
    TinyConfig: {"output": "tiny"},
    SampleConfig: {"models": ("模型",), "data": "数据.jsonl", "output": "回答.jsonl"},
    RoundConfig: {"project": "标注"},
    SimulateConfig: {"project": "标注", "rewards": ("rule:digits",)},
    MergeConfig: {"adapter": "运行/一/final", "output": "合并"},
    DemoConfig: {},
    CourseConfig: {},
    CourseStartConfig: {"lesson": 5},
    CourseCheckConfig: {"lesson": 5},
    TrackConfig: {"run": "运行/一", "to": "wandb"},
    PushConfig: {"run": "运行/一", "to": "org/name", "license": "mit"},
    ReportConfig: {"runs": ("运行/一", "运行/二")},
    LookConfig: {"run": "运行/一"},
    WatchConfig: {"runs": ("运行/一", "运行/二")},
    ChatConfig: {"model": "模型"},
    ServeRewardConfig: {"model": "评分"},
    AccuracyConfig: {"reward_model": "评分", "data": "数据.jsonl"},
    PerplexityConfig: MEASURE,
    ScoresConfig: MEASURE,
    BestOfNConfig: MEASURE,
    PassAtKConfig: MEASURE,
    WinRateConfig: MEASURE | {"baseline": "旧"},
    KLConfig: MEASURE | {"reference": "旧"},
    ExamConfig: {"reward": "评分"},
    RunsConfig: {"folder": "/"},
    NewProjectConfig: {"project": "项目"},
    BackupConfig: {"project": "项目"},
    RestoreConfig: {"project": "项目"},
    InviteConfig: {"project": "项目", "name": "安娜"},
    LabelServeConfig: {"project": "项目"},
    ImportConfig: {"project": "项目", "data": "数据.jsonl"},
    ExportConfig: {"project": "项目", "output": "导出"},
    StatsConfig: {"project": "项目"},
    WithdrawConfig: {"project": "项目"},
    ListConfig: {"project": "项目"},
    CorrectConfig: {"project": "项目", "label": "0a1b", "answer": "{}"},
    DoctorDeviceConfig: {},
    **{plan_settings(trainer): {"model": "4B"} for trainer in TRAIN},
    **{doctor_settings(trainer): MEASURE for trainer in TRAIN},
}

WITHIN = (plan_settings(SFTConfig), plan_settings(PPOConfig), doctor_settings(SFTConfig))
LIKE_OTHERS = {c for c in LEAST if c.__name__.startswith(("Plan", "Doctor")) and c not in WITHIN}


@pytest.fixture(params=often(LEAST, LEAST.keys() - LIKE_OTHERS), ids=lambda c: c.__name__)
def config_class(request):
    """Each in turn; most plans and examinations, whose fields are those of three of them and of the trainers, in the
    exhaustive tests."""
    return request.param


@pytest.fixture
def every_config_class():
    return set(LEAST)


@pytest.fixture
def least(config_class):
    """The required settings of ``config_class``."""
    return dict(LEAST[config_class])


@pytest.fixture(
    params=[
        pytest.param(c, marks=[pytest.mark.exhaustive] * (c in (A2CConfig, plan_settings(PPOConfig))), id=c.__name__)
        for c in LEAST
        if c not in LIKE_OTHERS
    ]
)
def of_own_fields(request):
    """A configuration class with its required settings. The other plans and examinations have the fields of
    three of them and of the trainers; A2C's are PPO's."""
    return request.param, dict(LEAST[request.param])


@pytest.fixture
def make():
    """``make(config_class, **settings)``: the required settings and these."""

    def build(config_class, **settings):
        return config_class(**(LEAST[config_class] | settings))

    return build
