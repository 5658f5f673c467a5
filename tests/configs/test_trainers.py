"""The table of trainers, from which help, plan, doctor, report and pictures know them."""

import dataclasses

import pytest

from heedful.cli.command_table import COMMANDS
from heedful.configs.doctor import DoctorOptions
from heedful.configs.parse import parse
from heedful.configs.plan import PlanOptions
from heedful.configs.trainers import TRAINERS


@pytest.mark.parametrize("name", TRAINERS)
def test_what_the_table_says_of_a_trainer_is_so(name):
    trainer = TRAINERS[name]
    settings, page = trainer.settings(), trainer.page()
    assert settings.algorithm == name
    assert {*trainer.often} <= {field.name for field in dataclasses.fields(settings)}
    assert callable(page.learn)
    assert callable(page.make_experience if trainer.is_online else page.start)
    config = parse(settings, [*trainer.example.split(), "--output", "运行"], prog=f"heedful {name}")
    assert config.step_rows > 0
    assert config.loads_reference == (name not in ("sft", "reward"))


@pytest.mark.parametrize("name", TRAINERS)
def test_plan_and_doctor_have_a_trainers_settings_and_their_own(name):
    trainer = TRAINERS[name]
    least = {"model": "模型", "data": "数据.jsonl"} | ({"rewards": ("rule:repetition",)} if trainer.is_online else {})
    for group, own in (("plan", PlanOptions), ("doctor", DoctorOptions)):
        settings = COMMANDS[f"{group} {name}"].settings()
        assert settings is COMMANDS[f"{group} {name}"].settings()
        config = settings(**least)
        assert isinstance(config, trainer.settings())
        assert isinstance(config, own)
        assert config.learning_rate == trainer.settings()(**least, output="运行").learning_rate
