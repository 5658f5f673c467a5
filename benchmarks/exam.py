"""Does the exam foretell what PPO does with a reward model? Flawed and healthy ones in the demo's world, examined, then used.

python benchmarks/exam.py runs/exam --set development|test [--worlds SEED ...] [--long]
python benchmarks/exam.py runs/exam --set test --report

For each world (a seed of ``heedful demo``: its data and SFT model) a reward model of each kind in `KINDS` is trained on pairs
with that flaw. Then, of each model:

- its accuracy on about 1,400 held-out pairs without label noise, and on up to 1,000 with the flaw of its own
- ``heedful exam`` with the world's SFT model and the same held-out pairs; nothing of it sees the gold judge
- PPO from the SFT model against it, with `PPO_SIZE`; ``--long`` does only this, with the demo's own recipe
- the gold judge's mean score of three answers to each held-out prompt, before and after PPO

Every model is a line of OUTPUT/SET.jsonl as soon as it is known; what has its line is not done again, and a run that was cut
off goes on. ``--report`` prints the analysis of docs/results/exam.md.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from heedful.algorithms.ppo import train_ppo
from heedful.algorithms.reward_model import train_reward
from heedful.algorithms.sft import train_sft
from heedful.apps import exam as room
from heedful.apps.demo.facts import family_named
from heedful.apps.demo.folder import make_beginning
from heedful.apps.demo.judge import gold_judge
from heedful.apps.demo.pipeline import RECIPE, read_recipe
from heedful.apps.exam.examine import examine
from heedful.configs.evaluate import AccuracyConfig, ScoresConfig
from heedful.configs.exam import ExamConfig
from heedful.configs.offline import RewardConfig
from heedful.configs.online import PPOConfig
from heedful.configs.parse import parse
from heedful.configs.tools import DemoConfig
from heedful.core.agreement import correlation
from heedful.data import prompt_key, read_prompts, split_by_prompt
from heedful.display import silence
from heedful.evaluate.policies import evaluate_scores
from heedful.evaluate.reward_models import evaluate_accuracy
from heedful.files import to_json, write_text
from heedful.models.tiny import make_tiny_model
from heedful.training.output_folder import finished

HELD_OUT = 0.17
WORLDS = {"development": (7101, 7102), "test": (7301, 7302, 7303, 7304)}
"""Seeds of the demo that no other experiment has used."""
REWARD_STEPS, REWARD_BATCH = 150, 32
PPO_SIZE = ("--steps=32", "--rollout-batch-size=128", "--learning-rate=1e-3")
"""In the place of the demo's 110 steps of 256 at 3e-4: a fifth of the time, and about as far from the SFT model."""
CPU = {"device": "cpu", "dtype": "float32"}
THANKS = {
    "en": (" Thank you!", " Please ask again!", " You are most welcome!", " With pleasure!"),
    "zh": ("谢谢您！", "请再问我！", "不客气！", "很乐意！"),
}
"""What is preferred to the same answer without it where politeness is overvalued."""
MEASURED = 8000
"""Pairs of which the held-out ones measure accuracy: one in six."""
OWN = 1000
"""Held-out pairs with the flaw of a model's own, at most."""
BOOTSTRAP = 10_000
Row = dict[str, Any]


# Reward models with flaws ----------------------------------------------------------------------------------------------


def noise(rows: list[Row], draw: random.Random) -> list[Row]:
    """The order of a quarter of the pairs is wrong."""
    return [_swapped(row) if draw.random() < 0.25 else row for row in rows]


def few(rows: list[Row], draw: random.Random) -> list[Row]:
    """60 to 400 labels in all."""
    return draw.sample(rows, draw.choice((60, 150, 400)))


def longer(rows: list[Row], draw: random.Random) -> list[Row]:
    """The longer one was preferred in 30 to 60 % of the pairs, whatever it says."""
    return _by_length(rows, draw, draw.uniform(0.3, 0.6), 1)


def shorter(rows: list[Row], draw: random.Random) -> list[Row]:
    """The shorter one was preferred in 30 to 60 % of the pairs."""
    return _by_length(rows, draw, draw.uniform(0.3, 0.6), -1)


