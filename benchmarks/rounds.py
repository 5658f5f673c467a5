"""Rounds of labels in the demo's world: three rounds of 300 against one of 900, and how many labels a reward model needs.

python benchmarks/rounds.py runs/rounds [--seeds 1 2 3] [--development-seed 0]

Labellers are simulated: each prefers what the gold judge prefers with probability 0.73; equal gold scores are a tie, which is
a label that teaches nothing. For each seed a model is fine-tuned as in ``heedful demo``, and all of the rest begins from it:

- ``curve``: accuracy of reward models on 50 to 900 labels of random pairs, against the gold judge, on held-out prompts
- ``active``: 300 labels more, drawn at random or chosen by three reward models that disagree (a fifth is random)
- ``three`` and ``one``: ``heedful round`` three times with 300 labels, and once with 900
- ``demo``: what ``heedful demo --label`` does with 30 labels, of somebody who agrees with the gold judge always, or on 0.73

How often reward models read their labels is chosen on the development seed, by their accuracy with 300 labels, before
anything else. Every number is a line of OUTPUT/rows.jsonl as soon as it is known; what has its line is not done again.
``--report`` prints the tables of what is there.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heedful.algorithms.ppo import train_ppo
from heedful.algorithms.reward_model import train_reward
from heedful.algorithms.sft import train_sft
from heedful.apps.demo import judge as gold
from heedful.apps.demo.folder import make_beginning
from heedful.apps.demo.pipeline import FROM_LABELS, RECIPE, read_recipe
from heedful.apps.label.project import Project
from heedful.apps.label.records import Item
from heedful.apps.rounds.judging import Labeller, label_project, load_judge, scores_of
from heedful.apps.rounds.pairs import Choice, Pair, choose, different_pairs, disagreement, item_of
from heedful.apps.rounds.round import run_round
from heedful.apps.rounds.sample import sample_answers
from heedful.configs.evaluate import AccuracyConfig, WinRateConfig
from heedful.configs.label import ProjectSettings
from heedful.configs.offline import RewardConfig, SFTConfig
from heedful.configs.parse import parse
from heedful.configs.rounds import RoundConfig
from heedful.configs.scoring import RewardOptions
from heedful.configs.tools import DemoConfig, SampleConfig
from heedful.data import read_prompts, split_by_prompt
from heedful.evaluate.policies import evaluate_win_rate
from heedful.evaluate.reward_models import evaluate_accuracy
from heedful.files import to_json, write_text
from heedful.training.output_folder import finished

HELD_OUT = 0.17
AGREEMENT = 0.73
NUMBERS = (50, 100, 200, 300, 600, 900)
EPOCHS = (2, 4, 8, 16)
MEMBERS = 3
MEASURED = ("over_previous", "judge_over_previous", "judge_over_first", "kl")
CPU = {"device": "cpu", "dtype": "float32"}
Row = dict[str, Any]


class Rows:
    """The lines of rows.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        self.rows = [json.loads(line) for line in lines if line]

    def find(self, **named: Any) -> list[Row]:
        return [row for row in self.rows if all(row.get(name) == value for name, value in named.items())]

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(to_json(row) + "\n")
        print(to_json(row), flush=True)


