"""The same code on a CUDA device: trainers run, and sampling is that of the CPU."""

import json

import pytest
import torch

from heedful.configs.grpo import GRPOConfig
from heedful.configs.options import SamplingOptions
from heedful.configs.ppo import PPOConfig
from heedful.configs.reward import RewardConfig
from heedful.configs.sft import SFTConfig
from heedful.data.collate import collate
from heedful.models.checkpoints import load_causal_lm
from heedful.models.policy import freeze, load_policy
from heedful.models.tiny import make_tiny_model
from heedful.rollout.generate import sample
from heedful.rollout.teacher_forced import token_outputs
from heedful.train.grpo import train_grpo
from heedful.train.memory import load_reference
from heedful.train.ppo import train_ppo
from heedful.train.reward import train_reward
from heedful.train.sft import train_sft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def write(path, records) -> str:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return str(path)


def test_greedy_sampling_on_cuda_is_that_of_the_cpu(tmp_path):
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=32)
    prompts = [[10, 11, 12], [40], [77, 78, 79, 80, 81]]
    options = SamplingOptions(max_new_tokens=20, temperature=0.0)
    outputs = []
    for name in ("cpu", "cuda"):
        policy = freeze(load_policy(str(tmp_path / "m"), device=torch.device(name), compute_dtype=torch.float32))
        rollouts = sample(policy, prompts, options, stop_ids=(1,), pad_id=0, generator=torch.Generator())
        outputs.append([rollouts.response_ids(row, with_stop=True) for row in range(3)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_three_stages_run_on_cuda(tmp_path, dtype):
    make_tiny_model("qwen3", tmp_path / "base", hidden_size=32)
    pairs = [{"prompt": f"问{i}", "chosen": "好", "rejected": "坏"} for i in range(20)]
    data = write(tmp_path / "pairs.jsonl", pairs)
    texts = write(tmp_path / "sft.jsonl", [{"prompt": p["prompt"], "completion": p["chosen"]} for p in pairs])
    common = {"device": "cuda", "dtype": dtype, "eval_fraction": 0.3}
    train_sft(
        SFTConfig(
            model=str(tmp_path / "base"), data=texts, output=tmp_path / "sft", max_steps=2, batch_size=8, **common
        )
    )
    start = str(tmp_path / "sft" / "final")
    train_reward(RewardConfig(model=start, data=data, output=tmp_path / "rm", max_steps=2, batch_size=8, **common))
    for critic in ("shared", "separate", "reward"):
        summary = train_ppo(
            PPOConfig(
                model=start,
                rewards=(f"model:{tmp_path}/rm/final",),
                data=data,
                output=tmp_path / critic,
                critic=critic,
                steps=2,
                rollout_batch_size=8,
                minibatch_size=4,
                max_new_tokens=8,
                score_norm_samples=8,
                entropy_coef=0.01,
                **common,
            )
        )
        assert abs(summary["first_evaluation"]["eval/kl"]) < 1e-3


def test_a_reference_on_the_cpu_answers_on_the_policys_device(tmp_path):
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=32)
    config = GRPOConfig(model=str(tmp_path / "m"), data="d", output="o", reference_device="cpu", dtype="float32")
    policy = load_policy(config.model, device=torch.device("cuda"), compute_dtype=torch.float32)
    reference = load_reference(config, policy)
    assert reference.device.type == "cpu"
    batch = collate([[20, 21, 22], [23]], [[24, 25], [26, 27, 28]], pad_id=0).to(policy.device)
    ours, theirs = (token_outputs(m, batch, temperature=1.0, micro_batch_size=1) for m in (policy, reference))
    assert theirs.logprobs.device == theirs.entropy.device == batch.ids.device
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)


def prompts_of(tmp_path):
    return write(tmp_path / "prompts.jsonl", [{"prompt": f"问{i}"} for i in range(20)])


@pytest.mark.parametrize("settings", [{"reference_device": "cpu"}, {"lora_rank": 4}, {"gradient_checkpointing": True}])
def test_grpo_runs_on_cuda_with_less_memory(tmp_path, settings):
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=32)
    online = {"rollout_batch_size": 8, "minibatch_size": 8, "samples_per_prompt": 4, "max_new_tokens": 8, "steps": 2}
    config = GRPOConfig(
        model=str(tmp_path / "m"),
        data=prompts_of(tmp_path),
        output=tmp_path / "run",
        device="cuda",
        **online,
        **settings,
    )
    summary = train_grpo(config, rewards=[lambda completion_ids: [float(ids[0]) for ids in completion_ids]])
    assert abs(summary["first_evaluation"]["eval/kl"]) < 0.1
    load_causal_lm(str(tmp_path / "run" / "final"))


@pytest.mark.parametrize("settings", [{"optimizer": "adamw-8bit"}, {"quantize": "4bit", "lora_rank": 4}])
def test_what_bitsandbytes_does_runs(tmp_path, settings):
    """SFT lowers its loss, PPO starts at KL 0, a reward model comes back; the base of adapters stays in 4 bits."""
    pytest.importorskip("bitsandbytes")
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=64, initializer_range=0.1)
    pairs = [{"prompt": f"问{i}", "chosen": "好", "rejected": "坏"} for i in range(20)]
    texts = write(tmp_path / "sft.jsonl", [{"prompt": p["prompt"], "completion": p["chosen"]} for p in pairs])
    common = {"model": str(tmp_path / "m"), "device": "cuda", "learning_rate": 1e-2, **settings}
    summary = train_sft(
        SFTConfig(data=texts, output=tmp_path / "sft", max_steps=20, batch_size=8, eval_data=texts, **common)
    )
    assert summary["last_evaluation"]["eval/loss"] < 0.9 * summary["first_evaluation"]["eval/loss"]
    data = write(tmp_path / "pairs.jsonl", pairs)
    train_reward(RewardConfig(data=data, output=tmp_path / "rm", max_steps=2, batch_size=8, **common))
    online = {"rollout_batch_size": 8, "minibatch_size": 4, "max_new_tokens": 8, "steps": 2, "eval_fraction": 0.3}
    for critic in ("shared", "separate"):
        config = PPOConfig(
            rewards=(f"model:{tmp_path}/rm/final",),
            data=data,
            output=tmp_path / critic,
            critic=critic,
            **online,
            **common,
        )
        assert abs(train_ppo(config)["first_evaluation"]["eval/kl"]) < 1e-3
