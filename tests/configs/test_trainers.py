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
    """Plan and doctor have its settings and their own."""
    trainer = TRAINERS[name]
    settings, page = trainer.settings(), trainer.page()
    assert settings.algorithm == name
    assert {*trainer.often} <= {field.name for field in dataclasses.fields(settings)}
    assert callable(page.learn)
    assert callable(page.make_experience if trainer.is_online else page.start)
    config = parse(settings, [*trainer.example.split(), "--output", "运行"], prog=f"heedful {name}")
    assert config.step_rows > 0
    assert config.loads_reference == (name not in ("sft", "reward", "critic"))
    least = {"model": "模型", "data": "数据.jsonl"} | ({"rewards": ("rule:repetition",)} if trainer.is_online else {})
    for group, own in (("plan", PlanOptions), ("doctor", DoctorOptions)):
        kind = COMMANDS[f"{group} {name}"].settings()
        assert kind is COMMANDS[f"{group} {name}"].settings()
        config = kind(**least)
        assert isinstance(config, settings)
        assert isinstance(config, own)
        assert config.learning_rate == settings(**least, output="运行").learning_rate


def of(name, **settings):
    trainer = TRAINERS[name]
    least = {"model": "模型", "data": "数据.jsonl", "output": "运行"} | (
        {"rewards": ("rule:repetition",)} if trainer.is_online else {}
    )
    return trainer.settings()(**least, **settings)


@pytest.mark.parametrize(("name", "settings", "rows"), [
    ("sft", {"batch_size": 6}, 6),
    ("dpo", {"batch_size": 6}, 12),
    ("kto", {"batch_size": 6}, 6),
    ("a2c", {"rollout_batch_size": 32}, 32),
    ("grpo", {"rollout_batch_size": 32, "minibatch_size": 16}, 16),
    ("online-dpo", {"rollout_batch_size": 32, "minibatch_size": 16, "samples_per_prompt": 4}, 8),
])  # fmt: skip
def test_a_pair_is_two_rows_of_a_step(name, settings, rows):
    """Of four responses to a prompt, online DPO learns from the best and the worst."""
    assert of(name, **settings).step_rows == rows


def test_what_settings_say_of_their_algorithm():
    """Imitation allows other learning rates than a reference; only supervised fine-tuning may learn prompts."""
    facts = {
        "learns_pairs": {"reward", "dpo", "online-dpo"},
        "learns_scores": {"reward"},
        "has_dropout": {"sft"},
        "reads_reference_once": {"dpo", "kto"},
        "learns_prompts": set(),
    }
    assert facts == {fact: {name for name in TRAINERS if getattr(of(name), fact)} for fact in facts}
    assert of("sft", loss_on="all").learns_prompts
    assert {name for name in TRAINERS if of(name).rate_is_of == "imitation"} == {"sft", "reward"}
    strengths = {name: of(name).strength for name in TRAINERS if of(name).strength}
    assert strengths == {"dpo": 0.1, "kto": 0.1, "online-dpo": 0.1}
