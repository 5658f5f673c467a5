"""A name that somebody brings from TRL, OpenRLHF or verl is answered with what to write."""

import dataclasses

import pytest

from heedful.cli.command_table import COMMANDS
from heedful.configs.names import PEERS, WITHOUT

BROUGHT = [
    # TRL and transformers
    ("grpo", "--num-generations", "--samples-per-prompt"),
    ("grpo", "--num_generations", "--samples-per-prompt"),
    ("grpo", "--beta", "--kl-coef"),
    ("grpo", "--epsilon", "--clip-range"),
    ("grpo", "--epsilon-high", "--clip-range-high"),
    ("grpo", "--max-completion-length", "--max-new-tokens"),
    ("grpo", "--max-prompt-length", "--max-prompt-tokens"),
    ("grpo", "--reward-funcs", "--rewards"),
    ("grpo", "--num-iterations", "--ppo-epochs"),
    ("grpo", "--scale-rewards", "--advantage"),
    ("grpo", "--importance-sampling-level", "--importance-level"),
    ("grpo", "--mask-truncated-completions", "--mask-truncated"),
    ("grpo", "--use-vllm", "--sampler"),
    ("ppo", "--reward-model-path", "--rewards"),
    ("ppo", "--sft-model-path", "--model"),
    ("ppo", "--num-ppo-epochs", "--ppo-epochs"),
    ("ppo", "--cliprange", "--clip-range"),
    ("ppo", "--cliprange-value", "--value-clip-range"),
    ("ppo", "--vf-coef", "--value-coef"),
    ("ppo", "--lam", "--gae-lambda"),
    ("ppo", "--total-episodes", "--steps"),
    ("ppo", "--per-device-train-batch-size", "--minibatch-size"),
    ("sft", "--per-device-train-batch-size", "--batch-size"),
    ("sft", "--per_device_train_batch_size", "--batch-size"),
    ("sft", "--num-train-epochs", "--epochs"),
    ("ppo", "--num-train-epochs", "--steps"),
    ("sft", "--gradient-accumulation-steps", "--micro-batch-size"),
    ("sft", "--lr-scheduler-type", "--lr-schedule"),
    ("sft", "--output-dir", "--output"),
    ("sft", "--dataset-name", "--data"),
    ("sft", "--max-seq-length", "--max-length"),
    ("sft", "--max-ckpt-num", "--save-total-limit"),
    ("sft", "--report-to", "--track"),
    ("sft", "--bf16", "--dtype"),
    ("sft", "--no-bf16", "--dtype"),
    ("sft", "--use-peft", "--lora-rank"),
    ("sft", "--lora-target-modules", "--lora-targets"),
    ("sft", "--load-in-4bit", "--quantize"),
    ("reward", "--center-rewards-coefficient", "--center-coef"),
    ("dpo", "--kl-coef", "--beta"),
    ("dpo", "--rpo-alpha", "--nll-coef"),
    ("dpo", "--loss-type", "--loss"),
    ("dpo", "--ref-model", "--reference"),
    # OpenRLHF
    ("ppo", "--pretrain", "--model"),
    ("ppo", "--reward_pretrain", "--rewards"),
    ("ppo", "--critic_pretrain", "--value-model"),
    ("ppo", "--kl_penalty", "--kl-coef"),
    ("ppo", "--init_kl_coef", "--kl-coef"),
    ("ppo", "--eps_clip", "--clip-range"),
    ("ppo", "--n_samples_per_prompt", "--samples-per-prompt"),
    ("ppo", "--generate_max_len", "--max-new-tokens"),
    ("ppo", "--prompt_max_len", "--max-prompt-tokens"),
    ("ppo", "--actor_learning_rate", "--learning-rate"),
    ("ppo", "--critic_learning_rate", "--value-learning-rate"),
    ("ppo", "--micro_train_batch_size", "--micro-batch-size"),
    ("ppo", "--lambd", "--gae-lambda"),
    ("ppo", "--save_path", "--output"),
    ("ppo", "--zero_stage", "--shard"),
    # verl
    ("grpo", "actor_rollout_ref.rollout.n=8", "--samples-per-prompt"),
    ("grpo", "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", "--model"),
    ("grpo", "actor_rollout_ref.actor.optim.lr=1e-6", "--learning-rate"),
    ("grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=64", "--minibatch-size"),
    ("grpo", "actor_rollout_ref.actor.kl_loss_coef=0.001", "--kl-coef"),
    ("grpo", "actor_rollout_ref.actor.clip_ratio=0.2", "--clip-range"),
    ("grpo", "actor_rollout_ref.rollout.temperature=0.7", "--temperature"),
    ("grpo", "data.train_files=提示.parquet", "--data"),
    ("grpo", "data.train_batch_size=256", "--rollout-batch-size"),
    ("grpo", "data.max_response_length=1024", "--max-new-tokens"),
    ("ppo", "algorithm.kl_ctrl.kl_coef=0.001", "--kl-coef"),
    ("ppo", "algorithm.adv_estimator=gae", "--advantage"),
    ("ppo", "critic.optim.lr=1e-5", "--value-learning-rate"),
    ("ppo", "trainer.save_freq=20", "--save-every"),
    ("ppo", "trainer.test_freq=5", "--eval-every"),
    ("ppo", "+trainer.experiment_name=实验", "--output"),
]


