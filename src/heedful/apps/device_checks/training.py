"""Trainers on a device, with the options that save memory."""

import importlib.util
from typing import Any

import torch
import torch.distributed as dist

from heedful.algorithms.ppo import train_grpo, train_ppo
from heedful.algorithms.reward_model import train_reward
from heedful.algorithms.sft import train_sft
from heedful.apps.device_checks.result import LeftOutError, Measurement, Workbench, expect, furthest, largest
from heedful.configs.offline import RewardConfig, SFTConfig
from heedful.configs.online import GRPOConfig, PPOConfig
from heedful.devices import capabilities
from heedful.distributed.sharded_files import Parts, write_parts
from heedful.distributed.sharding import clip_gradients, gathered, held, is_divided, make_mesh, shard
from heedful.kernels.device import DtypeName
from heedful.models.load import load_causal_lm
from heedful.training.optimization import make_optimizer

PAIRS = [{"prompt": f"问{i}", "chosen": "好", "rejected": "坏"} for i in range(20)]
TEXTS = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
LONGER = [{"prompt": f"问{i}", "completion": "好的，当然"} for i in range(16)]
ONLINE: dict[str, Any] = {
    "rollout_batch_size": 8,
    "minibatch_size": 4,
    "max_new_tokens": 8,
    "steps": 2,
    "eval_fraction": 0.3,
}

FIRST_KL: dict[DtypeName, float] = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Limit of the KL of 8 tokens to the reference at the policy's start, by the dtype in which a device stores the reference;
the policy stays in float32. On an H200 bfloat16 gave 0.001 to 0.017 (larger weights), float16 0.0001."""


def _first_kl(summary: Any) -> float:
    return abs(summary["first_evaluation"]["eval/kl"])


def three_stages(bench: Workbench, dtype: DtypeName) -> Measurement:
    """SFT, a reward model, and PPO with each kind of critic. The policy begins at its reference."""
    data, texts = bench.data("pairs.jsonl", PAIRS), bench.data("sft.jsonl", TEXTS)
    common: dict[str, Any] = {"device": str(bench.device), "dtype": dtype, "eval_fraction": 0.3}
    offline: dict[str, Any] = common | {"max_steps": 2, "batch_size": 8}
    train_sft(SFTConfig(model=bench.model(), data=texts, output=bench.folder / "sft", **offline))
    start = str(bench.folder / "sft" / "final")
    train_reward(RewardConfig(model=start, data=data, output=bench.folder / "rm", **offline))
    kls = []
    for critic in ("shared", "separate", "reward"):
        settings = ONLINE | common | {"critic": critic, "score_norm_samples": 8, "entropy_coef": 0.01}
        rewards = (f"model:{bench.folder}/rm/final",)
        config = PPOConfig(model=start, rewards=rewards, data=data, output=bench.folder / critic, **settings)
        kls.append(_first_kl(train_ppo(config)))
    return Measurement(largest(kls), FIRST_KL[dtype], "KL to the reference at the start")


def grpo(bench: Workbench, settings: dict[str, Any]) -> Measurement:
    """GRPO with less memory; its model loads again."""
    online = ONLINE | {"minibatch_size": 8, "samples_per_prompt": 4, "device": str(bench.device)}
    data = bench.data("prompts.jsonl", [{"prompt": pair["prompt"]} for pair in PAIRS])
    config = GRPOConfig(model=bench.model(), data=data, output=bench.folder / "run", **online | settings)
    summary = train_grpo(config, rewards=[lambda completion_ids: [float(ids[0]) for ids in completion_ids]])
    load_causal_lm(str(bench.folder / "run" / "final"))
    return Measurement(_first_kl(summary), FIRST_KL["bfloat16"], "KL to the reference at the start")


def less_memory(bench: Workbench, settings: dict[str, Any], dtype: DtypeName) -> Measurement:
    """SFT learns as much with moments in main memory, or with weights in bfloat16."""
    if bench.device.type == "cpu" and "optimizer_device" in settings:
        raise LeftOutError("on a CPU moments are in main memory anyway")
    texts = bench.data("sft.jsonl", LONGER)
    common: dict[str, Any] = {"model": bench.model(hidden_size=64), "data": texts, "eval_data": texts}
    common |= {
        "device": str(bench.device),
        "dtype": dtype,
        "max_steps": 20,
        "batch_size": 8,
        "learning_rate": 1e-3,
    }
    fell = []
    for name, changes in (("plain", {}), ("less", settings)):
        summary = train_sft(SFTConfig(output=bench.folder / name, **common | changes))
        first, last = (summary[f"{when}_evaluation"]["eval/loss"] for when in ("first", "last"))
        fell.append(first - last)
        expect(first - last > 0.2 * first, f"{name}: the held-out loss went from {first:.3g} to {last:.3g}")
    return Measurement(abs(fell[1] / fell[0] - 1), 0.05, "off what SFT learns without")  # the noise of rounding


def bitsandbytes(bench: Workbench, settings: dict[str, Any]) -> Measurement:
    """SFT learns, a reward model comes back, PPO begins at its reference; 4-bit weights under adapters too."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise LeftOutError('bitsandbytes is not installed: pip install "heedful[gpu]"')
    data, texts = bench.data("pairs.jsonl", PAIRS), bench.data("sft.jsonl", TEXTS)
    common: dict[str, Any] = {"model": bench.model(hidden_size=64, spread=0.1), "device": str(bench.device)}
    common |= {"learning_rate": 1e-2, **settings}
    offline: dict[str, Any] = common | {"batch_size": 8}
    summary = train_sft(SFTConfig(data=texts, output=bench.folder / "sft", max_steps=20, eval_data=texts, **offline))
    first, last = (summary[f"{when}_evaluation"]["eval/loss"] for when in ("first", "last"))
    expect(last < 0.9 * first, f"the held-out loss went from {first:.3g} to {last:.3g}")
    train_reward(RewardConfig(data=data, output=bench.folder / "rm", max_steps=2, **offline))
    kls = []
    for critic in ("shared", "separate"):
        rewards, online = (f"model:{bench.folder}/rm/final",), ONLINE | common | {"critic": critic}
        kls.append(_first_kl(train_ppo(PPOConfig(rewards=rewards, data=data, output=bench.folder / critic, **online))))
    return Measurement(largest(kls), FIRST_KL["bfloat16"], "KL to the reference at the start")


