"""Is `heedful choose` right? Eight tasks that it was not tuned on, a short budget each, beside longer runs.

python benchmarks/choose.py runs/choose-tasks [--tasks NAME ...] [--minutes 1.5]     the command on each task
python benchmarks/choose.py runs/choose-tasks --long                               eight seeds of four times the tokens
python benchmarks/choose.py runs/choose-tasks --report                             both side by side

Tasks differ in reward, length, group size, number of prompts (8 to 512) and difficulty. Models are tiny; three of them have
learned a little of their task from demonstrations. Nothing in a task was changed after its first run. The same command goes
on with what was cut off.

Hypotheses, written before the first run:

1. No recommendation is of the method that the longer run's interval calls worse.
2. Abstaining counts as a miss where the longer run's interval excludes 0: at most 3 misses in 8.
3. Where the score depends on the response alone (digits, window, letter, rhythm, both) the method that is ahead is PPO: one
   response to each of more prompts says more than a group, and the mean of the batch is baseline enough.
4. Where it depends on the prompt (copy, sum, few prompts) GRPO is ahead: the critic has had a few thousand responses to learn
   which prompts are hard, and a group knows at once.
5. In the task of 8 prompts, where both draw the same responses, the difference is the smallest of these three.
"""

import argparse
import contextlib
import io
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful import make_tiny_model
from heedful.algorithms.sft import train_sft
from heedful.cli.main import main as heedful
from heedful.configs.offline import SFTConfig
from heedful.display import silence
from heedful.files import to_json, write_text

Row = dict[str, Any]
HELD_OUT = 64
LONG_SEEDS, LONG_TIMES = 8, 4
"""Seeds of a longer run, and its tokens as a multiple of the short one's."""


def questions(count: int, draw: random.Random) -> list[Row]:
    """Prompts about nothing in particular, half of them Chinese."""
    numbers = draw.sample(range(1000, 9999), count)
    return [{"prompt": f"请写点什么（{n}）：" if n % 2 else f"Write something ({n}): "} for n in numbers]


def copies(count: int, draw: random.Random) -> list[Row]:
    """The first digit of a number."""
    numbers = [str(n) for n in draw.sample(range(1000, 9999), count)]
    return [{"prompt": f"{n}的首位：", "answer": n[0], "completion": n[0]} for n in numbers]


def sums(count: int, draw: random.Random) -> list[Row]:
    """The running sum modulo 10 of eight digits, with its working."""
    rows = []
    while len(rows) < count:
        digits = [draw.randrange(10) for _ in range(8)]
        working = [sum(digits[: i + 1]) % 10 for i in range(8)]
        shown = "".join(map(str, working)) + f" #### {working[-1]}"
        rows.append({"prompt": f"{''.join(map(str, digits))}=", "answer": str(working[-1]), "completion": shown})
    return rows


@dataclass(frozen=True)
class Task:
    """A model, prompts and a reward."""

    rewards: Sequence[str]
    prompts: int
    """To train on."""
    tokens: int
    """Most of a response."""
    group: int = 8
    make: Callable[[int, random.Random], list[Row]] = questions
    sft_steps: int = 0
    """Steps on demonstrations of other prompts; 0 starts from random weights."""


TASKS = {
    "digits": Task(["rule:digits"], prompts=64, tokens=8),
    "window": Task(["rule:length:20-30"], prompts=128, tokens=64),
    "letter": Task(["rule:regex:[zZ]"], prompts=256, tokens=12, group=4),
    "rhythm": Task(["rule:repetition:2"], prompts=512, tokens=48, group=16),
    "copy": Task(["rule:exact_number"], prompts=512, tokens=8, make=copies, sft_steps=20),
    "sum": Task(["rule:exact_number"], prompts=512, tokens=20, make=sums, sft_steps=300),
    "few prompts": Task(["rule:exact_number"], prompts=8, tokens=20, make=sums, sft_steps=300),
    "both": Task(["rule:digits", "rule:length:4-10"], prompts=64, tokens=24, group=16),
}


