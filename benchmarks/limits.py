"""The phases of a PPO iteration, as long as they take, beside what this machine needs for them at the least.

python benchmarks/limits.py runs/workload --output runs/limits [--natural] [--critic shared]

Runs heedful's own PPO on the folder of benchmarks/workload.py and prints, for each phase, the median of its seconds and two
limits of the work that benchmarks/flops.py counts (real tokens, each once; the pass for the old log-probs is not in it):

- hard: at the rate of the best product of matrices that was found here, large ones included, or at the rate at which memory
  is read (weights and cache once a token, what the optimizer touches once a step); of known GPUs at the maker's figures.
- attainable: every product at the rate that was measured for its own shape: as many rows as there are unfinished responses
  or tokens in a micro-batch. What lies between the two is the price of small products, whoever multiplies them.

Also writes limits.json into the output folder. Nothing else should run at the same time.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flops
import torch
from flops import Decoder, Work
from machine import Machine

from heedful import PPOConfig, train_ppo
from heedful.data.chat import Renderer, RewardInputs
from heedful.errors import HeedfulError
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.models.source import load_config
from heedful.models.tokenizer import load_tokenizer
from heedful.types import Message

PHASES = {
    "rollout": ("prefill", "decode", "sampling"),
    "score": ("reference", "value", "reward"),
    "update": ("train", "optimizer"),
}
Parts = dict[str, Work]


@dataclass(frozen=True)
class Lengths:
    """Tokens of each row of a rollout batch."""

    prompts: Sequence[int]
    responses: Sequence[int]
    read_by_reward: Sequence[int]


@dataclass
class LengthRecorder:
    """A reward function that applies to nothing and remembers how long everything was."""

    policy: Renderer
    reward: RewardInputs
    batches: list[Lengths] = field(default_factory=list)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any],
        truncated: Sequence[bool],
    ) -> list[None]:
        texts = [p if isinstance(p, str) else tuple(Message(m["role"], m["content"]) for m in p) for p in prompts]
        said = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        rows = [
            self.reward.encode(text, response, truncated=cut)
            for text, response, cut in zip(texts, said, truncated, strict=True)
        ]
        self.batches.append(
            Lengths(
                prompts=[len(self.policy.prompt_ids(text)) for text in texts],
                responses=[len(ids) + (not cut) for ids, cut in zip(completion_ids, truncated, strict=True)],
                read_by_reward=[len(row["input_ids"]) for row in rows],
            )
        )
        return [None] * len(prompts)


def ppo_config(options: argparse.Namespace) -> PPOConfig:
    """PPO on a workload, the rollout batch sampled at once and one optimizer step an epoch."""
    folder: Path = options.workload
    return PPOConfig(
        model=str(folder / ("policy-natural" if options.natural else "policy")),
        value_model=str(folder / "value") if options.critic == "separate" else None,
        critic=options.critic,
        rewards=(f"model:{folder / 'reward'}",),
        data=str(folder / "prompts.jsonl"),
        output=options.output / "run",
        overwrite=True,
        steps=options.warmup + options.iterations,
        rollout_batch_size=options.batch,
        minibatch_size=options.batch,
        rollout_micro_batch_size=options.batch,
        micro_batch_size=options.micro_batch_size,
        samples_per_prompt=options.samples_per_prompt,
        ppo_epochs=options.ppo_epochs,
        max_new_tokens=options.response_length,
        response_length="stop" if options.natural else "fixed",
        eval_fraction=0.0,
        eval_every=0,
        sample_every=0,
        device=options.device,
        dtype=options.dtype,
    )


def reward_model(config: PPOConfig) -> str:
    """The folder of the one reward."""
    return config.rewards[0].removeprefix("model:")


def measured(config: PPOConfig, warmup: int) -> tuple[list[dict[str, float]], list[Lengths]]:
    """Seconds of each phase and lengths of each row, of every iteration but the first ones."""
    reads = RewardInputs(load_tokenizer(reward_model(config)))
    recorder = LengthRecorder(Renderer(load_tokenizer(config.model)), reads)
    train_ppo(config, rewards=[recorder])
    lines = (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    seconds = [{phase: step[f"time/{phase}"] for phase in PHASES} for step in steps]
    return seconds[warmup:], recorder.batches[-len(steps) :][warmup:]


def parts_of(
    lengths: Lengths, config: PPOConfig, *, policy: Decoder, critic: Decoder | None, reward: Decoder, width: int
) -> Parts:
    """What each part of an iteration has to do; ``width`` bytes a number in the compute dtype."""
    prompts, responses = lengths.prompts, lengths.responses
    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    steps = config.ppo_epochs * (config.rollout_batch_size // config.minibatch_size)
    here = {"width": width, "micro_batch_size": config.micro_batch_size}
    together = here | {"micro_batch_size": config.rollout_micro_batch.rows}
    parameters = policy.parameters(head=True) + (critic.parameters(head=False) if critic else 0)
    return {
        "prefill": flops.prefill(policy, prompts[:: config.samples_per_prompt], width=width),
        "decode": flops.decode(policy, prompts, responses, width=width),
        "sampling": flops.sampling(policy, responses),
        "reference": flops.score(policy, rows, head_tokens=sum(responses), **here),
        "value": flops.score(critic, rows, head_tokens=0, **here) if critic else Work(),
        "reward": flops.score(reward, lengths.read_by_reward, head_tokens=0, **together),
        "train": flops.train(
            policy, critic, rows, head_tokens=sum(responses), epochs=config.ppo_epochs, steps=steps, **here
        ),
        "optimizer": flops.optimizer(parameters, steps=steps, width=width),
    }


def rows_of(machine: Machine, seconds: Sequence[dict[str, float]], works: Sequence[Parts]) -> list[dict[str, Any]]:
    """A row a phase, its parts, and the total; every number is the median over iterations."""

    def row(name: str, parts: Sequence[str], taken: Sequence[float] | None) -> dict[str, Any]:
        def median(number: Any) -> float:
            return statistics.median(sum(number(work[part]) for part in parts) for work in works)

        limits = {"hard": median(machine.hard), "attainable": median(machine.attainable)}
        counts = {"gflop": median(lambda work: work.total_flops / 1e9), "gbyte": median(lambda work: work.bytes / 1e9)}
        if taken is None:
            return {"phase": name, **counts, **limits}
        seconds = statistics.median(taken)
        shares = {f"{limit}_percent": 100 * value / seconds for limit, value in limits.items()}
        return {"phase": name, "seconds": seconds, **counts, **limits, **shares}

    for work in works:  # before any hard limit, which is the best of all rates
        for part in work.values():
            machine.attainable(part)
    rows = []
    for phase, parts in PHASES.items():
        rows.append(row(phase, parts, [one[phase] for one in seconds]))
        rows += [row(f"- {part}", [part], None) for part in parts]
    return [
        *rows,
        row("iteration", [p for parts in PHASES.values() for p in parts], [sum(s.values()) for s in seconds]),
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| phase | GFLOP | GB | measured s | hard limit s | of it | attainable s | of it |", "|---|" + "---:|" * 7]
    for row in rows:
        cells = [f"{row['gflop']:.1f}", f"{row['gbyte']:.2f}"]
        cells += [f"{row['seconds']:.3f}" if "seconds" in row else ""]
        for limit in ("hard", "attainable"):
            share = row.get(f"{limit}_percent")
            cells += [f"{row[limit]:.4f}", "" if share is None else f"{share:.0f} %"]
        lines.append(f"| {row['phase']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Measure, price, print and write."""
    config = ppo_config(options)
    models = {"policy": config.model, "critic": config.value_model, "reward": reward_model(config)}
    shapes: Any = {part: flops.decoder_of(load_config(name)) if name else None for part, name in models.items()}
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    seconds, lengths = measured(config, options.warmup)
    machine = Machine(device, dtype)
    works = [parts_of(one, config, **shapes, width=dtype.itemsize) for one in lengths]
    rows = rows_of(machine, seconds, works)
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "best_gflops": machine.peak() / 1e9,
        "read_gbytes_by_size": {f"{size / 2**20:g} MiB": rate / 1e9 for size, rate in machine.bandwidths.items()},
        "maker": machine.maker if any(machine.maker) else None,
        "mean_response": statistics.mean(length for one in lengths for length in one.responses),
        "iterations": seconds,
        "phases": rows,
    }
    (options.output / "limits.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    reads = ", ".join(f"{rate:.0f} GB/s of {size}" for size, rate in facts["read_gbytes_by_size"].items())
    print(
        f"\n{facts['device']}, {facts['threads']} threads, {facts['dtype']}; mean response {facts['mean_response']:.1f}"
    )
    print(f"best product {facts['best_gflops']:.0f} GFLOP/s, reads {reads}\n\n{table(rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path, help="folder of benchmarks/workload.py")
    parser.add_argument("--output", type=Path, required=True, help="folder for the run and limits.json")
    parser.add_argument("--natural", action="store_true", help="responses end by themselves: policy-natural")
    parser.add_argument("--critic", choices=("separate", "shared"), default="separate")
    parser.add_argument("--batch", type=int, default=64, help="responses an iteration")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--samples-per-prompt", type=int, default=1)
    parser.add_argument("--response-length", type=int, default=64, help="tokens, at most")
    parser.add_argument("--ppo-epochs", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1, help="iterations that are not measured")
    parser.add_argument("--iterations", type=int, default=5, help="iterations that are")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    try:
        run(parser.parse_args())
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
