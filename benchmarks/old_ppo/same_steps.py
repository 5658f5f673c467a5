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
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

import heedful
from heedful.compat.trl import AutoModelForCausalLMWithValueHead

STATS, DISPLACEMENT = 1e-5, 1e-3
"""Largest difference of a stat, absolute below 1 and relative above; and of the displacement, beside its size."""
LIBRARIES = ("heedful.compat.trl", "trl")
STEPS = 3
SMALL = {"mini_batch_size": 4, "ppo_epochs": 2}
CASES = {
    "adaptive KL": {"saved": "model"},
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
    "last batch, no accumulation": {"from_dataloader": True},
    "ratio above the threshold": {"config": SMALL | {"ratio_threshold": 1.0}, "optimizer": "Adam"},
    "clipped gradients, one optimizer step": {
        "config": {"mini_batch_size": 8, "ppo_epochs": 1, "max_grad_norm": 0.1},
        "steps": 1,
    },
    "gamma, lambda, clips": {
        "config": SMALL | {"gamma": 0.9, "lam": 0.8, "cliprange": 0.01, "cliprange_value": 0.01, "vf_coef": 0.5},
    },
    "LoRA": {"lora": True, "saved": "adapter", "optimizer": "Adam"},
    "padding left": {"padding_side": "left"},
    "padding left, holes, Adam": {"padding_side": "left", "masks": True, "optimizer": "Adam"},
    "Qwen2": {"model": "qwen2", "optimizer": "Adam"},
    "two processes": {"processes": 2, "masks": True, "config": SMALL | {"use_score_scaling": True}},
    "two processes, Adam": {
        "processes": 2,
        "optimizer": "Adam",
        "config": {"mini_batch_size": 2, "gradient_accumulation_steps": 2, "early_stopping": True, "target_kl": 1e-5},
    },
    "Llama, padding left": {"model": "llama", "padding_side": "left", "optimizer": "Adam"},
}
ON_PURPOSE = {
    "clipped gradients": {"config": {"mini_batch_size": 8, "ppo_epochs": 2, "max_grad_norm": 0.1}},
    "accumulation in the last batch": {
        "config": {"mini_batch_size": 2, "gradient_accumulation_steps": 2},
        "from_dataloader": True,
    },
}
"""TRL clips the gradient of its first optimizer step only. In its dataloader's last batch it steps after every minibatch,
each with its loss divided by the number of minibatches to be accumulated."""
DEFAULTS = {
    "model": "gpt2", "optimizer": "SGD", "lora": False, "masks": False, "padding_side": "right", "config": SMALL,
    "steps": STEPS, "from_dataloader": False, "saved": "", "processes": 1,
}  # fmt: skip


def make_models(folder: Path) -> None:
    """A policy with a value head, and a reference a little beside it, for each architecture; a reward model's adapter."""
    for architecture in ("gpt2", "qwen2", "llama"):
        plain = folder / f"{architecture}-plain"
        heedful.make_tiny_model(architecture, plain, hidden_size=32, initializer_range=0.1)
        torch.manual_seed(1)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(str(plain), v_head_init_strategy="normal")
        for name in (architecture, f"{architecture}-reference"):
            model.save_pretrained(folder / name)
            shutil.copy(plain / "tokenizer.json", folder / name)
            with torch.no_grad():  # the reference is this one
                for weight in model.pretrained_model.parameters():
                    weight.add_(0.02 * torch.randn_like(weight))
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "gpt2-plain", num_labels=2)
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    get_peft_model(reward, lora).save_pretrained(folder / "reward")
    for_older_peft(folder / "reward")