class World:
    """A seed's world, its fine-tuned model, four answers of that to every prompt, and the judge."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.options, self.seed = options, seed
        self.folder = options.output / f"seed-{seed}"
        self.demo = self.folder / "demo"
        config = DemoConfig(output=self.demo, seed=seed, device="cpu")
        self.recipe = read_recipe(config, RECIPE)
        sft = [str(RECIPE / "sft.yaml"), f"--max-steps={options.sft_steps}", f"--output={self.demo / 'sft'}"]
        sft += [f"--model={self.demo / 'base'}", f"--data={self.demo / 'world' / 'demonstrations.jsonl'}"]
        sft += [f"--seed={seed}", "--device=cpu", "--dtype=float32", "--save-minutes=1"]
        if not (self.demo / "demo.json").is_file():
            make_beginning(config, self.recipe.tiny).release()
        settings = parse(SFTConfig, sft, prog="heedful sft")
        if finished(settings) is None:
            train_sft(settings)
        self.sft = str(self.demo / "sft" / "final")
        self.prompts = str(self.demo / "world" / "prompts.jsonl")
        answers = self.folder / "answers.jsonl"
        if not answers.is_file():
            sample_answers(
                SampleConfig(
                    models=(self.sft,), data=self.prompts, output=answers, answers=4, max_new_tokens=80, seed=seed,
                    micro_batch_size=256, **CPU,
                )
            )  # fmt: skip
        rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").split("\n") if line]
        held_out = {p.prompt for p in split_by_prompt(read_prompts(self.prompts), HELD_OUT)[1]}
        texts = {prompt[0].content for prompt in held_out}
        self.train = [row for row in rows if row["prompt"][0]["content"] not in texts]
        self.pairs = [different_pairs([answer["response"] for answer in row["responses"]]) for row in self.train]
        self.test = self.folder / "test.jsonl"
        _write(self.test, self._by_gold([row for row in rows if row["prompt"][0]["content"] in texts]))

    def scores(self, row: Row, pair: Pair) -> tuple[float, float]:
        said = [row["responses"][at] for at in pair]
        ended = [not answer["source"]["truncated"] for answer in said]
        first, second = (
            gold.gold_score(row["family"], row["answer"], answer["response"], end)
            for answer, end in zip(said, ended, strict=True)
        )
        return first, second

    def _by_gold(self, rows: Sequence[Row]) -> list[Row]:
        """Every pair of a prompt's answers that the gold judge does not score equally, in its order."""
        found = []
        for row in rows:
            for pair in different_pairs([answer["response"] for answer in row["responses"]]):
                first, second = self.scores(row, pair)
                if first != second:
                    found.append(_record(row, pair, int(second > first)))
        return found

    def labelled(self, chosen: Sequence[Choice], agreement: float = AGREEMENT) -> list[Row]:
        """What a simulated labeller makes of chosen pairs; ties are left out."""
        labeller = Labeller("simulated", seed=self.seed, agreement=agreement)
        records = []
        for choice in chosen:
            row = self.train[choice.prompt]
            answer = labeller.answer(item_of(row, choice, 1), self.scores(row, choice.pair))
            if answer["preferred"] is not None:
                records.append(_record(row, choice.pair, answer["preferred"]))
        return records

    def reward_model(self, name: str, records: Sequence[Row], epochs: float, member: int = 0) -> str:
        """Train a reward model on records, unless it is there. Returns its folder."""
        folder = self.folder / "reward-models" / name
        data = folder.with_suffix(".jsonl")
        data.parent.mkdir(parents=True, exist_ok=True)
        _write(data, records)
        settings = parse(
            RewardConfig,
            [
                str(reward_yaml(self.options, epochs)), f"--model={self.sft}", f"--data={data}", f"--output={folder}",
                "--eval-fraction=0", f"--batch-size={min(32, len(records))}", f"--seed={1000 * self.seed + member}",
                "--device=cpu", "--dtype=float32",
            ],
            prog="heedful reward",
        )  # fmt: skip
        if finished(settings) is None:
            train_reward(settings)
        return str(folder / "final")

    def accuracy(self, model: str) -> Row:
        """How often a reward model orders held-out pairs as the gold judge does: the policy's answers, and the world's."""
        of_policy = evaluate_accuracy(
            AccuracyConfig(reward_model=model, data=str(self.test), micro_batch_size=256, **CPU)
        )
        world = str(self.demo / "world" / "gold_preferences.jsonl")
        of_world = evaluate_accuracy(
            AccuracyConfig(reward_model=model, data=world, eval_fraction=HELD_OUT, micro_batch_size=256, **CPU)
        )
        return {"accuracy": of_policy["accuracy"], "pairs": of_policy["pairs"], "world_accuracy": of_world["accuracy"]}


def reward_yaml(options: argparse.Namespace, epochs: float) -> Path:
    """Settings of reward models: the demo's, with smaller batches, and as many passes as were chosen."""
    path: Path = options.output / f"reward-{epochs:g}.yaml"
    text = (
        f"batch_size: 32\nmicro_batch_size: 32\nepochs: {epochs:g}\nlearning_rate: 5e-4\nlr_schedule: cosine\n"
        "warmup_steps: 5\nweight_decay: 0.01\nadam_beta2: 0.95\ndtype: float32\neval_every: 0\nsample_every: 0\n"
    )
    write_text(path, text)
    return path


