"""heedful's own trainers on the workload of workload.py, one process a run, measured as the peers are (benchmarks/peers/).

python benchmarks/iteration.py ppo --workload runs/workload [--critic shared] [--value-epochs K] [--natural-eos] [--compile]
python benchmarks/iteration.py grpo --workload runs/workload [--compile]

The settings are the peers': one optimizer step a PPO epoch, no gradient clipping, KL coefficient 0.05, Adam's epsilon 1e-8, a
critic of its own (value/ of the workload) unless --critic shared; GRPO with the loss averaged over tokens and no reference.
Nothing is evaluated; the model that a run saves at its end comes after the last measured iteration. Prints one JSON object.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.measurement import iteration_arguments, iteration_report, peak_memory, policy_folder, print_report


def vowels(prompts: list[str], completions: list[str], **_: Any) -> list[float]:  # noqa: ARG001
    """The share of vowels, as in peers/trl_grpo.py."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def main() -> None:
    parser = iteration_arguments(__doc__, ("auto", "float32", "bfloat16"))
    parser.add_argument("algorithm", choices=["ppo", "grpo"])
    parser.add_argument("--ppo-epochs", type=int, default=4)
    parser.add_argument("--kl-coef", type=float, default=0.05)
    parser.add_argument("--critic", choices=["separate", "shared"], default="separate")
    parser.add_argument("--value-model", help="another folder for the critic than value/ of the workload")
    parser.add_argument("--value-epochs", type=int, help="passes of the critic; as many as the policy's without it")
    parser.add_argument(
        "--cuda-graphs", choices=["auto", "on", "off"], default="auto", help="sampling with CUDA graphs"
    )
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt (grpo)")
    parser.add_argument(
        "--compile", action="store_true", help="compiled layers; what compiling takes is in the warm-up"
    )
    options = parser.parse_args()

    import torch

    from heedful import GRPOConfig, PPOConfig, train_grpo, train_ppo
    from heedful.training.run_folder import RunFolder

    import_memory = peak_memory()
    torch.set_num_threads(options.threads)
    marks: list[float] = []
    plain_log = RunFolder.log

    def log(*arguments: Any) -> None:
        marks.append(time.perf_counter())
        plain_log(*arguments)

    RunFolder.log = log
    with tempfile.TemporaryDirectory() as folder:
        settings = shared_settings(options) | {"output": Path(folder) / "run"}
        started = time.perf_counter()
        if options.algorithm == "ppo":
            train_ppo(PPOConfig(**settings | ppo_settings(options)))
        else:
            train_grpo(GRPOConfig(**settings | grpo_settings(options)), rewards=[vowels])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    kind = f" {options.critic} critic" if options.algorithm == "ppo" else ""
    kind += " compiled" if options.compile else ""
    kind += "" if options.cuda_graphs == "auto" else f", graphs {options.cuda_graphs}"
    print_report(
        iteration_report(
            options,
            side=f"heedful {options.algorithm}{kind}",
            # The first holds the loading of models too; it belongs to the warm-up.
            seconds=[end - start for start, end in zip([started, *marks], marks, strict=False)],
            phases={name: [step[f"time/{name}"] for step in steps] for name in ("rollout", "score", "update")},
            lengths=[step["rollout/response_length"] for step in steps],
            import_memory=import_memory,
            device_memory=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        )
    )


def shared_settings(options: Any) -> dict[str, Any]:
    return {
        "model": policy_folder(options),
        "data": f"{options.workload}/prompts.jsonl",
        "eval_fraction": 0.0,
        "eval_every": 0,
        "sample_every": 0,
        "steps": options.iterations,
        "rollout_batch_size": options.batch,
        "minibatch_size": options.batch,
        "micro_batch_size": options.micro_batch,
        "rollout_micro_batch_size": options.batch,
        "max_new_tokens": options.response_length,
        "response_length": "stop" if options.natural_eos else "fixed",
        "learning_rate": options.learning_rate,
        "max_grad_norm": 0.0,
        "adam_eps": 1e-8,
        "dtype": options.dtype,
        "compile": "on" if options.compile else "off",
        "cuda_graphs": options.cuda_graphs,
        "seed": options.seed,
    }


def ppo_settings(options: Any) -> dict[str, Any]:
    value_model = options.value_model or f"{options.workload}/value"
    own = {"critic": "separate", "value_model": value_model} if options.critic == "separate" else {}
    return own | {
        "value_epochs": options.value_epochs,
        "rewards": (f"model:{options.workload}/reward",),
        "ppo_epochs": options.ppo_epochs,
        "kl_coef": options.kl_coef,
    }


def grpo_settings(options: Any) -> dict[str, Any]:
    return {"samples_per_prompt": options.group, "kl_coef": 0.0, "loss_reduction": "token"}


if __name__ == "__main__":
    main()
