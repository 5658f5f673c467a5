"""heedful beside the peers on one workload: every run in a process of its own, in the order ABAB, never two at once.

python benchmarks/workload.py --output runs/workload
python benchmarks/side_by_side.py --peer-ppo PYTHON --peer-grpo PYTHON --workload runs/workload --output runs/side-by-side

The peers' Pythons are those of environments with trl==1.12.0 and trl==1.16.0 (benchmarks/peers/ says how to make them);
sampling is compared with the `generate` of the transformers that heedful itself uses. First run benchmarks/gate.py: it shows
that both sides compute the same numbers. --only takes some of the rows:

    sampling-fixed, sampling-natural    against generate, both in bf16 (or in float32, see below)
    ppo-fixed-tuned, ppo-fixed-stock    the matched algorithm: a critic of its own, every response of full length
    ppo-natural-tuned                   the same, responses end at EOS
    ppo-shared-tuned                    heedful's default, a value head on the policy's trunk: less work, another algorithm
    grpo-fixed-tuned, grpo-fixed-stock
    ppo-compiled-tuned, ppo-compiled-stock, grpo-compiled-tuned
                                        of full length, heedful with --compile; what compiling takes is in the warm-up

--dtype float32 is the tier of processors without bfloat16: every side computes in float32 throughout. What is tuned of the
peers is then the rest: one batch for generation and scoring (PPO), no gradient checkpointing (GRPO).

Each repetition has a seed of its own, the same for all sides. A run's figure is the median of its iterations after the
warm-up, a row's that of its runs; ratios are the peer's over heedful's, so that above 1 heedful is faster, and for memory
heedful's over the peer's, both above what the bare imports take. Every run is a line of runs.jsonl, the table is in table.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Run = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """What one process runs: a script here, with whose Python, and with which arguments."""

    python: str
    script: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One comparison. Sides of rows of one group take turns."""

    group: str
    ours: Side
    peer: Side


NATURAL = "--natural-eos"
PPO = Side("heedful", "iteration.py", ("ppo",))
PPO_NATURAL = Side("heedful", "iteration.py", ("ppo", NATURAL))
PPO_SHARED = Side("heedful", "iteration.py", ("ppo", "--critic", "shared"))
GRPO = Side("heedful", "iteration.py", ("grpo",))
PPO_COMPILED = Side("heedful", "iteration.py", ("ppo", "--compile"))
GRPO_COMPILED = Side("heedful", "iteration.py", ("grpo", "--compile"))
TRL_PPO = Side("peer-ppo", "peers/trl_ppo.py")
TRL_PPO_TUNED = Side("peer-ppo", "peers/trl_ppo.py", ("--tuned",))
TRL_PPO_NATURAL = Side("peer-ppo", "peers/trl_ppo.py", ("--tuned", NATURAL))
TRL_GRPO = Side("peer-grpo", "peers/trl_grpo.py")
TRL_GRPO_TUNED = Side("peer-grpo", "peers/trl_grpo.py", ("--tuned",))


def sampling(side: str, *arguments: str) -> Side:
    return Side("heedful", "sampling.py", (side, *arguments))


ROWS = {
    "sampling-fixed": Row("sampling-fixed", sampling("heedful"), sampling("transformers")),
    "sampling-natural": Row("sampling-natural", sampling("heedful", NATURAL), sampling("transformers", NATURAL)),
    "ppo-fixed-tuned": Row("ppo-fixed", PPO, TRL_PPO_TUNED),
    "ppo-fixed-stock": Row("ppo-fixed", PPO, TRL_PPO),
    "ppo-shared-tuned": Row("ppo-fixed", PPO_SHARED, TRL_PPO_TUNED),
    "ppo-natural-tuned": Row("ppo-natural", PPO_NATURAL, TRL_PPO_NATURAL),
    "grpo-fixed-tuned": Row("grpo-fixed", GRPO, TRL_GRPO_TUNED),
    "grpo-fixed-stock": Row("grpo-fixed", GRPO, TRL_GRPO),
    "ppo-compiled-tuned": Row("ppo-fixed", PPO_COMPILED, TRL_PPO_TUNED),
    "ppo-compiled-stock": Row("ppo-fixed", PPO_COMPILED, TRL_PPO),
    "grpo-compiled-tuned": Row("grpo-fixed", GRPO_COMPILED, TRL_GRPO_TUNED),
}


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    rows = {name: ROWS[name] for name in ROWS if not options.only or name in options.only}
    runs: dict[Side, list[Run]] = {}
    with (options.output / "runs.jsonl").open("w", encoding="utf-8") as file:
        for group in dict.fromkeys(row.group for row in rows.values()):
            sides = dict.fromkeys(side for row in rows.values() if row.group == group for side in (row.ours, row.peer))
            for repetition in range(options.repetitions):
                for side in sides:
                    run = {"group": group, "repetition": repetition, **measure(side, options, seed=repetition)}
                    file.write(json.dumps(run) + "\n")
                    file.flush()
                    runs.setdefault(side, []).append(run)
                    print(f"{group}: {run['side']}: {run['seconds_median']} s an iteration", file=sys.stderr)
    table = "\n".join(table_lines({name: (runs[row.ours], runs[row.peer]) for name, row in rows.items()}))
    (options.output / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)


