"""heedful rehearsed on the pretend accelerator: every trainer with its options, against the CPU.

python tests/accelerator/rehearsal.py           # the table of tests/accelerator/README.md
python tests/accelerator/rehearsal.py ppo lora  # of the rows with these words
"""

import contextlib
import functools
import io
import json
import sys
import tempfile
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]

import pretend_device
import servers

from heedful import (
    A2CConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RewardConfig,
    SFTConfig,
    devices,
    make_tiny_model,
)
from heedful.algorithms import dpo, kto, online_dpo, ppo, reward_model, sft
from heedful.algorithms.online import start, update, values
from heedful.engines import generate
from heedful.kernels import attention, head_logprobs
from heedful.kernels import device as kernels_device
from heedful.kernels.cpu import layers, products
from heedful.rewards import models as reward_models
from heedful.training import setup
from heedful.training.compact_adamw import CompactAdamW
from trainers import TRAIN

DEVICE = pretend_device.NAME
STEPS = 2

TEXTS, PAIRS, LABELS = "texts.jsonl", "pairs.jsonl", "labels.jsonl"
OFFLINE = {"batch_size": 8, "micro_batch_size": 8, "max_steps": STEPS, "learning_rate": 1e-3}
ONLINE = {
    "data": PAIRS, "steps": STEPS, "rollout_batch_size": 8, "minibatch_size": 4, "micro_batch_size": 4, "ppo_epochs": 2,
    "max_new_tokens": 20, "learning_rate": 1e-3,
}  # fmt: skip
SFT = {"data": TEXTS, **OFFLINE}
REWARD = {"data": PAIRS, **OFFLINE}
MODEL_REWARD = {"rewards": ("model:reward",)}

CASES = {
    "sft": (SFTConfig, SFT),
    "sft, LoRA": (SFTConfig, SFT | {"lora_rank": 4}),
    "sft, gradient checkpointing": (SFTConfig, SFT | {"gradient_checkpointing": True}),
    "sft, moments on the host": (SFTConfig, SFT | {"optimizer_device": "cpu"}),
    "sft, weights in bfloat16": (SFTConfig, SFT | {"weights_dtype": "bfloat16", "dtype": "bfloat16"}),
    "sft, autocast to bfloat16": (SFTConfig, SFT | {"dtype": "bfloat16"}),
    "sft, evaluation, best/, resumable": (SFTConfig, SFT | {"eval_every": 1, "save_every": 1, "sample_every": 1}),
    "reward": (RewardConfig, REWARD),
    "reward, LoRA": (RewardConfig, REWARD | {"lora_rank": 4}),
    "reward, autocast to bfloat16": (RewardConfig, REWARD | {"dtype": "bfloat16"}),
    "dpo": (DPOConfig, REWARD),
    "dpo, LoRA": (DPOConfig, REWARD | {"lora_rank": 4}),
    "dpo, reference on the host": (DPOConfig, REWARD | {"reference_device": "cpu"}),
    "dpo, ipo": (DPOConfig, REWARD | {"loss": "ipo"}),
    "dpo, simpo": (DPOConfig, REWARD | {"loss": "simpo"}),
    "dpo, orpo": (DPOConfig, REWARD | {"loss": "orpo"}),
    "kto": (KTOConfig, {"data": LABELS, **OFFLINE}),
    "ppo": (PPOConfig, ONLINE),
    "ppo, separate critic": (PPOConfig, ONLINE | {"critic": "separate"}),
    "ppo, critic from a reward model": (PPOConfig, ONLINE | MODEL_REWARD | {"critic": "reward", "score_norm_samples": 8}),
    "ppo, value loss into the trunk": (PPOConfig, ONLINE | {"value_coef": 0.1}),
    "ppo, LoRA, separate critic": (PPOConfig, ONLINE | {"lora_rank": 4, "critic": "separate"}),
    "ppo, reference and moments on the host": (PPOConfig, ONLINE | {"reference_device": "cpu", "optimizer_device": "cpu"}),
    "ppo, gradient checkpointing": (PPOConfig, ONLINE | {"gradient_checkpointing": True}),
    "ppo, demonstrations mixed in": (PPOConfig, ONLINE | {"ptx_data": TEXTS, "ptx_coef": 0.1}),
    "ppo, average of the weights": (PPOConfig, ONLINE | {"ema_decay": 0.5}),
    "ppo, autocast to bfloat16": (PPOConfig, ONLINE | {"dtype": "bfloat16"}),
    "ppo, micro-batches": (PPOConfig, ONLINE | {"micro_batch_size": 2, "rollout_micro_batch_size": 3}),
    "ppo, entropy, limits": (PPOConfig, ONLINE | {"entropy_coef": 0.01, "approx_kl_limit": 1.0, "target_entropy": 3.0}),
    "ppo, held-out judge, evaluation, resumable": (
        PPOConfig, ONLINE | {"selection_rewards": ("model:reward",), "eval_every": 1, "save_every": 1, "rollouts": "all"}),
    "ppo, reward model": (PPOConfig, ONLINE | MODEL_REWARD),
    "ppo, a judge on a server": (PPOConfig, ONLINE | {"rewards": (servers.JUDGE,)}),
    "a2c": (A2CConfig, {name: value for name, value in ONLINE.items() if name not in ("ppo_epochs", "minibatch_size")}),
    "grpo": (GRPOConfig, ONLINE | {"samples_per_prompt": 4, "ppo_epochs": 1}),
    "grpo, LoRA, two epochs": (GRPOConfig, ONLINE | {"samples_per_prompt": 4, "lora_rank": 4}),
    "grpo, a sampling server, a step ahead": (
        GRPOConfig, ONLINE | {
            "samples_per_prompt": 4, "sampler": (servers.SAMPLER,), "async_steps": 1, "importance": "token-truncate"}),
    "grpo, only whole responses, dynamic sampling": (
        GRPOConfig, ONLINE | {"samples_per_prompt": 4, "mask_truncated": True, "dynamic_sampling_rounds": 2}),
    "rloo": (GRPOConfig, ONLINE | {"samples_per_prompt": 4, "advantage": "rloo"}),
    "online-dpo": (OnlineDPOConfig, ONLINE | {"samples_per_prompt": 2, "ppo_epochs": 1}),
    "online-dpo, LoRA": (OnlineDPOConfig, ONLINE | {"samples_per_prompt": 2, "lora_rank": 4}),
}  # fmt: skip
"""Every trainer with its options."""


