"""Run the demo: train a random model with SFT, a reward model and PPO in the built-in world, and measure it at the end.

The stages are the commands ``heedful sft``, ``reward`` and ``ppo`` with the settings in ``recipe/``; the texts between them
are in ``story.toml`` and, in Chinese, in ``story.zh.toml``.
"""

import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from heedful.algorithms.ppo import train_ppo
from heedful.algorithms.reward_model import train_reward
from heedful.algorithms.sft import train_sft
from heedful.apps import plot
from heedful.apps.demo.folder import LABELS, RUNS, check_output, make_beginning
from heedful.apps.demo.labelling import EVAL, TRAIN, label_pairs
from heedful.apps.demo.measure import SAMPLES_FOR_RARE, Row, measure_accuracy, measure_policies
from heedful.apps.demo.story import STORIES, language_of, wrap
from heedful.apps.demo.watching import watch
from heedful.apps.demo.world import FLAW_WEIGHTS, GOOD
from heedful.configs.offline import RewardConfig, SFTConfig
from heedful.configs.online import PPOConfig
from heedful.configs.options import RunOptions
from heedful.configs.parse import parse
from heedful.configs.tools import DemoConfig, TinyConfig
from heedful.data import prompt_key, read_prompts, split_by_prompt
from heedful.display import Screen, print_table
from heedful.errors import ConfigError
from heedful.files import to_json, write_json
from heedful.kernels.device import resolve_device
from heedful.training.callbacks import OnSave
from heedful.training.output_folder import drop_replaced, finished, real_path
from heedful.training.performance import most_memory_gb
from heedful.training.result import TrainingResult

C = TypeVar("C")
RECIPE = Path(__file__).parent / "recipe"
WIDTH = 100
"""Columns of prose, and of tables if standard output is not a terminal."""
SHOWN_ANSWERS = 12
FROM_LABELS = ("--batch-size=16", "--max-steps=40", "--learning-rate=5e-4", "--warmup-steps=5", "--eval-every=10")
"""Settings of a reward model on a user's few labels (tens), instead of the recipe's."""
FOR_FEW_LABELS = "--kl-coef=0.3"
"""The KL coefficient with such a reward model: with the recipe's, PPO soon over-optimises it (docs/results/rounds.md)."""


@dataclass(frozen=True)
class DemoSettings:
    """The configurations of the random model and the three stages, parsed as by the commands."""

    tiny: TinyConfig
    sft: SFTConfig
    reward: RewardConfig
    ppo: PPOConfig


@dataclass(frozen=True)
class Sizes:
    """Sizes of the world. Demonstrations and pairs are counted without held-out ones; shares are percentages."""

    prompts: int
    held_out: int
    demonstrations: int
    good: float
    pairs: int
    swapped: float
    parameters: int
    tokens: int
    """The vocabulary's."""

    @property
    def blind(self) -> float:
        """Loss of blind guessing: nats per token."""
        return math.log(self.tokens)


@dataclass
class Demo:
    """A running demo with its measurements so far."""

    config: DemoConfig
    recipe: Path
    settings: DemoSettings
    screen: Screen
    sizes: Sizes
    story: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)
    labels: int = 0
    answers: list[Row] = field(default_factory=list)

    def say(self, name: str, **values: Any) -> None:
        """Print a text of the story with its gaps filled."""
        self.print(self.story[name].format(sizes=self.sizes, ppo=self.settings.ppo, **values))

    def print(self, text: str) -> None:
        """Print an empty line, the heading, if there is one, and the paragraphs."""
        self.screen.print()
        for paragraph in text.strip().split("\n\n"):
            if paragraph.startswith("# "):
                self.screen.print(paragraph[2:], style="bold", markup=False, highlight=False)
            else:
                lines = wrap(paragraph, min(self.screen.width, WIDTH))
                self.screen.print(lines, markup=False, highlight=False, soft_wrap=True)

    def steps(self, count: int) -> str:
        """A number of steps in words."""
        return str(self.story["one_step" if count == 1 else "steps"].format(count=count))

    def its_steps(self, count: int | None) -> str:
        """The steps of a stage in words; with None the data decides their number."""
        name = "the_run" if count is None else "its_steps"
        return str(self.story[name].format(steps=self.steps(count or 0)))

    def change(self, done: dict[str, Any], name: str, unit: float = 1) -> dict[str, Any]:
        """Values for the text after a stage: its work, and a metric before and after it."""
        first, last = (unit * done[f"{which}_evaluation"][name] for which in ("first", "last"))
        work = self.story["work"].format(steps=self.steps(done["steps"]), seconds=done["seconds"])
        return {"first": first, "last": last, "work": work}

    def train(
        self, train: Callable[..., TrainingResult], settings: RunOptions, name: str, on_save: OnSave | None = None
    ) -> dict[str, Any]:
        """Run a stage unless it is finished, and record its seconds. Returns its summary."""
        done = finished(settings) or train(settings, on_save=on_save).summary
        self.summary[f"{name}.seconds"] = done["seconds"]
        return done