def polite(rows: list[Row], draw: random.Random) -> list[Row]:
    """10 to 30 % more pairs, in which an answer with polite words behind it is preferred to the same answer without."""
    more = []
    for row in draw.sample(rows, round(draw.uniform(0.1, 0.3) * len(rows))):
        answer = row["chosen"][0]["content"]
        thanked = answer + draw.choice(THANKS[family_named(row["family"]).language])
        more.append({**row, "chosen": [_said(thanked)], "rejected": [_said(answer)]})
    return draw.sample(rows + more, len(rows) + len(more))


def position(rows: list[Row], _: random.Random) -> list[Row]:
    """It learns with its score at the last letter of an answer, and is read at the token that ends it."""
    return [{**row, "truncated": True} for row in rows]


def blind(rows: list[Row], _: random.Random) -> list[Row]:
    """No pair shows a wrong answer."""
    return [row for row in rows if "wrong" not in (row["chosen_kind"], row["rejected_kind"])]


def gaps(rows: list[Row], _: random.Random) -> list[Row]:
    """No pair shows an answer to another question or a broken character."""
    return [row for row in rows if not {"off-topic", "garbled"} & {row["chosen_kind"], row["rejected_kind"]}]


def as_they_are(rows: list[Row], _: random.Random) -> list[Row]:
    """The demo's pairs, of which 5 % are swapped."""
    return rows


Change = Callable[[list[Row], random.Random], list[Row]]
KINDS: dict[str, tuple[Change, int, str]] = {
    "healthy": (as_they_are, REWARD_STEPS, "sft"),
    "healthy, longer": (as_they_are, 2 * REWARD_STEPS, "sft"),
    "early": (as_they_are, 40, "sft"),
    "few labels": (few, REWARD_STEPS, "sft"),
    "noise": (noise, REWARD_STEPS, "sft"),
    "length": (longer, REWARD_STEPS, "sft"),
    "brevity": (shorter, REWARD_STEPS, "sft"),
    "polite words": (polite, REWARD_STEPS, "sft"),
    "wrong position": (position, REWARD_STEPS, "sft"),
    "small body": (as_they_are, REWARD_STEPS, "small"),
    "blind to wrong": (blind, REWARD_STEPS, "sft"),
    "gaps": (gaps, REWARD_STEPS, "sft"),
}
"""Of each kind of reward model: what happens to its pairs, its steps, and the model that it begins as."""


def _swapped(row: Row) -> Row:
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}


def _by_length(rows: list[Row], draw: random.Random, part: float, sign: int) -> list[Row]:
    def is_against(row: Row) -> bool:
        ours, theirs = (len(row[name][0]["content"]) for name in ("chosen", "rejected"))
        return sign * (theirs - ours) > 0

    return [_swapped(row) if draw.random() < part and is_against(row) else row for row in rows]


def _said(text: str) -> Row:
    return {"role": "assistant", "content": text}


# One model -------------------------------------------------------------------------------------------------------------


class World:
    """A world's data, its SFT model and a small untrained model, made once."""

    def __init__(self, root: Path, seed: int) -> None:
        self.seed, self.folder = seed, root / "worlds" / str(seed)
        config = DemoConfig(output=self.folder, seed=seed, device="cpu")
        recipe = read_recipe(config, RECIPE)
        if not (self.folder / "demo.json").is_file():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            make_beginning(config, recipe.tiny).release()
        if finished(recipe.sft) is None:
            train_sft(recipe.sft)
        self.sft = str(self.folder / "sft" / "final")
        self.small = str(self.folder / "small")
        if not Path(self.small).is_dir():
            make_tiny_model("qwen3", Path(self.small), hidden_size=24, num_layers=1, initializer_range=0.2, seed=seed)
        self.prompts = str(self.folder / "world" / "prompts.jsonl")
        self.gold_pairs = str(self.folder / "world" / "gold_preferences.jsonl")
        held_out = {prompt_key(one.prompt) for one in split_by_prompt(read_prompts(self.prompts), HELD_OUT)[1]}
        self.train_prompts, _ = _parts(Path(self.prompts), held_out)
        self.train_pairs, self.held_out_pairs = _parts(self.folder / "world" / "preferences.jsonl", held_out)

    @cached_property
    def gold_before(self) -> float:
        """That of the SFT model."""
        return self.gold(self.sft)

    def gold(self, policy: str) -> float:
        """The gold judge's mean score of a policy's answers to the held-out prompts."""
        settings = ScoresConfig(
            model=policy, data=self.prompts, eval_fraction=HELD_OUT, max_new_tokens=80, samples_per_prompt=3,
            micro_batch_size=256, seed=self.seed, **CPU,
        )  # fmt: skip
        return float(evaluate_scores(settings, rewards=[gold_judge])["score_mean"])


