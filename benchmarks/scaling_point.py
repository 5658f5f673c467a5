"""One point of benchmarks/scaling.py: PPO on a model with random weights, in a process of its own.

python benchmarks/scaling_point.py runs/models --make 8192,6,256
python benchmarks/scaling_point.py runs/models/8192-6-256 --batch 64 --response 64

The first writes a model of Qwen3's shape with a vocabulary of 8192, 6 layers and hidden size 256, its tokenizer and prompts.
The second prints median seconds of the phases of an iteration, and the most memory held: of the process, or of the GPU.
"""

import argparse
import json
import resource
import statistics
import tempfile
from pathlib import Path

import torch
from workload import Shape, make_policy, make_prompts, make_tokenizer

from heedful import PPOConfig, train_ppo
from heedful.errors import HeedfulError
from heedful.kernels.device import resolve_device

PROMPTS, PROMPT_LENGTH = 512, 32


def make(folder: Path, size: str) -> None:
    """Write a policy of the size "vocabulary,layers,hidden" and prompts to a folder below."""
    vocabulary, layers, hidden = map(int, size.split(","))
    shape = Shape(vocabulary=vocabulary, layers=layers, hidden=hidden, intermediate=3 * hidden)
    folder = folder / size.replace(",", "-")
    tokenizer = make_tokenizer(vocabulary)
    make_policy(shape, seed=0).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    texts = tokenizer.decode(make_prompts(vocabulary, PROMPTS, PROMPT_LENGTH, seed=0))
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    (folder / "prompts.jsonl").write_text(rows, encoding="utf-8")


def score(completion_ids: list[list[int]]) -> list[float]:
    """A reward that costs nothing and tells responses apart."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def measure(options: argparse.Namespace, output: str) -> dict[str, float]:
    """Seconds and gigabytes of PPO with responses of one length, the rollout batch sampled at once, one step an epoch."""
    on_gpu = resolve_device(options.device).type == "cuda"
    imports = 0.0 if on_gpu else memory("VmRSS")
    config = PPOConfig(
        model=str(options.folder / "policy"),
        data=str(options.folder / "prompts.jsonl"),
        output=Path(output),
        overwrite=True,
        critic=options.critic,
        steps=options.warmup + options.iterations,
        rollout_batch_size=options.batch,
        minibatch_size=options.batch,
        rollout_micro_batch_size=options.batch,
        micro_batch_size=options.micro_batch_size,
        micro_batch_tokens=options.micro_batch_tokens,
        ppo_epochs=options.ppo_epochs,
        max_new_tokens=options.response,
        response_length="fixed",
        eval_fraction=0.0,
        eval_every=0,
        sample_every=0,
        device=options.device,
        dtype=options.dtype,
    )
    train_ppo(config, rewards=[score])
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else memory("VmHWM")
    lines = (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[options.warmup :]
    steps = [json.loads(line) for line in lines]
    seconds = {
        name: statistics.median(step[f"time/{name}"] for step in steps) for name in ("rollout", "score", "update")
    }
    return {**seconds, "imports_gb": imports, "peak_gb": peak}


def memory(name: str) -> float:
    """Gigabytes of this process: VmRSS now, VmHWM at most. Without Linux's figures it is the most so far for both."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9  # of macOS, in bytes
    return next(int(line.split()[1]) * 1024 / 1e9 for line in status.splitlines() if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--make", nargs="+", metavar="V,L,H", help="write models of these sizes below the folder, and stop"
    )
    parser.add_argument("--batch", type=int, default=64, help="responses an iteration")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--critic", choices=("shared", "separate"), default="shared")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--micro-batch-tokens", type=int, help="padding included; no limit without it")
    parser.add_argument("--ppo-epochs", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1, help="iterations that are not measured")
    parser.add_argument("--iterations", type=int, default=2, help="iterations that are")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    options = parser.parse_args()
    try:
        for size in options.make or ():
            make(options.folder, size)
        if not options.make:
            with tempfile.TemporaryDirectory() as output:
                print(json.dumps(measure(options, output)))
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
