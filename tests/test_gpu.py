"""The same code on a CUDA device: trainers run, and sampling is that of the CPU."""

import json

import pytest
import torch

from heedful.configs.options import SamplingOptions
from heedful.configs.ppo import PPOConfig
from heedful.configs.reward import RewardConfig
from heedful.configs.sft import SFTConfig
from heedful.models.policy import freeze, load_policy
from heedful.models.tiny import make_tiny_model
from heedful.rollout.generate import sample
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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