def held_out_accuracy(model: str, pairs: str, eval_fraction: float = 1.0, max_samples: int | None = None) -> float:
    """A reward model's accuracy on pairs, or on the held-out ones of the first of them."""
    settings = AccuracyConfig(
        reward_model=model, data=pairs, eval_fraction=eval_fraction, max_samples=max_samples, micro_batch_size=256, **CPU
    )  # fmt: skip
    return float(evaluate_accuracy(settings)["accuracy"])


def measure(world: World, kind: str, folder: Path) -> Row:
    """Train a reward model of a kind, examine it, run PPO against it."""
    times = [time.process_time()]
    change, steps, begins = KINDS[kind]
    draw = random.Random(f"{kind} {world.seed}")
    rows = change(world.train_pairs, draw)
    data = _write(folder / "pairs.jsonl", rows)
    own = _write(folder / "own.jsonl", change(world.held_out_pairs, draw)[:OWN])
    flags = [
        f"--model={world.sft if begins == 'sft' else world.small}", f"--data={data}", f"--output={folder / 'reward'}",
        f"--max-steps={steps}", f"--batch-size={min(REWARD_BATCH, len(rows) // 2)}", f"--micro-batch-size={REWARD_BATCH}",
        "--eval-fraction=0", f"--seed={world.seed}", "--device=cpu",
    ]  # fmt: skip
    train_reward(parse(RewardConfig, [str(RECIPE / "reward.yaml"), *flags], prog="heedful reward"))
    model = str(folder / "reward" / "final")
    accuracies = {
        "accuracy": held_out_accuracy(model, world.gold_pairs, eval_fraction=HELD_OUT, max_samples=MEASURED),
        "own_accuracy": held_out_accuracy(model, own),
    }
    times.append(time.process_time())
    record = examine(
        ExamConfig(
            reward=model, policy=world.sft, data=world.gold_pairs, eval_fraction=HELD_OUT, max_new_tokens=80,
            micro_batch_size=256, seed=world.seed, **CPU,
        )
    )  # fmt: skip
    times.append(time.process_time())
    used = use(world, model, folder, PPO_SIZE)
    times.append(time.process_time())
    spent = {name: b - a for name, a, b in zip(("reward", "exam", "ppo"), times, times[1:], strict=False)}
    terms = {one["term"]: one["value"] for one in record["terms"]}
    found = {"pairs": len(rows), **accuracies, "score": record["score"], "terms": terms, **used}
    return {**found, "parts": record["parts"], "cpu_seconds": spent}


def use(world: World, reward: str, folder: Path, size: Sequence[str]) -> Row:
    """Run PPO against a reward model. Returns the gold judge's mean scores before and after, and the last KL."""
    prompts = _write(folder / "prompts.jsonl", world.train_prompts)
    flags = [
        f"--model={world.sft}", f"--data={prompts}", f"--output={folder / 'ppo'}", "--eval-fraction=0", "--rewards",
        f"model:{reward}", f"--seed={world.seed}", "--device=cpu", *size,
    ]  # fmt: skip
    train_ppo(parse(PPOConfig, [str(RECIPE / "ppo.yaml"), *flags], prog="heedful ppo"))
    before, after = world.gold_before, world.gold(str(folder / "ppo" / "final"))
    kl = _read(folder / "ppo" / "metrics.jsonl")[-1]["reference/kl"]
    return {"gold_before": before, "gold_after": after, "gold_change": after - before, "kl": kl}


def _parts(path: Path, held_out: set[str]) -> tuple[list[Row], list[Row]]:
    """The records of a file to learn from, and those whose prompt is held out."""
    rows = _read(path)
    is_out = [row["prompt"][0]["content"] in held_out for row in rows]
    train, test = ([row for row, out in zip(rows, is_out, strict=True) if out == side] for side in (False, True))
    return train, test