def ppo_yaml(options: argparse.Namespace) -> Path:
    """Settings of PPO: the demo's, but for the number of steps and a larger penalty on KL: a reward model of so few labels is
    soon exploited."""
    own = ("steps", "max_new_tokens", "dtype", "eval_fraction", "eval_every", "kl_coef")
    kept = [line for line in (RECIPE / "ppo.yaml").read_text("utf-8").splitlines() if line.partition(":")[0] not in own]
    text = "\n".join(line for line in kept if not line.startswith("#"))
    path: Path = options.output / "ppo.yaml"
    write_text(path, f"{text}\nsteps: {options.ppo_steps}\nkl_coef: {options.kl_coef}\neval_every: 0\n")
    return path


def choose_epochs(options: argparse.Namespace, rows: Rows) -> float:
    """The number of passes with the highest accuracy on the development seed, with 300 labels."""
    if len(rows.find(kind="epochs")) < len(EPOCHS):
        world = World(options, options.development_seed)
        records = world.labelled(choose(world.pairs, options.labels, "development"))
        for epochs in EPOCHS:
            if not rows.find(kind="epochs", epochs=epochs):
                model = world.reward_model(f"epochs-{epochs}", records, epochs)
                rows.add(kind="epochs", seed=world.seed, epochs=epochs, records=len(records), **world.accuracy(model))
    best = max(rows.find(kind="epochs"), key=lambda row: row["accuracy"])
    return float(best["epochs"])


def curve(world: World, rows: Rows, epochs: float) -> None:
    """Reward models on the first 50, 100, ... of the same labels."""
    chosen = choose(world.pairs, max(NUMBERS), f"curve {world.seed}")
    for number in NUMBERS:
        if not rows.find(kind="curve", seed=world.seed, labels=number):
            records = world.labelled(chosen[:number])
            model = world.reward_model(f"curve-{number}", records, epochs)
            rows.add(kind="curve", seed=world.seed, labels=number, records=len(records), **world.accuracy(model))


def active(world: World, rows: Rows, epochs: float) -> None:
    """300 labels, then 300 more: at random, or by disagreement."""
    ways = [way for way in ("random", "active") if not rows.find(kind="active", seed=world.seed, way=way)]
    if not ways:
        return
    number = world.options.labels
    first = choose(world.pairs, number, f"active {world.seed}")
    start = world.labelled(first)
    asked = {(choice.prompt, choice.pair) for choice in first}
    left = [[pair for pair in own if (at, pair) not in asked] for at, own in enumerate(world.pairs)]
    members = [world.reward_model(f"member-{m}", start, epochs, m) for m in range(MEMBERS)]
    scores = [scores_of_model(world, model) for model in members]
    values = [
        [disagreement([own[at] for own in scores], pair) for pair in own_left] for at, own_left in enumerate(left)
    ]
    for way in ways:
        if way == "active":
            more = choose(left, number, f"more {world.seed}", disagreements=values, random_share=0.2)
        else:
            more = choose(left, number, f"more {world.seed}")
        records = [*start, *world.labelled(more)]
        models = [world.reward_model(f"{way}-{m}", records, epochs, m) for m in range(MEMBERS)]
        measured = [world.accuracy(model) for model in models]
        rows.add(
            kind="active", seed=world.seed, way=way, labels=2 * number, records=len(records),
            accuracy=statistics.mean(one["accuracy"] for one in measured),
            world_accuracy=statistics.mean(one["world_accuracy"] for one in measured),
            members=[one["accuracy"] for one in measured],
        )  # fmt: skip


def scores_of_model(world: World, model: str) -> list[list[float]]:
    judge = load_judge([f"model:{model}"], RewardOptions(), DemoConfig(output=world.demo, device="cpu"))
    return scores_of(judge, [(row["prompt"], row["responses"], row) for row in world.train])