def settings_of(command):
    return {field.name for field in dataclasses.fields(COMMANDS[command].settings())}


@pytest.mark.parametrize(("command", "brought", "ours"), BROUGHT, ids=str)
def test_a_name_of_another_library_is_answered_with_ours(heedful, command, brought, ours):
    outcome = heedful(command, brought)
    assert outcome.status == 2
    assert f"heedful's name is {ours}" in outcome.message
    assert ours[2:].replace("-", "_") in settings_of(command)


@pytest.mark.parametrize(("key", "ours"), [("num_generations", "--samples-per-prompt"), ("kl-penalty", "--kl-coef")])
def test_in_a_file_too(heedful, tmp_path, key, ours):
    path = tmp_path / "设置.yaml"
    path.write_text(f"model: 模型\n{key}: 8\n", encoding="utf-8")
    outcome = heedful("grpo", path)
    assert outcome.status == 2
    assert f"{path}:2: {key.replace('-', '_')} (--{key.replace('_', '-')}) is not a setting" in outcome.message
    assert f"heedful's name is {ours}" in outcome.message


def test_a_value_of_several_names_is_answered_for_each(heedful):
    said = heedful("grpo", "--num-generations", "8", "--beta=0.04").message
    assert "--num-generations is not a setting of heedful grpo; heedful's name is --samples-per-prompt" in said
    assert "--beta is not a setting of heedful grpo; heedful's name is --kl-coef" in said


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("serve-reward", "--workers", "2"), "one server for each GPU behind a proxy, or serve the folder with vLLM"),
        (("sft", "--push-to-hub"), "heedful push RUN ORG/NAME"),
        (("grpo", "trainer.nnodes=2"), "torchrun --nnodes N"),
    ],
)
def test_what_there_is_no_setting_for_is_answered_with_what_to_use(heedful, words, instead):
    outcome = heedful(*words)
    assert outcome.status == 2
    assert instead in outcome.message


def test_the_tables_name_settings_that_exist():
    """And answer nothing that every command which could be meant has under that very name."""
    everything = set().union(*map(settings_of, COMMANDS))
    for brought, answered in PEERS.items():
        for ours in answered.partition(" | ")[0].split():
            assert ours in everything | {"tokenizer"}, f"{brought}: {ours}"
            assert ours != brought
    trainers = [name for name, command in COMMANDS.items() if command.trains]
    assert not [name for name in WITHOUT if any(name in settings_of(trainer) for trainer in trainers)]
