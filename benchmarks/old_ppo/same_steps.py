"""`heedful.compat.trl` beside TRL 0.11.4: three calls of `PPOTrainer.step` give the same stats and move weights alike.

python benchmarks/old_ppo/same_steps.py --trl-python PYTHON --output runs/same_steps [--only CASE]

PYTHON is that of an environment with TRL: pip install trl==0.11.4 transformers==4.45.2 peft==0.13.2. Both start from the
same weights (small random models), queries, responses and scores, in float32 with one thread, at learning rate 1e-3.

Compares every stat that `step` returns but times: losses, advantages, returns, KL, values; and the displacement of all
trained weights, after minus before, beside its own size, so that doing nothing fails. The cases at the end differ on
purpose: TRL's errors, which heedful does not repeat. Exits with 1 if another case is outside the tolerances, or one of
those inside.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import heedful
from heedful.compat.trl import AutoModelForCausalLMWithValueHead

STATS, DISPLACEMENT = 1e-5, 1e-3
"""Largest difference of a stat, absolute below 1 and relative above; and of the displacement, beside its size."""
SMALL = {"mini_batch_size": 4, "ppo_epochs": 2}
CASES = {
    "adaptive KL": {},
    "adaptive KL, Adam": {"optimizer": "Adam"},
    "fixed KL": {"config": SMALL | {"adap_kl_ctrl": False, "init_kl_coef": 0.05}},
    "score scaling": {"config": SMALL | {"use_score_scaling": True}},
    "score scaling, norm, clip": {
        "config": SMALL | {"use_score_scaling": True, "use_score_norm": True, "score_clip": 0.5}
    },
    "score clip": {"config": SMALL | {"score_clip": 1.0}},
    "whitened rewards": {"config": SMALL | {"whiten_rewards": True}},
    "whitened rewards, holes": {"config": SMALL | {"whiten_rewards": True}, "masks": True},
    "early stopping": {
        "config": {"mini_batch_size": 2, "early_stopping": True, "target_kl": 1e-5},
        "optimizer": "Adam",
    },
    "penalty abs": {"config": SMALL | {"kl_penalty": "abs"}},
    "penalty mse": {"config": SMALL | {"kl_penalty": "mse"}},
    "penalty full": {"config": SMALL | {"kl_penalty": "full"}},
    "holes": {"masks": True},
    "holes, Adam": {"masks": True, "optimizer": "Adam"},
    "4 epochs, accumulation": {"config": {"mini_batch_size": 2, "gradient_accumulation_steps": 2}},
    "4 epochs, accumulation, Adam": {
        "config": {"mini_batch_size": 2, "gradient_accumulation_steps": 2},
        "optimizer": "Adam",
    },
    "ratio above the threshold": {"config": SMALL | {"ratio_threshold": 1.0}, "optimizer": "Adam"},
    "clipped gradients, one optimizer step": {
        "config": {"mini_batch_size": 8, "ppo_epochs": 1, "max_grad_norm": 0.1},
        "steps": 1,
    },
    "gamma, lambda, clips": {
        "config": SMALL | {"gamma": 0.9, "lam": 0.8, "cliprange": 0.01, "cliprange_value": 0.01, "vf_coef": 0.5},
    },
    "LoRA": {"lora": True, "optimizer": "Adam"},
    "padding left": {"padding_side": "left"},
    "padding left, holes, Adam": {"padding_side": "left", "masks": True, "optimizer": "Adam"},
    "Qwen2": {"model": "qwen2", "optimizer": "Adam"},
    "Llama, padding left": {"model": "llama", "padding_side": "left", "optimizer": "Adam"},
}
ON_PURPOSE = {"clipped gradients": {"config": {"mini_batch_size": 8, "ppo_epochs": 2, "max_grad_norm": 0.1}}}
"""TRL clips the gradient of its first optimizer step only."""
DEFAULTS = {
    "model": "gpt2",
    "optimizer": "SGD",
    "lora": False,
    "masks": False,
    "padding_side": "right",
    "config": SMALL,
    "steps": 3,
}


def make_models(folder: Path) -> None:
    """A policy with a value head, and a reference a little beside it, for each architecture."""
    for architecture in ("gpt2", "qwen2", "llama"):
        plain = folder / f"{architecture}-plain"
        heedful.make_tiny_model(architecture, plain, hidden_size=32, initializer_range=0.1)
        torch.manual_seed(1)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(str(plain), v_head_init_strategy="normal")
        from transformers import AutoTokenizer

        for name in (architecture, f"{architecture}-reference"):
            model.save_pretrained(folder / name)
            AutoTokenizer.from_pretrained(plain).save_pretrained(folder / name)
            with torch.no_grad():
                for weight in model.pretrained_model.parameters():
                    weight += 0.02 * torch.randn_like(weight)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, beside the number itself if that is above 1."""
    if ours.shape != theirs.shape:
        return np.inf
    if not ours.size:
        return 0.0
    both_nan = np.isnan(ours) & np.isnan(theirs)
    return float(np.max(np.where(both_nan, 0, np.abs(ours - theirs) / np.maximum(1, np.abs(theirs)))))


def compare(folder: Path, name: str) -> dict:
    """The largest difference of a stat with its name, and that of the displacement; and how far the weights moved."""
    ours, theirs = (dict(np.load(folder / library / f"{name}.npz")) for library in ("heedful.compat.trl", "trl"))
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    types = [key for key in ours if key.endswith(" types") and list(ours[key]) != list(theirs[key])]
    stats = {key: difference(ours[key], theirs[key]) for key in ours if key[0].isdigit() and not key.endswith(" types")}
    worst = max(stats, key=stats.get)
    moved = [key for key in theirs if key.startswith("moved ")]
    away = sum(float(np.square(ours[key] - theirs[key], dtype=np.float64).sum()) for key in moved) ** 0.5
    size = sum(float(np.square(theirs[key], dtype=np.float64).sum()) for key in moved) ** 0.5
    return {
        "worst": worst,
        "stat": stats[worst],
        "displacement": away / size if size else np.inf,
        "moved": size,
        "types": types,
    }


def run(python: str, library: str, folder: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if library == "trl":
        environment.pop("PYTHONPATH", None)
    script = Path(__file__).parent / "steps.py"
    subprocess.run([python, script, library, folder], env=environment, check=True, stderr=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    folder = args.output
    folder.mkdir(parents=True)
    make_models(folder)
    cases = {name: DEFAULTS | case for name, case in (CASES | ON_PURPOSE).items() if args.only in name}
    for case in cases.values():
        case |= {"reference": str(folder / f"{case['model']}-reference"), "model": str(folder / case["model"])}
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    run(args.trl_python, "trl", folder)
    run(sys.executable, "heedful.compat.trl", folder)
    failed = False
    print(f"{'case':40}{'stats':>10}{'displacement':>14}{'moved':>10}")
    for name in cases:
        found = compare(folder, name)
        is_same = found["stat"] <= STATS and found["displacement"] <= DISPLACEMENT and not found["types"]
        failed |= is_same == (name in ON_PURPOSE)
        remark = "" if is_same else f"  DIFFERENT: {found['worst']} {found['types']}"
        remark += ", on purpose" if name in ON_PURPOSE and not is_same else ""
        print(f"{name:40}{found['stat']:10.1e}{found['displacement']:14.1e}{found['moved']:10.1e}{remark}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
