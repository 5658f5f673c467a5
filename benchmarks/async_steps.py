"""What sampling ahead of the update does: the demo's PPO with --async-steps 0 and 1, with and without the correction.

    python benchmarks/async_steps.py --output FOLDER

It makes the demo's world, fine-tuned model and reward model, and trains from there, for each seed, with responses of a server
(that of the tests, with heedful's sampler inside, so no vLLM is needed). Gold is the world's own judge on held-out prompts.
What a run gave is in docs/results/vllm.md. Without the correction the settings are refused; here they are let through.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from heedful.algorithms.ppo import train_ppo
from heedful.algorithms.reward_model import train_reward
from heedful.algorithms.sft import train_sft
from heedful.apps.demo.folder import make_beginning
from heedful.apps.demo.judge import gold_judge
from heedful.apps.demo.pipeline import RECIPE, read_recipe
from heedful.configs.evaluate import ScoresConfig
from heedful.configs.online import OnlineConfig
from heedful.configs.tools import DemoConfig
from heedful.evaluate.policies import evaluate_scores

SERVER = Path(__file__).parents[1] / "tests" / "policy_server.py"
CASES = {
    "0, corrected": (0, "token-truncate"),
    "1, corrected": (1, "token-truncate"),
    "1, not": (1, "none"),
}
SEEN = ("reference/kl", "rollout/sampler_mismatch", "importance/weight_mean", "importance/weight_max")
SEEN += (
    "importance/bounded_frac",
    "importance/effective_frac",
    "policy/approx_kl",
    "policy/clip_frac",
    "policy/ratio_max",
)


def world(output):
    """The settings of the demo's PPO, with the models that it begins with."""
    config = DemoConfig(output=output, device="cpu")
    settings = read_recipe(config, RECIPE)
    if not (output / "reward" / "final").is_dir():
        make_beginning(config, settings.tiny)
        train_sft(settings.sft)
        train_reward(settings.reward)
    return settings.ppo


def run(ppo, output, port, options, case):
    """One run: gold on held-out prompts at the end, and means over the last ten steps."""
    seed, ahead, importance = case
    config = replace(
        ppo,
        output=output,
        overwrite=True,
        seed=seed,
        steps=options.steps,
        rollout_batch_size=options.batch,
        score_norm_samples=options.batch,
        sampler=(f"vllm:http://127.0.0.1:{port}",),
        async_steps=ahead,
        importance=importance,
        eval_every=0,
        save_minutes=0,
    )
    train_ppo(config)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if "reward/score_mean" in line][-10:]
    of_gold = ScoresConfig(
        model=f"{output}/final",
        data=config.data,
        eval_fraction=config.eval_fraction,
        max_new_tokens=config.max_new_tokens,
        device="cpu",
        dtype="float32",
    )
    found = {"gold": evaluate_scores(of_gold, rewards=[gold_judge])["score_mean"]}
    return found | {
        name: statistics.mean(line[name] for line in last) for name in SEEN if all(name in line for line in last)
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    OnlineConfig.corrects = property(lambda _: True)  # let through what is refused without the correction
    found = {name: [] for name in CASES}
    with subprocess.Popen([sys.executable, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        ppo = world(options.output / "world")
        server.stdin.write(json.dumps({"start": 0, "model": ppo.model, "max_model_len": 1024}) + "\n")
        server.stdin.flush()
        port = int(server.stdout.readline())
        for seed in range(options.seeds):
            for name, case in CASES.items():
                output = options.output / f"{seed}-{name.replace(', ', '-')}"
                found[name].append(run(ppo, output, port, options, (seed, *case)))
                print(seed, name, json.dumps(found[name][-1]), flush=True)
        server.kill()
    (options.output / "result.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    for name, runs in found.items():
        cells = [
            f"{statistics.mean(r[k] for r in runs):.4g} ± {statistics.stdev(r[k] for r in runs):.2g}" for k in runs[0]
        ]
        print(name, *(f"{k} {cell}" for k, cell in zip(runs[0], cells, strict=True)), sep="  ")


if __name__ == "__main__":
    main()