def prepare(name: str, folder: Path) -> tuple[Path, Path, Path]:
    """The model, the prompts and the held-out prompts of a task, made once."""
    task, draw = TASKS[name], random.Random(f"choose {name}")
    rows = task.make(task.prompts + HELD_OUT + (2000 if task.sft_steps else 0), draw)
    parts = {"train": rows[: task.prompts], "held-out": rows[task.prompts : task.prompts + HELD_OUT]}
    parts["demonstrations"] = rows[task.prompts + HELD_OUT :]
    folder.mkdir(parents=True, exist_ok=True)
    for part, some in parts.items():
        keys = ("prompt", "completion") if part == "demonstrations" else ("prompt", "answer")
        lines = (to_json({key: row[key] for key in keys if key in row}) for row in some)
        write_text(folder / f"{part}.jsonl", "".join(f"{line}\n" for line in lines))
    model = folder / "tiny"
    if not model.exists():
        make_tiny_model("gpt2", model, hidden_size=64, num_layers=2, max_length=128, seed=len(name))
    if task.sft_steps:
        sft = folder / "sft"
        if not (sft / "summary.json").exists():
            with silence():
                train_sft(
                    SFTConfig(
                        model=str(model), data=str(folder / "demonstrations.jsonl"), output=sft, max_steps=task.sft_steps,
                        learning_rate=1e-3, batch_size=32, eval_every=0, sample_every=0, device="cpu", dtype="float32",
                    )
                )  # fmt: skip
        model = sft / "final"
    return model, folder / "train.jsonl", folder / "held-out.jsonl"


def run(name: str, root: Path, budget: Sequence[str], kind: str) -> Row:
    """The command on a task; what it wrote."""
    task, folder = TASKS[name], root / name.replace(" ", "-")
    model, data, held_out = prepare(name, folder)
    output = folder / kind
    words = ["choose", "--model", model, "--data", data, "--eval-data", held_out, "--rewards", *task.rewards]
    words += ["--samples-per-prompt", task.group, "--max-new-tokens", task.tokens, "--learning-rate", "1e-3"]
    words += ["--device", "cpu", "--dtype", "float32", "--raw-prompts", "--output", output, *budget]
    with contextlib.redirect_stdout(io.StringIO()):
        status = heedful([str(word) for word in words])
    if status:
        sys.exit(f"{name}: heedful choose ended with status {status}")
    return read(output)


def read(output: Path) -> Row:
    """What the command found."""
    found: Row = json.loads((output / "choose.json").read_text(encoding="utf-8"))
    return found


def report(root: Path) -> None:
    """A row for each task: what the command said, and what the longer run found."""
    print("| task | short: PPO minus GRPO | it said | longer: PPO minus GRPO | right |\n|---|---|---|---|---|")
    for name in TASKS:
        folder = root / name.replace(" ", "-")
        if not (folder / "short" / "choose.json").exists():
            continue
        short, long = read(folder / "short"), None
        if (folder / "long" / "choose.json").exists():
            long = read(folder / "long")
        said, right = short["recommendation"], ""
        if long is not None:
            low, high = long["difference"]["low"], long["difference"]["high"]
            truth = "ppo" if low > 0 else "grpo" if high < 0 else None
            right = "yes" if said == truth else "miss" if said is None else "wrong" if truth else "not shown"
        shown = [_shown(one["difference"]) if one else "" for one in (short, long)]
        print(f"| {name} | {shown[0]} | {said or 'cannot tell yet'} | {shown[1]} | {right} |")
        print(f"|  | {short['sentence']} | | | |")


def _shown(change: Row) -> str:
    return f"{change['mean']:+.3f} ({change['low']:+.3f} to {change['high']:+.3f})"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        report(args.output)
        return
    for name in args.tasks:
        if args.long:
            short = read(args.output / name.replace(" ", "-") / "short")
            tokens = LONG_TIMES * short["methods"]["ppo"]["tokens"] // short["seeds"]
            found = run(
                name, args.output, ["--tokens", str(tokens), "--seeds", str(LONG_SEEDS), "--seed", "1000"], "long"
            )
        else:
            found = run(name, args.output, ["--minutes", str(args.minutes)], "short")
        print(f"{name}: {found['sentence']}", flush=True)


if __name__ == "__main__":
    main()