@dataclass
class Row:
    """What a run left behind, and what the device counted."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    counts: dict[str, pretend_device.Counts] = field(default_factory=dict)
    tokens: int = 0
    """Steps of sampling, a token for each row of the batch."""
    batches: int = 0
    """Batches of prompts that were read together: the first rows', and those of rows that begin where others have ended."""
    minibatches: int = 0

    def waits(self, phase: str) -> int:
        """How often the host waited for the device in a phase."""
        return self.counts[phase].synchronisations.total() if phase in self.counts else 0


def equal(one: Row, other: Row) -> bool:
    """Bit for bit the same weights, and the same metrics but for seconds and memory; neither may be missing."""
    if not (one.weights and one.metrics) or one.weights.keys() != other.weights.keys():
        return False
    same = [torch.equal(weight, other.weights[name]) for name, weight in one.weights.items()]
    return all(same) and one.metrics == other.metrics


def without_kernels_of_the_cpu() -> None:
    """Let heedful compute on the CPU as on any other device, where it has its own layers, products and attention: they round
    otherwise. Weights are not those of the mapped file, whose address decides how a product rounds."""
    devices.CAPABILITIES["cpu"] = replace(devices.CAPABILITIES["cpu"], queues=True)
    layers._replace = lambda _module, _replacement: None
    layers.MOST_READ = 0
    products.USES_ONEDNN = False
    products.PackedLinear.is_possible = staticmethod(lambda _module: False)
    head_logprobs._writes_over = lambda _states, _options: False
    attention._is_faster = lambda _query, _key: False
    for module in (kernels_device, reward_models, setup, start):
        module.frozen_dtype = lambda _device, dtype: dtype if dtype in kernels_device.HALF else torch.float32
    for module in (attention, layers, products):
        module.compiles_each_shape = lambda _device: False
    to = torch.nn.Module.to

    def aligned(module, *args, **kwargs):
        to(module, *args, **kwargs)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
                tensor.data = tensor.data.clone()
        return module

    torch.nn.Module.to = aligned


def watch(row: Row) -> contextlib.ExitStack:
    """Count the phases of what runs in this context."""
    changes = contextlib.ExitStack()

    def put(module, name, function):
        changes.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, function)

    def counted(name, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            row.minibatches += name == "minibatch" and function.__name__ == "take_step"
            with pretend_device.phase(name):
                return function(*args, **kwargs)

        return run

    for module in (sft, reward_model, dpo, kto, ppo, online_dpo):
        put(module, "learn", counted("update", module.learn))
    for module in (ppo, online_dpo):
        put(module, "backward_minibatch", counted("minibatch", module.backward_minibatch))
        put(module, "make_experience", counted("experience", module.make_experience))
    put(update.MetricSums, "means", counted("metrics", update.MetricSums.means))
    put(update, "take_step", counted("minibatch", update.take_step))
    put(values, "take_step", counted("value head", values.take_step))
    decode, read_prompts = generate.decode, generate.Decoder.read_prompts

    def read(*args, **kwargs):
        row.batches += 1
        return read_prompts(*args, **kwargs)

    def steps(*args, **kwargs):
        found = decode(*args, **kwargs)
        while True:
            with pretend_device.phase("decode"):
                step = next(found, None)
            if step is None:
                return
            row.tokens += 1
            yield step

    put(generate.Decoder, "read_prompts", read)
    put(generate, "decode", steps)
    return changes


def prepare(folder: Path, with_reward: bool = True) -> None:
    """A tiny model, a reward model of it, and data."""
    torch.manual_seed(0)
    make_tiny_model("qwen3", folder / "model", hidden_size=32, initializer_range=0.1)
    rows = [
        {"prompt": f"问{i}" * (1 + i % 3), "chosen": "好的，当然" * (1 + i % 2), "rejected": "坏"} for i in range(24)
    ]
    files = {
        PAIRS: rows,
        TEXTS: [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows],
        LABELS: [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0} for i, row in enumerate(rows)
        ],
    }
    for name, content in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        (folder / name).write_text(text, encoding="utf-8")
    if not with_reward:
        return
    config = RewardConfig(
        model=str(folder / "model"), output=folder / "trained", device="cpu", **_in(folder, REWARD, {})
    )
    TRAIN[RewardConfig](config)
    (folder / "trained" / "final").rename(folder / "reward")


