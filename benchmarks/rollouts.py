r"""What ``--rollouts all`` costs: the same steps of PPO with and without it, in turns, one thread.

    python benchmarks/rollouts.py --model runs/demo/sft/final --reward runs/demo/reward/final \
        --data runs/demo/world/prompts.jsonl

It prints, per pair, the seconds of the processor and by the clock that the steps took, and the medians of the differences;
and the share of the steps' seconds that writing the files takes, measured around it. Beside other programs the clock means
nothing, and pairs differ by more than what they measure: then the share is the better number.
"""

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from heedful import PPOConfig, train_ppo
from heedful.algorithms.online import loop
from heedful.configs.parse import parse
from heedful.display import silence

RECIPE = Path(__file__).resolve().parents[1] / "src" / "heedful" / "apps" / "demo" / "recipe" / "ppo.yaml"


class Writing:
    """`write_rollouts`, with the seconds of the processor that it took in each step."""

    def __init__(self) -> None:
        self.write, self.seconds = loop.write_rollouts, list[float]()

    def __call__(self, *given: object) -> None:
        began = time.process_time()
        self.write(*given)
        self.seconds.append(time.process_time() - began)


class Clock:
    """Seconds of the processor and by the clock since the first step's end: without loading and the first evaluation."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def __call__(self, _step: int, _metrics: object) -> None:
        self.times.append((time.process_time(), time.perf_counter()))

    @property
    def seconds(self) -> tuple[float, float]:
        """Of the processor, and by the clock."""
        (cpu, wall), (last_cpu, last_wall) = self.times[0], self.times[-1]
        return last_cpu - cpu, last_wall - wall


def measured(options: argparse.Namespace, rollouts: str, folder: Path) -> tuple[float, float]:
    """Train, and return the seconds that the steps took."""
    clock = Clock()
    flags = [
        f"--model={options.model}",
        f"--data={options.data}",
        f"--output={folder / 'run'}",
        f"--rollouts={rollouts}",
    ]
    flags += [f"--rewards=model:{options.reward}", f"--steps={options.steps + 1}", "--eval-every=0", "--device=cpu"]
    config = parse(PPOConfig, [str(RECIPE), *flags, "--eval-fraction=0", "--save-minutes=0"], prog="heedful ppo")
    with silence():
        train_ppo(config, on_step=clock)
    shutil.rmtree(folder / "run")
    return clock.seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "reward", "data"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as the command does once it has loaded its libraries
    shares: list[float] = []
    differences: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory() as name:
        for pair in range(options.pairs):
            order = ("all", "samples") if pair % 2 else ("samples", "all")
            found = {}
            for rollouts in order:
                writing = loop.write_rollouts = Writing()
                found[rollouts] = measured(options, rollouts, Path(name))
                loop.write_rollouts = writing.write
                if rollouts == "all":
                    shares.append(100 * sum(writing.seconds[1:]) / found["all"][0])
            differences.append(tuple(100 * (a / b - 1) for a, b in zip(found["all"], found["samples"], strict=True)))
            times = "; ".join(
                f"{kind}: {cpu:.2f} s of the processor, {wall:.2f} s" for kind, (cpu, wall) in found.items()
            )
            print(f"{times}; {differences[-1][0]:+.1f} %, by the clock {differences[-1][1]:+.1f} %", flush=True)
    for place, kind in enumerate(("of the processor", "by the clock")):
        values = sorted(one[place] for one in differences)
        print(f"{kind}: median {statistics.median(values):+.1f} %, from {values[0]:+.1f} to {values[-1]:+.1f} %")
    print(
        f"writing: median {statistics.median(shares):.1f} % of the steps, from {min(shares):.1f} to {max(shares):.1f} %"
    )


if __name__ == "__main__":
    main()