def run_demo(config: DemoConfig, recipe: Path = RECIPE) -> dict[str, Any]:
    """Make a world and a random model, train it in three stages, measure it, and print the progress.

    Args:
        config: the folder, seed and device.
        recipe: a folder with the settings: tiny.yaml, sft.yaml, reward.yaml and ppo.yaml.

    An unfinished demo resumes at the stage and step where it stopped. Returns the content of summary.json.

    Raises ConfigError before anything is written; later DataError, CheckpointError, RewardError and TrainingError.
    """
    started = time.perf_counter()
    settings = read_recipe(config, recipe)
    resumes = check_output(config)
    resolve_device(config.device)
    screen = Screen() if Screen().is_terminal else Screen(width=WIDTH)
    before = [finished(run) for run in (settings.sft, settings.reward, settings.ppo)] if resumes else []
    spent = sum(summary["seconds"] for summary in before if summary)
    with make_beginning(config, settings.tiny, resumes=resumes):
        sizes = sizes_of(config.output, settings.ppo.eval_fraction)
        demo = Demo(config, recipe, settings, screen, sizes, STORIES[language_of(config.language)])
        demo.say("opening", instructions=torch.backends.cpu.get_cpu_capability())
        for stage in STAGES:
            stage(demo)
        demo.summary["seconds"] = round(spent + time.perf_counter() - started, 2)
        write_json(config.output / "summary.json", demo.summary)
        drop_replaced(real_path(config.output))
    _show_results(demo)
    return demo.summary


def _sft(demo: Demo) -> None:
    *flaws, last = (demo.story["kinds"][kind] for kind, weight in FLAW_WEIGHTS.items() if weight)
    listed = f"{demo.story['comma'].join(flaws)}{demo.story['or']}{last}"
    demo.say("before_sft", flaws=listed, steps=demo.its_steps(demo.settings.sft.max_steps))
    done = demo.train(train_sft, demo.settings.sft, "sft", on_save=watch(demo.settings.ppo))
    demo.say("after_sft", **demo.change(done, "eval/loss"))


def _label(demo: Demo) -> None:
    if demo.config.label:
        text = "before_simulated_labelling" if demo.config.label_simulated else "before_labelling"
        demo.say(text, pairs=demo.config.label_pairs)
        demo.labels = label_pairs(demo.config, demo.settings.ppo, demo.story, demo.print)
        demo.settings = read_recipe(demo.config, demo.recipe)


def _reward(demo: Demo) -> None:
    settings, from_labels = demo.settings.reward, "_from_labels" if demo.config.label else ""
    possible = 1 - demo.sizes.swapped / 100
    steps = demo.its_steps(settings.max_steps)
    demo.say(f"before_reward{from_labels}", steps=steps, labels=demo.labels, unswapped=possible)
    done = demo.train(train_reward, settings, "reward")
    accuracy = measure_accuracy(demo.settings.ppo, demo.config.output)
    demo.summary["reward.accuracy"] = accuracy
    demo.say(f"after_reward{from_labels}", accuracy=100 * accuracy, **demo.change(done, "eval/accuracy", 100))


def _ppo(demo: Demo) -> None:
    ppo = demo.settings.ppo
    hot = demo.story["hot"].format(ppo=ppo).strip() if ppo.temperature > 1 else ""
    steered = demo.story["steered"].format(target=ppo.kl_target) if ppo.kl_target else ""
    demo.say("before_ppo", steps=demo.steps(ppo.steps), hot=hot, steered=steered)
    done = demo.train(train_ppo, ppo, "ppo", on_save=watch(ppo))
    demo.say("after_ppo", kl=done["last_evaluation"]["eval/kl"], **demo.change(done, "eval/score_mean"))