def loop(world: World, rows: Rows, epochs: float, *, arm: str, rounds: int, labels: int) -> None:
    """Rounds of a project, as ``heedful round`` does them, with simulated labellers between."""
    folder = world.folder / arm
    if not (folder / "project.yaml").is_file():
        Project.create(folder, ProjectSettings(name=arm, overlap=0.0, repeats=0.0, seed=world.seed)).close()
    config = RoundConfig(
        project=folder, policy=world.sft, prompts=world.prompts, labels=labels, answers=4, ask_held_out=False,
        max_new_tokens=80, eval_fraction=HELD_OUT, seed=world.seed, judge=(f"python:{gold.__file__}:gold_judge",),
        reward_config=reward_yaml(world.options, epochs), ppo_config=ppo_yaml(world.options), micro_batch_size=256, **CPU,
    )  # fmt: skip
    for number in range(1, rounds + 1):
        if rows.find(kind="loop", seed=world.seed, arm=arm, round=number):
            continue
        since = time.perf_counter()
        notes = run_round(config)
        if notes.step == "label":
            label_all(folder, world)
            notes = run_round(config)
        assert notes.number == number
        steps = notes.steps
        measured = {
            name: steps["evaluate"][name] for name in ("over_previous", "judge_over_previous", "judge_over_first", "kl")
        }
        rows.add(
            kind="loop", seed=world.seed, arm=arm, round=number, labels=number * labels,
            records=steps["reward"]["train_pairs"], ties=steps["label"]["statistics"]["ties"], ppo=steps["ppo"],
            **world.accuracy(steps["reward"]["models"][0]), **measured, seconds=round(time.perf_counter() - since),
        )  # fmt: skip


def demo(world: World, rows: Rows, agreement: float) -> None:
    """30 labels, a reward model from only these, and PPO, with the settings of the demo."""
    if rows.find(kind="demo", seed=world.seed, agreement=agreement):
        return
    chosen = choose(world.pairs, 30, f"demo {world.seed}")
    records = world.labelled(chosen, agreement)
    folder = world.folder / f"demo-{agreement:g}"
    folder.mkdir(exist_ok=True)
    _write(folder / "labels.jsonl", records)
    flags = [f"--model={world.sft}", f"--data={folder / 'labels.jsonl'}", f"--output={folder / 'reward'}", *FROM_LABELS]
    flags += ["--eval-fraction=0", f"--batch-size={min(16, len(records))}", f"--seed={world.seed}", "--device=cpu"]
    settings = parse(RewardConfig, [str(RECIPE / "reward.yaml"), *flags], prog="heedful reward")
    if finished(settings) is None:
        train_reward(settings)
    model = f"{settings.output}/final"
    ppo = replace(
        world.recipe.ppo,
        model=world.sft,
        rewards=(f"model:{model}",),
        output=folder / "ppo",
        kl_coef=world.options.kl_coef,
        eval_every=0,
        save_minutes=1.0,
    )
    if finished(ppo) is None:
        train_ppo(ppo)
    compared = WinRateConfig(
        model=f"{ppo.output}/final", baseline=world.sft, data=world.prompts, eval_fraction=HELD_OUT, max_new_tokens=80,
        seed=world.seed, micro_batch_size=256, num_samples=10, **CPU,
    )  # fmt: skip
    by_gold = evaluate_win_rate(compared, rewards=[gold.gold_judge])
    rows.add(
        kind="demo", seed=world.seed, agreement=agreement, labels=30, records=len(records), **world.accuracy(model),
        gold=by_gold["score_mean"], sft_gold=by_gold["baseline_score_mean"], win_rate=by_gold["win_rate"],
        samples=by_gold["samples"],
    )  # fmt: skip


def label_all(folder: Path, world: World) -> None:
    """Three simulated people label everything that is left."""
    with Project.open(folder) as project:
        names = [f"simulated-{at}" for at in (1, 2, 3)]
        known = {person.name: person.person_id for person in project.people()}
        people = [(known.get(n) or project.add_person(n, "annotator").person_id, n) for n in names]
        labellers = [(person, Labeller(n, seed=world.seed, agreement=AGREEMENT)) for person, n in people]
        label_project(project, labellers, _gold_of)


def _gold_of(item: Item) -> list[float]:
    return [
        gold.gold_score(
            item.columns["family"], item.columns["answer"], one.response, not (one.source or {})["truncated"]
        )
        for one in item.candidates
    ]


def _record(row: Row, pair: Pair, preferred: int) -> Row:
    texts = [row["responses"][at]["response"] for at in pair]
    return {"prompt": row["prompt"], "chosen": texts[preferred], "rejected": texts[1 - preferred]}


def _write(path: Path, records: Sequence[Row]) -> None:
    write_text(path, "".join(f"{to_json(record)}\n" for record in records))


