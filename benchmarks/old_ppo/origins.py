"""Reward models, critics and value heads that TRL, LLaMA-Factory and OpenRLHF saved: their readings beside heedful's.

python benchmarks/old_ppo/origins.py --output runs/origins [--trl-python PYTHON] [--llamafactory-python PYTHON]
    [--llamafactory SRC] [--openrlhf-python PYTHON] [--openrlhf SRC]

PYTHON is that of an environment with the library; SRC the folder of its package, if it is a checkout. LLaMA-Factory (0.9.1,
0.9.3) needs trl==0.9.6; OpenRLHF runs on a CPU, with empty modules in the place of packages that need a GPU. Each library
saves small random models, loads them again, and gives values or scores of rows of token ids (save_origins.py). heedful loads
the same folders. Both are in float32 with one thread. LLaMA-Factory's and OpenRLHF's own texts of conversations are compared
too: the ids that heedful's reward model reads of the messages, and its score.

Prints a row per folder with the largest difference, beside the deviation of the numbers. Exits with 1 if a difference is
above 1e-5, or if a folder loads that should be refused.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import heedful
from heedful import CheckpointError
from heedful.models import load_policy, load_reward_model, load_tokenizer, load_value_model
from heedful.rewards.models import load_model_reward

TOLERANCE = 1e-5
CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
TEXTS = [
    [{"role": "user", "content": "一加一等于几？"}, {"role": "assistant", "content": "等于二。"}],
    [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}],
]
HERE = Path(__file__).parent


def make_models(folder: Path) -> None:
    """Small random models with a tokenizer that all of the libraries load, whose EOS ends a turn."""
    for kind in ("gpt2", "llama", "qwen2"):
        out = folder / "models" / kind
        heedful.make_tiny_model(kind, out, hidden_size=32, num_layers=2, max_length=256)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            text = (
                (out / file).read_text("utf-8").replace("<|end|>", "<|im_end|>").replace("<|system|>", "<|im_start|>")
            )
            text = text.replace("TokenizersBackend", "PreTrainedTokenizerFast")
            if file == "tokenizer_config.json":
                text = json.dumps(json.loads(text) | {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})
            (out / file).write_text(text, "utf-8")
    (folder / "texts.json").write_text(json.dumps(TEXTS), "utf-8")


@torch.no_grad()
def critic_values(network: torch.nn.Module, ids: list[int]) -> list[float]:
    """Values of the states before all tokens but the first."""
    row = torch.tensor([ids])
    mask = torch.ones_like(row, dtype=torch.bool)
    outputs = network.eval()(row, mask, mask[:, 1:])
    return (outputs if isinstance(outputs, torch.Tensor) else outputs.values)[0].tolist()


def compare(folder: Path, reading: dict) -> dict[str, tuple[list[float], list[float]]]:
    """Their numbers and ours, by what they are of."""
    name, found = str(folder / reading["name"]), {}
    if reading["role"] == "critic":
        networks = {"value model": load_value_model(name, **CPU)}
        if folder.name == "trl":
            networks["policy's value head"] = load_policy(name, with_value_head=True, **CPU)
        for kind, network in networks.items():
            theirs = [value for row in reading["rows"] for value in row["values"][: len(row["ids"]) - 1]]
            found[kind] = theirs, [value for row in reading["rows"] for value in critic_values(network, row["ids"])]
        return found
    model = load_reward_model(name, load_tokenizer(name), **CPU)
    rows = [{"input_ids": row["ids"]} for row in reading["rows"]]
    last = [row["values"][-1] if isinstance(row["values"], list) else row["values"] for row in reading["rows"]]
    with torch.no_grad():
        found["rows of ids"] = last, model(rows).tolist()
    for case in dict.fromkeys(text["as"] for text in reading.get("texts", ())):
        texts = [text for text in reading["texts"] if text["as"] == case]
        place, ends = name, texts[0]["ids"][-1] == load_tokenizer(name).eos_token_id
        if case.startswith("whole") and not ends:  # LLaMA-Factory since 0.9.2: the template writes on after the turn
            place = f"{name}-template"
            shutil.copytree(name, place)
            Path(place, "heedful.json").write_text('{"reads": "template"}', "utf-8")
        reward = load_model_reward(place, **CPU)
        prompts, answers = ([text["messages"][i : i + 1] for text in texts] for i in (0, 1))
        what = case if place == name else f"{case}, with heedful.json"
        found[what] = [text["score"] for text in texts], reward(prompts, answers, [case.startswith("cut")] * len(texts))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    for library in ("trl", "llamafactory", "openrlhf"):
        parser.add_argument(f"--{library}-python")
        parser.add_argument(f"--{library}", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make_models(options.output)
    failed = 0
    print("| folder | compared | largest difference | deviation of the numbers |\n|---|---|---|---|")
    for library in ("trl", "llamafactory", "openrlhf"):
        python = getattr(options, f"{library}_python")
        if not python:
            continue
        environment = os.environ | {"PYTHONPATH": getattr(options, library), "OMP_NUM_THREADS": "1"}
        command = [python, str(HERE / "save_origins.py"), library, str(options.output.resolve())]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        folder = options.output.resolve() / library
        for reading in json.loads((folder / "readings.json").read_text("utf-8")):
            if reading["role"] == "refused":
                try:
                    compare(folder, reading)
                    failed += 1
                    print(f"| {library}/{reading['name']} | | loaded, but should be refused | |")
                except CheckpointError as error:
                    print(
                        f"| {library}/{reading['name']} | | refused: {str(error).removeprefix(str(folder))[:90]}... | |"
                    )
                continue
            for what, (theirs, ours) in compare(folder, reading).items():
                difference = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
                failed += difference > TOLERANCE
                spread = float(torch.tensor(theirs).std())
                print(f"| {library}/{reading['name']} | {what} | {difference:.1e} | {spread:.2f} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