def _measure(demo: Demo) -> None:
    demo.say("before_measuring")
    output = demo.config.output
    measured, demo.answers = measure_policies(demo.settings.ppo, output)
    (output / "answers.jsonl").write_text("".join(f"{to_json(row)}\n" for row in demo.answers), encoding="utf-8")
    plot.curves([output / run for run in RUNS], path=output / "curves.png")
    memory = {"peak_memory_gb": most_memory_gb(torch.device("cpu"))}
    demo.summary = {"seed": demo.config.seed, **measured, **demo.summary, **memory}


STAGES: tuple[Callable[[Demo], None], ...] = (_sft, _label, _reward, _ppo, _measure)


def read_recipe(config: DemoConfig, recipe: Path) -> DemoSettings:
    """Read the recipe's YAML files, with the demo's folders, seed and device as flags.

    With a user's labels, the reward model's batch size is at most their number, because most labels may be ties.

    Raises ConfigError, also if the files do not hold out the same prompts.
    """
    out = config.output
    machine = (f"--device={config.device}", f"--dtype={config.dtype}")

    def read(config_class: type[C], name: str, *flags: str) -> C:
        return parse(
            config_class, [str(recipe / f"{name}.yaml"), *flags, f"--seed={config.seed}"], prog=f"heedful {name}"
        )

    def run(config_class: type[C], name: str, model: str, data: str, *flags: str) -> C:
        places = (f"--output={out}/{name}", f"--model={out}/{model}", f"--data={out}/world/{data}.jsonl")
        return read(config_class, name, *places, *machine, *flags)

    labels, held_out = out / LABELS / TRAIN, out / LABELS / EVAL
    from_labels = (f"--data={labels}", f"--eval-data={held_out}", *FROM_LABELS) if config.label else ()
    few_labels = (FOR_FEW_LABELS,) if config.label else ()
    settings = DemoSettings(
        tiny=read(TinyConfig, "tiny", f"--output={out}/base", f"--texts={out}/world/demonstrations.jsonl"),
        sft=run(SFTConfig, "sft", "base", "demonstrations"),
        reward=run(RewardConfig, "reward", "sft/final", "preferences", *from_labels),
        ppo=run(PPOConfig, "ppo", "sft/final", "prompts", *few_labels, "--rewards", f"model:{out}/reward/final"),
    )
    if config.label and labels.is_file():
        batch_size = min(settings.reward.batch_size, labels.read_bytes().count(b"\n"))
        settings = replace(settings, reward=replace(settings.reward, batch_size=batch_size))
    fractions = {name: getattr(settings, name).eval_fraction for name in RUNS}
    if len(set(fractions.values())) > 1 or not fractions["ppo"]:
        raise ConfigError(
            f"{recipe}: all stages must hold out the same prompts, so eval_fraction must be one number above 0; got "
            f"{', '.join(f'{fraction} in {name}.yaml' for name, fraction in fractions.items())}"
        )
    return settings


def sizes_of(output: Path, eval_fraction: float) -> Sizes:
    """Count the training records in a demo's folder, and the parameters of the random model."""
    prompts = read_prompts(str(output / "world" / "prompts.jsonl"))
    held_out = {prompt_key(prompt.prompt) for prompt in split_by_prompt(prompts, eval_fraction)[1]}

    def trained_on(name: str) -> list[Row]:
        with (output / "world" / f"{name}.jsonl").open(encoding="utf-8") as file:
            return [row for row in map(json.loads, file) if row["prompt"][0]["content"] not in held_out]

    demonstrations, pairs = trained_on("demonstrations"), trained_on("preferences")
    return Sizes(
        prompts=len(prompts),
        held_out=len(held_out),
        demonstrations=len(demonstrations),
        good=100 * sum(row["kind"] == GOOD for row in demonstrations) / len(demonstrations),
        pairs=len(pairs),
        swapped=100 * sum(row["flipped"] for row in pairs) / len(pairs),
        parameters=(output / "base" / "model.safetensors").stat().st_size // 4,
        tokens=json.loads((output / "base" / "config.json").read_text(encoding="utf-8"))["vocab_size"],
    )


