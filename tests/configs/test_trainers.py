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


def of(name, **settings):
    trainer = TRAINERS[name]
    least = {"model": "模型", "data": "数据.jsonl", "output": "运行"} | (
        {"rewards": ("rule:repetition",)} if trainer.is_online else {}
    )
    return trainer.settings()(**least, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "rows"),
    [
        ("sft", {"batch_size": 6}, 6),
        ("reward", {"batch_size": 6}, 12),
        ("dpo", {"batch_size": 6}, 12),
        ("kto", {"batch_size": 6}, 6),
        ("ppo", {"rollout_batch_size": 32, "minibatch_size": 8}, 8),
        ("a2c", {"rollout_batch_size": 32}, 32),
        ("grpo", {"rollout_batch_size": 32, "minibatch_size": 16}, 16),
        ("online-dpo", {"rollout_batch_size": 32, "minibatch_size": 16, "samples_per_prompt": 4}, 8),
    ],
)
def test_a_pair_is_two_rows_of_a_step(name, settings, rows):
    """Of four responses to a prompt, online DPO learns from the best and the worst."""
    assert of(name, **settings).step_rows == rows


@pytest.mark.parametrize(
    ("fact", "names"),
    [
        ("learns_pairs", {"reward", "dpo", "online-dpo"}),
        ("learns_scores", {"reward"}),
        ("has_dropout", {"sft"}),
        ("reads_reference_once", {"dpo", "kto"}),
    ],
)
def test_what_settings_say_of_their_algorithm(fact, names):
    assert {name for name in TRAINERS if getattr(of(name), fact)} == names


def test_only_supervised_fine_tuning_may_learn_prompts():
    assert of("sft", loss_on="all").learns_prompts
    assert not any(of(name).learns_prompts for name in TRAINERS)


def test_imitation_allows_other_learning_rates_than_a_reference():
    assert {name for name in TRAINERS if of(name).rate_is_of == "imitation"} == {"sft", "reward"}
    assert {name: of(name).strength for name in TRAINERS if of(name).strength} == {
        "dpo": 0.1,
        "kto": 0.1,
        "online-dpo": 0.1,
    }