def one_rank(bench: Workbench) -> Measurement:
    """All that a divided model does, in a world of one rank: passes, clipping, moments in main memory, gathering, files.

    It says that the collectives take these calls, not that several ranks agree.
    """
    if not (capabilities(bench.device).nccl or bench.device.type == "cpu"):
        raise LeftOutError(f"{bench.device.type} has no collectives")
    settings = SFTConfig(model="m", data="d", output=bench.folder, optimizer_device="cpu")
    backend = "cpu:gloo,cuda:nccl" if capabilities(bench.device).nccl else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole, divided = bench.policy(spread=0.1), bench.policy(spread=0.1)
        shard(divided, make_mesh(bench.device))
        ids = torch.arange(10, 42).view(2, 16).to(bench.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        norms = []
        for policy in (whole, divided):
            optimizer = make_optimizer([(policy, 1e-3)], settings)
            policy(ids, mask, mask[:, 8:]).logprobs.mean().backward()
            norms.append(float(clip_gradients([p for p in policy.parameters() if p.grad is not None], 0.1)))
            optimizer.step()
            places = {held(state["exp_avg"]).device.type for state in optimizer.state.values()}
            expect(places == {"cpu"}, f"moments are on {places}")
        expect(abs(norms[1] / norms[0] - 1) < 1e-5, f"norms of the gradient: {norms[0]} whole, {norms[1]} divided")
        write_parts(bench.folder / "parts", {name: p.detach() for name, p in divided.lm.named_parameters()})
        parts, copy = Parts(bench.folder / "parts"), dict(gathered(divided).lm.named_parameters())
        pairs = []
        for name, parameter in whole.lm.named_parameters():
            expect(is_divided(divided.lm.get_parameter(name)), f"{name} is not divided")
            pairs += [(copy[name], parameter), (parts.stored(name).read(), parameter)]
    finally:
        dist.destroy_process_group()
    return Measurement(furthest(pairs, relative=1e-5), 1e-6, "weights after a step, from the undivided ones")