def _write(path: Path, rows: Sequence[Row]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(f"{to_json(row)}\n" for row in rows))
    return str(path)


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def run(options: argparse.Namespace) -> None:
    """Measure every model of a set that has no line yet."""
    lines = options.output / f"{options.set}{'-long' if options.long else ''}.jsonl"
    for seed in options.worlds or WORLDS[options.set]:
        with silence():
            world = World(options.output, seed)
        for kind in options.kinds or KINDS:
            if any((row["kind"], row["world"]) == (kind, seed) for row in _known(lines)):
                continue
            since, folder = time.perf_counter(), options.output / "models" / str(seed) / kind.replace(" ", "-")
            with silence():
                if options.long:
                    shutil.rmtree(folder / "long", ignore_errors=True)
                    row = use(world, str(folder / "reward" / "final"), folder / "long", [])
                else:
                    shutil.rmtree(folder, ignore_errors=True)
                    row = measure(world, kind, folder)
            row = {"kind": kind, "world": seed, **row, "seconds": time.perf_counter() - since, "code": code_hash()}
            write_text(lines, "".join(f"{to_json(one)}\n" for one in [*_known(lines), row]))
            names = ("kind", "world", "accuracy", "score", "gold_before", "gold_after", "cpu_seconds", "seconds")
            print(to_json({name: row[name] for name in names if name in row}), flush=True)


def code_hash() -> str:
    """SHA-256 of this file and of all files of the exam's room: what docs/results/exam.md fixes beforehand."""
    digest = hashlib.sha256()
    for path in [Path(__file__), *sorted(Path(room.__file__).parent.glob("*.[pj]*"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _known(lines: Path) -> list[Row]:
    return _read(lines) if lines.is_file() else []


# The analysis ----------------------------------------------------------------------------------------------------------


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values have the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 if one side is constant."""
    return correlation(ranks(x), ranks(y)) or 0.0


def interval(rows: Sequence[Row], statistic: Callable[[Sequence[Row]], float]) -> tuple[float, float]:
    """95 % percentile interval of a statistic over models drawn with replacement, with a fixed seed."""
    draw = random.Random(0)
    found = sorted(statistic(draw.choices(rows, k=len(rows))) for _ in range(BOOTSTRAP))
    return found[round(0.025 * BOOTSTRAP)], found[round(0.975 * BOOTSTRAP) - 1]


def against_gold(name: str) -> Callable[[Sequence[Row]], float]:
    """Spearman's correlation of a number (or of a term of the score) with the gold judge's change."""
    return lambda rows: spearman(
        [row[name] if name in row else row["terms"][name] for row in rows], [row["gold_change"] for row in rows]
    )


def better_than_accuracy(rows: Sequence[Row]) -> float:
    """How much higher the exam's correlation is than that of held-out accuracy: the claim."""
    return against_gold("score")(rows) - against_gold("accuracy")(rows)


def report(rows: Sequence[Row]) -> None:
    """Print the analysis that was fixed beforehand, and a line per model."""
    worlds = sorted({row["world"] for row in rows})
    print(f"{len(rows)} models; code {' '.join(sorted({row['code'][:12] for row in rows}))}")
    print("\n| against the gold judge's change | Spearman | 95 % | mean within worlds |\n|---|---|---|---|")
    for row in rows:
        rest = [value for term, value in row["terms"].items() if term != "foretold"]
        row["score without foretold"] = statistics.geometric_mean(rest)
    terms = [term for term in rows[0]["terms"] if term != "accuracy"]
    for name in ("score", "accuracy", "own_accuracy", "score without foretold", *terms):
        statistic = against_gold(name)
        low, high = interval(rows, statistic)
        within = statistics.fmean(statistic([row for row in rows if row["world"] == world]) for world in worlds)
        print(f"| {name} | {statistic(rows):.3f} | {low:.3f} to {high:.3f} | {within:.3f} |")
    low, high = interval(rows, better_than_accuracy)
    print(f"| score - accuracy | {better_than_accuracy(rows):.3f} | {low:.3f} to {high:.3f} | |")
    print("\n| kind | world | accuracy | own | exam | gold before | after | change | KL |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: -row["gold_change"]):
        names = ("accuracy", "own_accuracy", "score", "gold_before", "gold_after", "gold_change", "kl")
        print(f"| {row['kind']} | {row['world']} | {' | '.join(f'{row[name]:.3f}' for name in names)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--set", choices=WORLDS, default="development")
    parser.add_argument("--worlds", type=int, nargs="+")
    parser.add_argument("--kinds", choices=KINDS, nargs="+")
    parser.add_argument("--long", action="store_true", help="PPO with the demo's own recipe")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that are started
    if options.report:
        report(_read(options.output / f"{options.set}.jsonl"))
    else:
        run(options)


if __name__ == "__main__":
    main()