def measure(side: Side, options: argparse.Namespace, *, seed: int) -> Run:
    """One run in a fresh process: what it printed, with its command and the load that it started under."""
    python = sys.executable if side.python == "heedful" else getattr(options, side.python.replace("-", "_"))
    if python is None:
        raise SystemExit(f"{side.script} needs --{side.python}: the Python of an environment with its TRL")
    command = [python, str(HERE / side.script), *side.arguments, "--workload", str(options.workload)]
    for name in ("iterations", "warmup", "batch", "micro-batch", "response-length", "threads"):
        command += [f"--{name}", str(getattr(options, name.replace("-", "_")))]
    command += ["--dtype", options.dtype, "--seed", str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    if side.python != "heedful":
        environment.pop("PYTHONPATH", None)
    load = os.getloadavg()[0]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = result.stdout.strip().splitlines()
    if result.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed with {result.returncode}:\n{result.stderr[-3000:]}")
    return {**json.loads(lines[-1]), "load_before": round(load, 2), "command": " ".join(command[1:])}


def table_lines(rows: dict[str, tuple[list[Run], list[Run]]]) -> list[str]:
    """The rows in Markdown."""
    lines = [
        "| row | heedful, s | peer, s | faster | by repetition | heedful, tokens/s | peer, tokens/s | response tokens "
        "| heedful, MB | peer, MB | memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (ours, peers) in rows.items():
        ratios = [peer["seconds_median"] / our["seconds_median"] for our, peer in zip(ours, peers, strict=True)]
        seconds, peer_seconds = (median_of(runs, "seconds_median") for runs in (ours, peers))
        memory, peer_memory = (statistics.median(map(above_imports, runs)) for runs in (ours, peers))
        cells = [
            name,
            f"{seconds:.3g} ({spread(ours)})",
            f"{peer_seconds:.3g} ({spread(peers)})",
            f"**{peer_seconds / seconds:.2f}x**",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{median_of(ours, 'response_tokens_per_second'):,.0f}",
            f"{median_of(peers, 'response_tokens_per_second'):,.0f}",
            " / ".join(f"{median_of(runs, 'mean_response_tokens'):.1f}" for runs in (ours, peers)),
            f"{memory / 1e6:,.0f}",
            f"{peer_memory / 1e6:,.0f}",
            f"{memory / peer_memory:.2f}x" if peer_memory else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def median_of(runs: Sequence[Run], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def spread(runs: Sequence[Run]) -> str:
    seconds = [run["seconds_median"] for run in runs]
    return f"{min(seconds):.3g} to {max(seconds):.3g}"


def above_imports(run: Run) -> int:
    return run["peak_memory_bytes"] - run["import_memory_bytes"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-ppo", help="Python of an environment with trl==1.12.0")
    parser.add_argument("--peer-grpo", help="Python of an environment with trl==1.16.0")
    parser.add_argument("--workload", type=Path, required=True, help="folder made by workload.py")
    parser.add_argument("--output", type=Path, required=True, help="folder for runs.jsonl and table.md")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=[], metavar="ROW")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="iterations of a run left out of its median")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32"],
        default="auto",
        help="of every side; auto: as each chooses",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