def for_older_peft(adapter: Path) -> None:
    """PEFT 0.13 refuses settings of an adapter that it does not know, even where they say what it does."""
    path = adapter / "adapter_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    known = (
        "base_model_name_or_path",
        "fan_in_fan_out",
        "inference_mode",
        "lora_alpha",
        "modules_to_save",
        "peft_type",
    )
    kept = {key: settings[key] for key in (*known, "r", "target_modules", "task_type")}
    path.write_text(json.dumps(kept), encoding="utf-8")


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, beside the number itself if that is above 1."""
    if ours.shape != theirs.shape:
        return np.inf
    if not ours.size:
        return 0.0
    both_nan = np.isnan(ours) & np.isnan(theirs)
    return float(np.max(np.where(both_nan, 0, np.abs(ours - theirs) / np.maximum(1, np.abs(theirs)))))


def displacement(numbers: dict) -> np.ndarray:
    """Of all trained weights, but GPT-2's key biases: their gradient is 0 but for rounding, which Adam makes steps of."""
    parts = {key.removeprefix("moved "): value for key, value in numbers.items() if key.startswith("moved ")}
    for name, value in parts.items():
        if name.endswith("c_attn.bias"):
            value[len(value) // 3 : 2 * len(value) // 3] = 0
    return np.concatenate([value.ravel() for value in parts.values()]).astype(np.float64)


def compare(folder: Path, name: str) -> dict:
    """The largest difference of a stat with its name, and that of the displacement; and how far the weights moved."""
    ours, theirs = (dict(np.load(folder / library / f"{name}.npz")) for library in LIBRARIES)
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    types = [key for key in ours if key.endswith(" types") and list(ours[key]) != list(theirs[key])]
    stats = {key: difference(ours[key], theirs[key]) for key in ours if key[0].isdigit() and not key.endswith(" types")}
    worst = max(stats, key=stats.get)
    ours, theirs = displacement(ours), displacement(theirs)
    away, size = float(np.linalg.norm(ours - theirs)), float(np.linalg.norm(theirs))
    return {
        "worst": worst,
        "stat": stats[worst],
        "displacement": away / size if size else np.inf,
        "moved": size,
        "types": types,
    }


def compare_saved(folder: Path) -> dict[str, float]:
    """For each saved model the largest difference of logits, values and scores between the libraries that read it."""
    found = {}
    for path in sorted((folder / "saved").glob("*")):
        ours, theirs = (np.load(folder / library / f"{path.name}.npz") for library in LIBRARIES)
        found[path.name] = max(difference(ours[key], theirs[key]) for key in theirs)
    return found


def run(python: str, library: str, folder: Path, *options: str, processes: int = 1) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if library == "trl":
        environment.pop("PYTHONPATH", None)
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [python, *launch, Path(__file__).parent / "steps.py", library, folder, *options]
    done = subprocess.run(command, env=environment, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{library} failed:\n{done.stderr[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    folder = args.output.resolve()
    folder.mkdir(parents=True)
    make_models(folder)
    cases = {name: DEFAULTS | case for name, case in (CASES | ON_PURPOSE).items() if args.only in name}
    for case in cases.values():
        case |= {"reference": str(folder / f"{case['model']}-reference"), "model": str(folder / case["model"])}
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    both = ((args.trl_python, "trl"), (sys.executable, "heedful.compat.trl"))
    for python, library in both:
        for processes in sorted({case["processes"] for case in cases.values()}):
            run(python, library, folder, processes=processes)
    for adapter in (folder / "saved").glob("* by heedful*/adapter_config.json"):
        for_older_peft(adapter.parent)
    for python, library in both:
        run(python, library, folder, "--read")
    failed = False
    print(f"{'case':40}{'stats':>10}{'displacement':>14}{'moved':>10}")
    for name in cases:
        found = compare(folder, name)
        is_same = found["stat"] <= STATS and found["displacement"] <= DISPLACEMENT and not found["types"]
        failed |= is_same == (name in ON_PURPOSE)
        remark = "" if is_same else f"  different: {found['worst']} {found['types']}"
        remark += ", on purpose" if name in ON_PURPOSE and not is_same else ""
        print(f"{name:40}{found['stat']:10.1e}{found['displacement']:14.1e}{found['moved']:10.1e}{remark}")
    for name, away in compare_saved(folder).items():
        failed |= away > STATS
        print(f"{name:40}{away:10.1e}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
