"""Key and door: of six turns of ten tokens the first one decides. How many tokens does each estimator need to learn it?

python benchmarks/turns/key_and_door.py sft --output runs/door
python benchmarks/turns/key_and_door.py run --output runs/door
python benchmarks/turns/key_and_door.py table --output runs/door

`sft` makes a tiny model whose turns are nine of eight letters by chance and an end token, so a key in eight opens.
`run` trains every arm with every seed for equal tokens, and writes a line of OUTPUT/door.jsonl for each: the share of
episodes that opened the door, by step. `table` prints when each arm reached `GOAL`. README.md says what was expected
before.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from door import KEY, TURNS, opened, says

import heedful

sys.path.append(str(Path(__file__).parents[1] / "critic"))
from results import Results, processor

HERE = Path(__file__).parent
LETTERS, TURN = "abcdefgh", 10
"""What turns are made of, and the tokens of a turn, its end token included."""
GROUP, ROLLOUT, STEPS = 8, 64, 45
GOAL, WINDOW = 0.9, 5
"""An arm has learned when this share of the episodes of so many steps opened the door."""
NOISE, LAMBDA = 0.25, 0.5
"""The deviation of the noise of each turn, and lambda per turn. Chosen with seed 100: README.md."""
ARMS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "PPO by token, lambda .95": {"gae_lambda": 0.95},
    "PPO by token, lambda 1": {"gae_lambda": 1.0},
    "PPO by token, the turn's lambda": {"gae_lambda": LAMBDA ** (1 / TURN)},
    "PPO by turn": {"action": "turn", "gae_lambda": LAMBDA},
}


def sft(output: Path) -> None:
    """A model whose turns are nine letters by chance."""
    draw, conversations = random.Random(0), []
    for _ in range(2048):
        said = [{"role": "user", "content": "door"}]
        for _ in range(TURNS):
            said.append({"role": "assistant", "content": "".join(draw.choices(LETTERS, k=TURN - 1))})
            said.append({"role": "user", "content": says(said[1]["content"].startswith(KEY))})
        conversations.append({"messages": said[:-1]})
    heedful.make_tiny_model("qwen3", output / "base", hidden_size=64, max_length=512, initializer_range=0.1)
    settings = heedful.SFTConfig(
        model=str(output / "base"),
        output=output / "sft",
        max_steps=200,
        batch_size=32,
        learning_rate=3e-3,
        device="cpu",
        dtype="float32",
        eval_fraction=0.0,
        sample_every=0,
    )
    heedful.train_sft(settings, data=conversations)


def run(arm: str, seed: int, changes: Mapping[str, Any], *, noise: float, steps: int, output: Path) -> dict[str, Any]:
    """One arm with one seed."""
    common: dict[str, Any] = {
        "model": str(output / "sft" / "final"),
        "output": output / "runs" / f"{arm}-{seed}-{noise:g}".replace(" ", "-"),
        "environment": (f"python:{HERE / 'door.py'}:Door",),
        "seed": seed,
        "steps": steps,
        "max_turns": TURNS,
        "max_new_tokens": 256,
        "max_prompt_tokens": 32,
        "rollout_batch_size": ROLLOUT,
        "minibatch_size": ROLLOUT // 2,
        "ppo_epochs": 1,
        "learning_rate": 1e-3,
        "lr_schedule": "constant",
        "kl_coef": 0.0,
        "device": "cpu",
        "dtype": "float32",
        "eval_fraction": 0.0,
        "sample_every": 0,
        "overwrite": True,
    }
    if arm == "GRPO":
        groups = {"samples_per_prompt": GROUP, "loss_reduction": "token"}
        settings: Any = heedful.GRPOConfig(**common | groups | changes)
    else:
        critic = {"critic": "separate", "value_learning_rate": 1e-3, "value_epochs": 4, "value_clip_range": None}
        settings = heedful.PPOConfig(**common | critic | changes)
    prompts = [{"prompt": [{"role": "user", "content": "door"}], "noise": noise} for _ in range(ROLLOUT)]
    started = time.perf_counter()
    metrics = heedful.train_ppo(settings, [opened], data=prompts).metrics
    return {
        "processor": processor(),
        "seconds": time.perf_counter() - started,
        "opened": metrics["reward/opened"].dropna().tolist(),
        "tokens": (metrics["rollout/response_length"].dropna() * ROLLOUT).cumsum().tolist(),
    }


def reached(line: Mapping[str, Any]) -> float:
    """Sampled tokens until `GOAL`; infinite if it was not reached."""
    for end in range(WINDOW, len(line["opened"]) + 1):
        if fmean(line["opened"][end - WINDOW : end]) >= GOAL:
            return float(line["tokens"][end - 1])
    return math.inf


def table(lines: Sequence[Mapping[str, Any]]) -> None:
    print(
        f"| arm | 1,000 tokens until {GOAL:g}, by seed | median | opened in the last {WINDOW} steps |\n|---|---|---|---|"
    )
    for arm in dict.fromkeys(line["arm"] for line in lines):
        of_arm = sorted((line for line in lines if line["arm"] == arm), key=lambda line: line["seed"])
        tokens = [reached(line) / 1e3 for line in of_arm]
        last = [fmean(line["opened"][-WINDOW:]) for line in of_arm]
        print(
            f"| {arm} | {', '.join(f'{n:.0f}' for n in tokens)} | {median(tokens):.0f} | "
            f"{median(last):.2f} ({min(last):.2f} to {max(last):.2f}) |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sft", "run", "table"])
    parser.add_argument("--output", type=Path, default=Path("runs/door"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", default=list(ARMS), help="some arms")
    parser.add_argument("--noise", type=float, default=NOISE)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--change", type=json.loads, default={}, help="other settings, JSON")
    options = parser.parse_args()
    results = Results(options.output / "door.jsonl")
    if options.what == "sft":
        sft(options.output)
    elif options.what == "table":
        table(list(results))
    else:
        for seed in options.seeds:
            for arm in options.only:
                key = {
                    "arm": arm,
                    "seed": seed,
                    "noise": options.noise,
                    "steps": options.steps,
                    "change": options.change,
                }
                if results.has(key):
                    continue
                changes = ARMS[arm] | options.change
                found = run(arm, seed, changes, noise=options.noise, steps=options.steps, output=options.output)
                line = results.add(key | found)
                print(arm, seed, reached(line), line["opened"][-WINDOW:], round(line["seconds"]), "s", flush=True)


if __name__ == "__main__":
    main()
