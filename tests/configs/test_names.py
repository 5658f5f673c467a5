"""A name that somebody brings from TRL, OpenRLHF or verl is answered with what to write."""

import dataclasses

import pytest

from heedful.cli.command_table import COMMANDS

BROUGHT = [
    ("grpo", "--num-generations", "--samples-per-prompt"),
    ("grpo", "--num_generations", "--samples-per-prompt"),
    ("grpo", "--beta", "--kl-coef"),
    ("dpo", "--kl-coef", "--beta"),
    ("sft", "--per-device-train-batch-size", "--batch-size"),
    ("ppo", "--per_device_train_batch_size", "--minibatch-size"),
    ("sft", "--num-train-epochs", "--epochs"),
    ("ppo", "--num-train-epochs", "--steps"),
    ("sft", "--no-bf16", "--dtype"),
    ("ppo", "--reward_pretrain", "--rewards"),
    ("grpo", "actor_rollout_ref.rollout.n=8", "--samples-per-prompt"),
    ("grpo", "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", "--model"),
    ("ppo", "critic.optim.lr=1e-5", "--value-learning-rate"),
    ("ppo", "+trainer.experiment_name=实验", "--output"),
]
"""Of TRL and transformers, OpenRLHF, verl: as a command spells them, and where one name means several settings."""


def settings_of(command):
    return {field.name for field in dataclasses.fields(COMMANDS[command].settings())}


def test_a_name_of_another_library_is_answered_with_ours(heedful):
    for command, brought, ours in BROUGHT:
        outcome = heedful(command, brought)
        assert outcome.status == 2
        assert f"heedful's name is {ours}" in outcome.message, brought
        assert ours[2:].replace("-", "_") in settings_of(command)


def test_in_a_file_too(heedful, written):
    path = written("设置.yaml", "model: 模型\nkl-penalty: 8\n")
    outcome = heedful("grpo", path)
    assert outcome.status == 2
    assert f"{path}:2: kl_penalty (--kl-penalty) is not a setting" in outcome.message
    assert "heedful's name is --kl-kind (It is the estimator, not the coefficient)" in outcome.message


def test_a_value_of_several_names_is_answered_for_each(heedful):
    said = heedful("grpo", "--num-generations", "8", "--beta=0.04").message
    assert "--num-generations is not a setting of heedful grpo; heedful's name is --samples-per-prompt" in said
    assert "--beta is not a setting of heedful grpo; heedful's name is --kl-coef" in said


@pytest.mark.parametrize(("words", "instead"), [
    (("serve-reward", "--workers", "2"), "one server for each GPU behind a proxy, or serve the folder with vLLM"),
    (("sft", "--push-to-hub"), "heedful push RUN ORG/NAME"),
    (("grpo", "trainer.nnodes=2"), "torchrun --nnodes N"),
])  # fmt: skip
def test_what_there_is_no_setting_for_is_answered_with_what_to_use(heedful, words, instead):
    outcome = heedful(*words)
    assert outcome.status == 2
    assert instead in outcome.message


def test_a_name_means_what_it_means_in_its_library(heedful):
    assert "heedful's name is --approx-kl-limit" in heedful("ppo", "--target_kl", "1").message
    assert "heedful's name is --kl-target" in heedful("ppo", "algorithm.kl_ctrl.target_kl=6").message


def test_a_name_of_two_meanings_is_answered_with_both(heedful):
    said = heedful("ppo", "--max_epochs", "2").message
    assert "heedful's name is --steps for ms-swift, --ppo-epochs for OpenRLHF" in said
