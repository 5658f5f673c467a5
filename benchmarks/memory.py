"""Planned memory (heedful plan) beside the memory that runs took, for models of three sizes with random weights.

python benchmarks/memory.py --output runs/memory

Each run is a process of its own: two optimizer steps (rollout batches) on texts of one length. Its memory is the most that it
held, less what it held after the same run with a model of almost no size: Python, torch, what they import, and code that is
compiled. It is measured twice: with freed memory given back to the system at once, so that a process holds its tensors and no
more, and as heedful runs, where freed memory is kept for the next tensors (`heedful.kernels.device.reuse_memory`), which is
faster and leaves holes. Prints a table in Markdown; docs/memory.md has one.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "none": {"vocabulary": 16_384, "layers": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "intermediate": 8},
    "34M": {"vocabulary": 16_384, "layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1536},
    "110M": {"vocabulary": 32_768, "layers": 12, "hidden": 768, "heads": 12, "kv_heads": 6, "intermediate": 2304},
    "235M": {"vocabulary": 32_768, "layers": 16, "hidden": 1024, "heads": 16, "kv_heads": 8, "intermediate": 3072},
}
MIXTURES = {"mixture": {"like": "34M", "experts": 8, "width": 768}}
"""Sizes whose layers have experts, two to a token, in place of an MLP."""
PROMPT, RESPONSE = 64, 64
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("sft", {}),
    "SFT, recomputed activations": ("sft", {"gradient_checkpointing": True}),
    "SFT, LoRA": ("sft", {"lora_rank": 16}),
    "SFT, LoRA, recomputed activations": ("sft", {"lora_rank": 16, "gradient_checkpointing": True}),
    "SFT, LoRA, attention only": ("sft", {"lora_rank": 16, "lora_targets": "q_proj,k_proj,v_proj,o_proj"}),
    "DPO": ("dpo", {"micro_batch_size": 4}),
    "DPO, LoRA": ("dpo", {"micro_batch_size": 4, "lora_rank": 16}),
    "reward model": ("reward", {"micro_batch_size": 4}),
    "GRPO": ("grpo", {}),
    "GRPO, LoRA": ("grpo", {"lora_rank": 16}),
    "PPO, shared critic": ("ppo", {}),
    "PPO, critic of its own": ("ppo", {"critic": "separate"}),
    "PPO, critic of its own, LoRA": ("ppo", {"critic": "separate", "lora_rank": 16}),
}


def make(folder: Path, seed: int) -> None:
    """The models, their tokenizer, and a file of prompts with two completions each."""
    from workload import Shape, make_classifier, make_policy, make_prompts, make_tokenizer

    for name in (*SIZES, *MIXTURES):
        experts = MIXTURES.get(name)
        shape, here = Shape(**SIZES[experts["like"] if experts else name]), folder / name
        tokenizer = make_tokenizer(shape.vocabulary)
        for kind, model in (("policy", make_policy(shape, seed)), ("reward", make_classifier(shape, seed))):
            (with_experts(model, experts, seed) if experts else model).save_pretrained(here / kind)
            tokenizer.save_pretrained(here / kind)
        texts = tokenizer.decode(make_prompts(shape.vocabulary, 64, PROMPT + 2 * RESPONSE, seed))
        rows = []
        for text in texts:
            words = [" " + word for word in text.split()]
            prompt, chosen, rejected = words[:PROMPT], words[PROMPT : PROMPT + RESPONSE], words[PROMPT + RESPONSE :]
            row = {"prompt": prompt, "chosen": chosen[:-1], "rejected": rejected[:-1]}  # the end is a token too
            rows.append({key: "".join(value) for key, value in row.items()})
        for file, columns in (("pairs", None), ("demonstrations", {"chosen": "completion"}), ("prompts", {})):
            kept = rows if columns is None else [
                {"prompt": row["prompt"]} | {new: row[old] for old, new in columns.items()} for row in rows
            ]  # fmt: skip
            lines = "".join(json.dumps(row) + "\n" for row in kept)
            (here / f"{file}.jsonl").write_text(lines, encoding="utf-8")


def with_experts(model: Any, experts: dict[str, Any], seed: int) -> Any:
    """A Qwen3 mixture of the widths of a dense model, with random weights."""
    import transformers

    widths = {k: v for k, v in model.config.to_diff_dict().items() if k not in ("architectures", "dtype", "model_type")}
    config = transformers.Qwen3MoeConfig(
        **widths
        | {"num_experts": experts["experts"], "moe_intermediate_size": experts["width"], "num_experts_per_tok": 2}
    )
    torch.manual_seed(seed)
    mixture = getattr(transformers, type(model).__name__.replace("Qwen3", "Qwen3Moe"))(config)
    if hasattr(model, "generation_config"):
        mixture.generation_config = model.generation_config
    return mixture


def settings(folder: Path, size: str, run: str, dtype: str, seed: int) -> Any:
    """The configuration of a run."""
    from heedful import DPOConfig, GRPOConfig, PPOConfig, RewardConfig, SFTConfig

    command, changes = RUNS[run]
    here = folder / size
    data = {"sft": "demonstrations", "dpo": "pairs", "reward": "pairs"}.get(command, "prompts")
    common = {
        "model": str(here / "policy"),
        "data": str(here / f"{data}.jsonl"),
        "output": folder / "run",
        "overwrite": True,
        "eval_fraction": 0.0,
        "eval_every": 0,
        "sample_every": 0,
        "device": "cpu",
        "dtype": dtype,
        "seed": seed,
        "micro_batch_size": 8,
    }
    if command in ("ppo", "grpo"):
        common |= {
            "steps": 2,
            "rollout_batch_size": 16,
            "minibatch_size": 16,
            "rollout_micro_batch_size": 16,
            "ppo_epochs": 1,
            "max_new_tokens": RESPONSE,
            "response_length": "fixed",
            "rewards": (f"model:{here / 'reward'}",),
        }
    else:
        common |= {"max_steps": 2, "batch_size": 16 if command == "sft" else 8}
    kind = {"sft": SFTConfig, "dpo": DPOConfig, "reward": RewardConfig, "ppo": PPOConfig, "grpo": GRPOConfig}[command]
    return kind(**common | changes)


def give_back_memory() -> None:
    """From here on, glibc returns freed blocks of 64 KiB or more to the system at once."""
    from heedful.kernels import device

    def return_at_once() -> None:
        mallopt, m_trim_threshold, m_mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
        mallopt(m_mmap_threshold, 2**16)
        mallopt(m_trim_threshold, 2**16)

    device.reuse_memory = return_at_once


def measure(config: Any, smallest: Any) -> dict[str, Any]:
    """GB planned and held. ``smallest`` are the same settings with a model of almost no size."""
    from scaling_point import memory

    import heedful
    from heedful.models.shape import load_shape
    from heedful.planning.memory import Lengths, plan_of

    train = {
        "SFTConfig": heedful.train_sft,
        "DPOConfig": heedful.train_dpo,
        "RewardConfig": heedful.train_reward,
        "PPOConfig": heedful.train_ppo,
        "GRPOConfig": heedful.train_grpo,
    }[type(config).__name__]
    train(smallest)
    before = memory("VmRSS")
    train(config)
    peak = memory("VmHWM") - before
    lengths = Lengths(PROMPT + RESPONSE, PROMPT)
    found = plan_of(config, load_shape, lengths, device="cpu", half=config.dtype != "float32")
    return {"planned": found.peak / 1e9, "measured": peak, "phase": found.peak_phase, "phases": found.phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for models and runs, about 4 GB")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, *MIXTURES], default=list(SIZES)[1:])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", action="store_true", help="measure the first of --sizes and --runs in this process")
    parser.add_argument("--give-back", action="store_true", help="with --one: give freed memory back at once")
    parser.add_argument("--make", action="store_true", help="write the models and stop")
    options = parser.parse_args()
    if options.make:
        make(options.output, options.seed)
        return
    if options.one:
        if options.give_back:
            give_back_memory()
        configs = (
            settings(options.output, size, options.runs[0], options.dtype, options.seed)
            for size in (options.sizes[0], "none")
        )
        print(json.dumps(measure(*configs)))
        return
    again = [sys.executable, __file__, "--output", str(options.output), "--seed", str(options.seed)]
    if not options.output.is_dir():
        subprocess.run([*again, "--make"], check=True)
    print("| model | run | planned, GB | tensors, GB | planned / tensors | as it runs, GB | planned / as it runs |")
    print("|---|---|---|---|---|---|---|")
    for size in options.sizes:
        for run in options.runs:
            point = [*again, "--dtype", options.dtype, "--one", "--sizes", size, "--runs", run]
            cells = [size, run]
            for way in ("--give-back",), ():
                done = subprocess.run([*point, *way], check=True, stdout=subprocess.PIPE, text=True)
                one = json.loads(done.stdout.splitlines()[-1])
                cells += [f"{one['planned']:.2f}"] if way else []
                cells += [f"{one['measured']:.2f}", f"{one['planned'] / one['measured']:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
