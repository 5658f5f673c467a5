"""How much faster a step is on several ranks, and what part of it is spent on exchanging numbers.

OMP_NUM_THREADS=1 python benchmarks/several_devices.py FOLDER/policy FOLDER/prompts.jsonl
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/several_devices.py FOLDER/policy FOLDER/prompts.jsonl

benchmarks/scaling_point.py makes such a folder; any model and prompts do. It trains GRPO and SFT on responses of one length
and prints, for each: median seconds of a step and their spread, sequences per second, the share of the time that rank 0 spent
in exchanges (with waiting for the others), and the megabytes that it added up.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from heedful import GRPOConfig, SFTConfig, train_grpo, train_sft
from heedful.distributed import ranks
from heedful.training.run import Run

spent = {"seconds": 0.0, "bytes": 0}
steps: list[tuple[float, float, int]] = []
"""For each step logged: the time, seconds spent in exchanges so far, and bytes so far."""


def watch() -> None:
    """Take down what exchanges cost from now on, and when each step is done."""
    complete, reduce, log = ranks.complete, ranks._all_reduce, Run.log

    @contextlib.contextmanager
    def timed() -> Any:
        started = time.perf_counter()
        with complete():
            yield
        spent["seconds"] += time.perf_counter() - started

    def counted(tensor: Any, **options: Any) -> None:
        spent["bytes"] += tensor.numel() * tensor.element_size()
        reduce(tensor, **options)

    def logged(self: Run, step: int, *arguments: Any, **options: Any) -> None:
        log(self, step, *arguments, **options)
        steps.append((time.perf_counter(), spent["seconds"], int(spent["bytes"])))

    ranks.complete, ranks._all_reduce, Run.log = timed, counted, logged  # measured ones in their place


def score(completion_ids: list[list[int]]) -> list[float]:
    """A reward that costs nothing and tells responses apart."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def measure(name: str, options: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Train, and return what a step took; the first is left out."""
    steps.clear()
    common: dict[str, Any] = {"model": options.model, "output": output / name, "sample_every": 0, "eval_fraction": 0.0}
    common |= {"micro_batch_size": options.micro_batch_size, "max_samples": 512, "overwrite": True}
    if name == "grpo":
        config = GRPOConfig(
            **common,
            data=options.prompts,
            steps=options.steps + 1,
            rollout_batch_size=options.rows,
            minibatch_size=options.rows // 2,
            max_new_tokens=options.tokens,
            response_length="fixed",
        )
        train_grpo(config, [score])
    else:
        train_sft(
            SFTConfig(**common, data=options.demonstrations, batch_size=options.rows, max_steps=options.steps + 1)
        )
    seconds = [after[0] - before[0] for before, after in itertools.pairwise(steps)]
    exchanged = [after[1] - before[1] for before, after in itertools.pairwise(steps)]
    return {
        "case": name,
        "ranks": ranks.size(),
        "seconds": round(statistics.median(seconds), 3),
        "spread": [round(min(seconds), 3), round(max(seconds), 3)],
        "sequences_per_second": round(options.rows / statistics.median(seconds), 2),
        "exchange_share": round(sum(exchanged) / sum(seconds), 4),
        "megabytes_per_step": round((steps[-1][2] - steps[0][2]) / len(seconds) / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--demonstrations", help="for SFT; without it only GRPO is measured")
    parser.add_argument("--output", type=Path, default=Path("runs/several-devices"), help="replaced if it is there")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    options = parser.parse_args()
    watch()
    for name in ("grpo", "sft") if options.demonstrations else ("grpo",):
        found = measure(name, options, options.output)
        if ranks.is_first():
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
