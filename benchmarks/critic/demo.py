"""C: the demo's PPO with the settings for a critic. Are they better than its defaults?

python benchmarks/critic/demo.py --seeds 0 1 2 3 4 5 6 7 --output runs/critic/demo

`heedful demo` makes the world, the SFT model and the reward model of a seed, and its own PPO is the first arm. The
others start from the same models and see as many answers: 20 of the 100 steps of the arm that is pretrained are
`heedful critic`'s. Each arm with each seed is a line of OUTPUT/demo.jsonl with the gold judge's marks on the held-out
prompts.
"""

import argparse
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from results import Results, processor

import heedful
from heedful.apps.demo.measure import measure_policies
from heedful.apps.demo.pipeline import read_recipe, run_demo
from heedful.configs.tools import DemoConfig

PRETRAINING = 20
ARMS: dict[str, dict[str, Any]] = {
    "default": {},
    "adaptive lambda": {"gae_lambda": 0.95, "gae_lambda_alpha": 1.5, "value_lambda": 1.0},
    "own critic": {"critic": "separate"},
    "own critic, 4 epochs": {"critic": "separate", "value_epochs": 4},
    "own critic, pretrained": {"critic": "separate"},
}
"""Lambda is 1 in the demo, for values too. Alpha is that for short answers; beside it gae_lambda is left at its default."""


def pretrained(ppo: heedful.PPOConfig, folder: Path) -> str:
    """A critic of the SFT model's answers."""
    shared = ("model", "data", "rewards", "seed", "device", "dtype", "rollout_batch_size", "minibatch_size")
    shared += ("micro_batch_size", "rollout_micro_batch_size", "max_new_tokens", "temperature")
    shared += ("missing_eos_penalty", "score_norm_samples", "eval_fraction", "sample_every")
    settings = heedful.CriticConfig(
        **{name: getattr(ppo, name) for name in shared},
        output=folder,
        critic="separate",
        steps=PRETRAINING,
        learning_rate=1e-3,
        early_stopping_patience=0,
        eval_every=0,
    )
    heedful.train_critic(settings)
    return str(folder / "final")


def run(arm: str, demo: Path, ppo: heedful.PPOConfig) -> dict[str, float]:
    """PPO of an arm in a folder beside the demo's own, with what `measure_policies` says."""
    folder = demo.with_name(f"{demo.name}-{arm.replace(' ', '-').replace(',', '')}")
    changes = dict(ARMS[arm])
    if arm == "own critic, pretrained":
        changes |= {"value_model": pretrained(ppo, folder / "critic"), "steps": ppo.steps - PRETRAINING}
    heedful.train_ppo(replace(ppo, output=folder / "ppo", **changes))
    numbers, _ = measure_policies(ppo, folder)
    shutil.rmtree(folder)
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/critic/demo"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    options = parser.parse_args()
    results = Results(options.output / "demo.jsonl")
    for seed in options.seeds:
        folder = options.output / str(seed)
        config = DemoConfig(output=folder, seed=seed, device="cpu")
        ppo = read_recipe(config, Path(heedful.__file__).parent / "apps" / "demo" / "recipe").ppo
        for arm in ARMS:
            key = {"experiment": "C", "arm": arm, "seed": seed}
            if results.has(key):
                continue
            started = time.perf_counter()
            numbers = run_demo(replace(config, overwrite=True)) if arm == "default" else run(arm, folder, ppo)
            seconds = numbers["ppo.seconds"] if arm == "default" else time.perf_counter() - started
            names = ("ppo.gold", "ppo.win_rate", "ppo.kl", "ppo.empty_frac", "ppo.flawless_frac")
            line = key | {"processor": processor(), "seconds": seconds} | {name: numbers[name] for name in names}
            results.add(line)
            print(line, flush=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