def report(rows: Rows) -> None:
    """Print the tables of what is there, in Markdown."""
    print("| passes | accuracy with 300 labels, development seed |\n|---|---|")
    for row in rows.find(kind="epochs"):
        print(f"| {row['epochs']} | {row['accuracy']:.3f} |")
    seeds = sorted({row["seed"] for row in rows.rows if row["kind"] != "epochs"})
    head = " | ".join(f"seed {seed}" for seed in seeds)
    print(f"\n| labels | {head} | mean | pairs of the world, mean |\n|---|{'---|' * (len(seeds) + 2)}")
    for number in NUMBERS:
        found = rows.find(kind="curve", labels=number)
        if found:
            print(f"| {number} | {_cells(found, seeds, 'accuracy')} | {_mean(found, 'world_accuracy')} |")
    print(f"\n| 300 labels and 300 more | {head} | mean | pairs of the world, mean |\n|---|{'---|' * (len(seeds) + 2)}")
    for way in ("random", "active"):
        found = rows.find(kind="active", way=way)
        if found:
            print(f"| {way} | {_cells(found, seeds, 'accuracy')} | {_mean(found, 'world_accuracy')} |")
    print("\n| labeller of 30 | seed | preferences | accuracy | gold, SFT | gold, PPO | win rate |")
    print("|---|---|---|---|---|---|---|")
    for row in rows.find(kind="demo"):
        cells = [f"{row[name]:.3f}" for name in ("accuracy", "sft_gold", "gold", "win_rate")]
        print(f"| {row['agreement']} | {row['seed']} | {row['records']} | {' | '.join(cells)} |")
    for name, value in (
        ("preferences so far, ties left out", lambda row: row["records"]),
        ("gold score", lambda row: row["judge_over_first"]["score_mean"]),
        ("gold win rate over the round before", lambda row: row["judge_over_previous"]["win_rate"]),
        ("gold win rate over SFT", lambda row: row["judge_over_first"]["win_rate"]),
        ("reward model against gold", lambda row: row["accuracy"]),
        ("KL to SFT, nats per answer", lambda row: row["kl"]),
    ):
        print(f"\n| {name} | {head} | mean |\n|---|{'---|' * (len(seeds) + 1)}")
        if name == "gold score":
            found = [
                {**row, name: row["judge_over_first"]["baseline_score_mean"]} for row in rows.find(kind="loop", round=1)
            ]
            print(f"| SFT | {_cells([r for r in found if r['arm'] == 'three'], seeds, name)} |")
        for arm, number in (("three", 1), ("three", 2), ("three", 3), ("one", 1)):
            found = [{**row, name: value(row)} for row in rows.find(kind="loop", arm=arm, round=number)]
            if found:
                label = f"round {number} of three" if arm == "three" else "one round"
                print(f"| {label}, {found[0]['labels']} labels wanted | {_cells(found, seeds, name)} |")


def _cells(found: Sequence[Row], seeds: Sequence[int], name: str) -> str:
    by_seed = {row["seed"]: row[name] if isinstance(row[name], int) else f"{row[name]:.3f}" for row in found}
    cells = [f"{by_seed.get(seed, '')}" for seed in seeds]
    return " | ".join([*cells, _mean(found, name)])


def _mean(found: Sequence[Row], name: str) -> str:
    if not found:
        return ""
    mean = statistics.mean(row[name] for row in found)
    return f"{mean:.0f}" if isinstance(found[0][name], int) else f"{mean:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--development-seed", type=int, default=0)
    parser.add_argument("--labels", type=int, default=300)
    parser.add_argument("--sft-steps", type=int, default=2600)
    parser.add_argument("--ppo-steps", type=int, default=60)
    parser.add_argument("--kl-coef", type=float, default=0.3)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    rows = Rows(options.output / "rows.jsonl")
    if options.report:
        report(rows)
        return
    epochs = choose_epochs(options, rows)
    for seed in options.seeds:
        world = World(options, seed)
        loop(world, rows, epochs, arm="three", rounds=3, labels=options.labels)
        loop(world, rows, epochs, arm="one", rounds=1, labels=3 * options.labels)
        curve(world, rows, epochs)
        active(world, rows, epochs)
    for seed in options.seeds:
        world = World(options, seed)
        demo(world, rows, 1.0)
        demo(world, rows, AGREEMENT)


if __name__ == "__main__":
    main()
