"""How far filtered sampling takes the policy gradient from what it should be, with and without importance weights.

python benchmarks/importance.py runs/demo --output runs/importance [--responses 8192] [--top-p 0.9]

The policy is the SFT model of a finished `heedful demo`, the score its reward model's, the baseline the batch's mean. The
gradient of the mean score is estimated from responses that are sampled without a filter, twice, and from others that are
sampled with one, weighed in several ways of --importance (a ratio is never above 1 here, so bounds change nothing). Each
estimate is a mean over batches; products of different halves of the batches are free of noise on average, so lengths and
cosines are of the gradients themselves. One line of JSON for each way goes to results.jsonl in the output folder.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from heedful.algorithms.online.recorder import Recorder
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.algorithms.ppo import backward_minibatch, make_experience
from heedful.apps.demo.pipeline import RECIPE, read_recipe
from heedful.configs.online import GRPOConfig
from heedful.configs.tools import DemoConfig
from heedful.errors import HeedfulError

BATCH = 256
"""Responses of one batch: one estimate."""
WAYS: dict[str, dict[str, Any]] = {
    "no filter": {"top_p": 1.0},
    "top-p": {},
    "token-truncate": {"importance": "token-truncate"},
    "sequence-truncate": {"importance": "sequence-truncate"},
    "sequence-truncate, normalised": {"importance": "sequence-truncate", "importance_normalise": True},
}


def gradients(config: GRPOConfig, batches: int, seed: int) -> tuple[torch.Tensor, dict[str, float]]:
    """Mean gradient of the loss over each half of the batches, ``[2, weights]``, and the mean metrics."""
    _, learner, _, _ = start(dataclasses.replace(config, seed=seed), [])
    halves, metrics = torch.zeros(2, sum(p.numel() for p in learner.policy.parameters()), dtype=torch.float64), {}
    for i in range(batches):
        experience = make_experience(learner, rollout(learner, next(learner.prompts)))
        backward_minibatch(learner, experience, Recorder(learner, experience.kl), learner.micro_batch)
        flat = torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None])
        halves[i % 2] += flat.double() / (batches / 2)
        learner.optimizer.zero_grad(set_to_none=True)
        for name, value in experience.metrics.items():
            if name.startswith("importance/") or name == "rollout/kept_mass":
                metrics[name] = metrics.get(name, 0.0) + value / batches
    return halves, metrics


def compared(found: torch.Tensor, true: torch.Tensor) -> dict[str, float]:
    """Relative bias, cosine and size of an estimate against the true gradient, from independent halves of each."""
    cross = float((found.mean(dim=0) * true.mean(dim=0)).sum())
    own, others = float((found[0] * found[1]).sum()), float((true[0] * true[1]).sum())
    return {
        "bias": max(0.0, (own - 2 * cross + others) / others) ** 0.5,
        "cosine": cross / max(own * others, 1e-300) ** 0.5 if own > 0 else float("nan"),
        "size": cross / others,
        "noise": (float((true[0] - true[1]).square().sum()) / 4 / others) ** 0.5,
    }


def run(options: argparse.Namespace) -> None:
    seed = json.loads((options.demo / "summary.json").read_text(encoding="utf-8"))["seed"]
    recipe = read_recipe(DemoConfig(output=options.demo, seed=seed, device="cpu"), RECIPE).ppo
    options.output.mkdir(parents=True, exist_ok=True)
    common = {name: getattr(recipe, name) for name in ("model", "data", "rewards", "max_new_tokens", "device", "dtype")}
    common |= {"rollout_batch_size": BATCH, "minibatch_size": BATCH, "samples_per_prompt": 1, "kl_coef": 0.0}
    common |= {"advantage": "reinforce", "policy_loss": "a2c", "loss_reduction": "fixed", "top_p": options.top_p}
    common |= {"temperature": options.temperature, "steps": 10**6, "eval_fraction": 0.05, "ppo_epochs": 1}
    batches = options.responses // BATCH
    true = None
    for i, (name, settings) in enumerate(WAYS.items()):
        output = options.output / f"never-written-{i}"
        config = GRPOConfig(**common | settings, output=output)
        if true is None:
            true, _ = gradients(config, batches, seed=100 + seed)
        found, metrics = gradients(config, batches, seed=200 + seed)
        line = {"way": name, "seed": seed, **compared(found, true), **metrics}
        line = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
        with (options.output / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="folder of a finished demo")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--responses", type=int, default=8192, help="for each estimate")
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--temperature", type=float, default=1.0)
    try:
        run(parser.parse_args())
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