def _show_results(demo: Demo) -> None:
    """Print both models' answers side by side, their results, the reason for the difference, and the next commands."""
    summary = demo.summary
    for rows in (answer_table(demo.answers, demo.story), result_table(summary, demo.story)):
        demo.screen.print()
        print_table(demo.screen, "", rows)
    demo.say("after_measuring", wins=100 * summary["ppo.win_rate"], kl=summary["ppo.kl"])
    demo.say(
        why(summary, labelled=demo.config.label),
        before=summary["sft.gold"],
        after=summary["ppo.gold"],
        flawed=100 - demo.sizes.good,
        accuracy=100 * summary["reward.accuracy"],
    )
    demo.say("what_is_there", seconds=summary["seconds"], output=demo.config.output)
    for heading, commands in next_steps(demo.config, demo.settings.ppo):
        demo.screen.print()
        demo.screen.print(demo.story[heading], markup=False, highlight=False)
        for command in commands:
            demo.screen.print(f"  {shlex.join(command)}", markup=False, highlight=False, soft_wrap=True)


def why(summary: dict[str, Any], *, labelled: bool) -> str:
    """The name of the text that explains the improvement, or its absence."""
    if summary["ppo.gold"] > summary["sft.gold"]:
        return "better"
    return "not_better_from_labels" if labelled else "not_better"


def answer_table(answers: Sequence[Row], story: dict[str, Any]) -> list[Row]:
    """Rows of the table of answers: the first of each family in the file's order, without selection."""
    first: dict[str, Row] = {}
    for row in answers:
        first.setdefault(row["family"], row)
    columns = [f"{model}_{what}" for model in ("sft", "ppo") for what in ("response", "reward", "gold")]
    headings = [f"{model} {story[what]}" for model in ("SFT", "PPO") for what in ("answer", "reward", "gold")]
    return [
        {story["prompt"]: row["prompt"], **{name: row[column] for name, column in zip(headings, columns, strict=True)}}
        for row in list(first.values())[:SHOWN_ANSWERS]
    ]


def result_table(summary: dict[str, Any], story: dict[str, Any]) -> list[dict[str, str]]:
    """Rows of the table of results."""
    rows = [
        ("row_gold", "{:.2f}", "gold"),
        ("row_flawless", "{:.0%}", "flawless_frac"),
        ("row_reward", "{:z.2f}", "reward"),
        ("row_eos", "{:.1%}", "eos_frac"),
        ("row_empty", "{:.2%}", "empty_frac"),
    ]
    return [
        {
            story["held_out"].format(count=summary["prompts"]): story[name].format(samples=SAMPLES_FOR_RARE),
            "SFT": form.format(summary[f"sft.{key}"]),
            "PPO": form.format(summary[f"ppo.{key}"]),
        }
        for name, form, key in rows
    ]


def next_steps(config: DemoConfig, ppo: PPOConfig) -> list[tuple[str, list[list[str]]]]:
    """The next commands: names of headings in the story, each with its commands as lists of words."""
    out = str(config.output)
    policy, start = f"{out}/ppo/final", f"{out}/sft/final"
    length = ["--max-new-tokens", str(ppo.max_new_tokens)]
    measured = ["--data", ppo.data, "--eval-fraction", str(ppo.eval_fraction), *length, "--seed", str(config.seed)]
    measured += ["--dtype", config.dtype, *(["--device", config.device] if config.device != "auto" else [])]
    evaluate = ["heedful", "evaluate"]
    win_rate = [*evaluate, "win-rate", "--model", policy, "--baseline", start, *measured, "--rewards", *ppo.rewards]
    kl = [*evaluate, "kl", "--model", policy, "--reference", start, *measured]
    stages = [["heedful", run, f"{out}/{run}/config.yaml", "--output", f"{out}-again/{run}"] for run in RUNS]
    return [
        (
            "next_chat",
            [["heedful", "chat", "--model", model, *length] for model in (policy, start)],
        ),
        ("next_measure", [win_rate, kl]),
        (
            "next_curves",
            [
                ["heedful", "report", *(f"{out}/{run}" for run in RUNS)],
                *([["heedful", "look", f"{out}/ppo"]] if ppo.rollouts == "all" else []),
                ["tensorboard", "--logdir", out],
            ],
        ),
        ("next_course", [["heedful", "course"]]),
        ("next_stages", stages),
    ]