def _in(folder: Path, options: dict, ports: dict[str, int]) -> dict:
    """Options with the paths of files in a folder, and the ports of servers."""
    paths = {name: str(folder / value) for name, value in options.items() if value in (TEXTS, PAIRS, LABELS)}
    named = {
        name: tuple(one.format(**ports).replace("model:", f"model:{folder}/") for one in options[name])
        for name in ("rewards", "selection_rewards", "sampler")
        if name in options
    }
    return options | paths | named


def first_id(completion_ids):
    """A reward: the id of the first token, and something for the length."""
    return [float(ids[0] % 17) + 0.1 * len(ids) for ids in completion_ids]


def _with_moments_apart(groups, *, betas, eps, fused):
    """What the CPU computes with the optimizer for moments on the host, which it refuses as useless there."""
    assert fused
    return CompactAdamW(groups, betas=betas, eps=eps, seed=3)


def run(name: str, device: str, folder: Path) -> Row:
    """Train on a device."""
    kind, options = CASES[name]
    of_torch = torch.optim.AdamW
    if device == "cpu" and "optimizer_device" in options:
        torch.optim.AdamW = _with_moments_apart
    if device == "cpu":
        options = options | {key: "same" for key in ("optimizer_device", "reference_device") if key in options}
    output = folder / f"{name}-{device}".replace(" ", "-").replace("/", "-").replace(",", "")
    common = {"model": str(folder / "model"), "device": device, "dtype": "float32", "eval_fraction": 0.3, "seed": 3}
    is_online = "rollout_batch_size" in options
    rewards = {"rewards": [first_id]} if is_online and "rewards" not in options else {}
    row = Row()
    pretend_device.phases.clear()
    try:
        with servers.ports(str(options), common["model"], folder / PAIRS) as ports, watch(row):
            TRAIN[kind](kind(output=output, **common | _in(folder, options, ports)), **rewards)
    finally:
        torch.optim.AdamW = of_torch
    row.counts = dict(pretend_device.phases)
    if not is_online:
        row.minibatches = STEPS
    for file in sorted(output.glob("*/**/*.safetensors")):
        if "final" in file.parts or "best" in file.parts:
            row.weights |= {f"{file.relative_to(output)} {key}": x for key, x in load_file(file).items()}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = ("time/", "perf/")
    row.metrics = [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]
    return row


def both(name: str, folder: Path) -> tuple[Row, Row]:
    """A run on the CPU, and one on the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(name, "cpu", folder), run(name, DEVICE, folder)


HEAD = (
    "| trainer, options | equal | waits per sampled token | per minibatch | per step outside of minibatches | copies to the "
    "device and host per step | kB there and back |"
)


def line_of(name: str, on_cpu: Row, on_device: Row) -> str:
    """A line of the table."""
    counts = [on_device.counts[phase] for phase in ("decode", "experience", "update") if phase in on_device.counts]
    copies = {way: sum(one.copies[f"to {way}"] for one in counts) / STEPS for way in ("device", "host")}
    size = {way: sum(one.bytes[f"to {way}"] for one in counts) / STEPS / 1000 for way in ("device", "host")}
    waits = {phase: on_device.waits(phase) for phase in ("decode", "experience", "update", "minibatch")}
    is_online = "minibatch" in on_device.counts
    per_minibatch = (waits["minibatch"] if is_online else waits["update"]) / on_device.minibatches
    outside = (waits["experience"] + waits["update"] - waits["minibatch"]) / STEPS if is_online else 0
    return (
        f"| {name} | {'yes' if equal(on_cpu, on_device) else '**no**'} | "
        f"{waits['decode'] / max(1, on_device.tokens):.2f} | {per_minibatch:.1f} | {outside:.1f} | "
        f"{copies['device']:.0f}, {copies['host']:.0f} | {size['device']:.1f}, {size['host']:.1f} |"
    )


def main(words: list[str]) -> None:
    pretend_device.install()
    without_kernels_of_the_cpu()
    torch.set_num_threads(1)
    print(HEAD, "|---|---|---|---|---|---|---|", sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            prepare(Path(folder))
        for name in CASES:
            if all(word.lower() in name.lower() for word in words):
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    line = line_of(name, *both(name, Path(folder)))
                print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
