"""Scripts of TRL beside what `heedful migrate` makes of them: the weights after three steps on the same data.

python benchmarks/old_ppo/migrated.py --trl-python TRL/bin/python --output runs/migrated

Each script of benchmarks/old_ppo/scripts runs in TRL's environment (trl 1.16). Then heedful migrate reads it, and the command
that it names runs with the settings that it wrote. Every step sees all 16 records, so that their order says nothing.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

SCRIPTS = Path(__file__).parent / "scripts"
TEXTS = ("你好", "what is the answer to 3 + 4", "请讲一个故事", "a fox and a crow")


def records(kind: str) -> list[dict[str, object]]:
    """16 records of a trainer, of different lengths."""
    rows: list[dict[str, object]] = []
    for number in range(16):
        prompt, good = f"{TEXTS[number % 4]} {number}: ", f"the answer is {'好' * (number % 5 + 1)} {number * 7}"
        bad = f"no, {'x' * (number % 3 + 2)}"
        pair = {"prompt": prompt, "chosen": good, "rejected": bad}
        one = {"prompt": prompt, "completion": good if number % 2 else bad}
        rows.append({"sft": one, "kto": one | {"label": bool(number % 2)}}.get(kind, pair))
    return rows


def make_models(folder: Path) -> dict[str, Path]:
    """A tiny language model, and a reward model on it with a head of its own."""
    from heedful import make_tiny_model
    from heedful.models import load_reward_model, load_tokenizer, save_reward_model

    plain, scorer = folder / "model", folder / "scorer"
    if not scorer.exists():
        make_tiny_model("qwen2", plain, hidden_size=64, num_layers=2, max_length=1024)
        tokenizer = load_tokenizer(str(plain))
        model = load_reward_model(
            str(plain), tokenizer, seed=3, device=torch.device("cpu"), compute_dtype=torch.float32
        )
        save_reward_model(model, tokenizer, scorer)
    return {"sft": plain, "dpo": plain, "kto": plain, "reward": scorer}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight.double() for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def distance(before: Path, one: Path, other: Path) -> tuple[float, float]:
    """The norm of the first displacement, and the norm of the difference of both over it."""
    start, a, b = weights(before), weights(one), weights(other)
    names = sorted(set(start) & set(a) & set(b))
    moved = torch.cat([(a[name] - start[name]).flatten() for name in names])
    apart = torch.cat([(a[name] - b[name]).flatten() for name in names])
    return float(moved.norm()), float(apart.norm() / moved.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="python of an environment with trl 1.16 and no heedful")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=sorted(path.stem for path in SCRIPTS.glob("*.py")))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    models = make_models(args.output)
    for kind in args.only:
        place = args.output / kind
        place.mkdir(exist_ok=True)
        data = place / "数据.jsonl"
        data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records(kind)), encoding="utf-8")
        script, flags = (
            SCRIPTS / f"{kind}.py",
            ["--model", str(models[kind]), "--data", str(data), "--output", str(place / "trl")],
        )
        heedful = [sys.executable, "-m", "heedful"]
        with (place / "log.txt").open("w", encoding="utf-8") as log:
            for command in (
                [args.trl_python, str(script), *flags],
                [
                    *heedful,
                    "migrate",
                    str(script),
                    "--output",
                    str(place / "migrated"),
                    "--overwrite",
                    f"--arguments={' '.join(flags)}",
                ],
                [
                    *heedful,
                    kind,
                    str(place / "migrated" / f"{kind}.yaml"),
                    "--device",
                    "cpu",
                    "--overwrite",
                    "--output",
                    str(place / "run"),
                ],
            ):
                subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        moved, apart = distance(models[kind], place / "trl", place / "run" / "final")
        print(f"{kind}: weights moved by {moved:.4g}; heedful's differ by {apart:.2e} of that", flush=True)


if __name__ == "__main__":
    main()
