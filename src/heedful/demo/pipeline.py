"""Run the demo: train a random model with SFT, a reward model and PPO in the built-in world, and measure it at the end.

The stages are the commands ``heedful sft``, ``reward`` and ``ppo`` with the settings in ``recipe/``.
"""

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from heedful.configs.offline import RewardConfig, SFTConfig
from heedful.configs.online import PPOConfig
from heedful.configs.parse import parse
from heedful.configs.tools import DemoConfig, TinyConfig
from heedful.data import prompt_key, read_prompts, split_by_prompt
from heedful.demo import story
from heedful.demo.folder import LABELS, STAGES, check_output, drop_replaced, make_beginning
from heedful.demo.labelling import EVAL, TRAIN, label_pairs
from heedful.demo.measure import Row, first_of_families, measure_accuracy, measure_policies
from heedful.demo.story import Sizes
from heedful.demo.world import GOOD
from heedful.display import Screen, print_table
from heedful.errors import ConfigError
from heedful.evaluate.curves import draw_curves
from heedful.files import to_json, write_json
from heedful.kernels.device import resolve_device
from heedful.lock import FolderLock
from heedful.train.online.engine import train_ppo
from heedful.train.output_folder import finished
from heedful.train.performance import most_memory_gb
from heedful.train.reward import train_reward
from heedful.train.sft import train_sft

C = TypeVar("C")
RECIPE = Path(__file__).parent / "recipe"
WIDTH = 100
"""Columns of prose, and of tables if standard output is not a terminal."""
SHOWN_ANSWERS = 12
FROM_LABELS = ("--batch-size=16", "--max-steps=40", "--learning-rate=5e-4", "--warmup-steps=5", "--eval-every=10")
"""Settings of a reward model that learns from a user's labels, of which there are tens, in the place of the recipe's."""
FOR_FEW_LABELS = "--kl-coef=0.3"
"""The penalty on KL beside such a reward model: at the recipe's, PPO soon exploits it (docs/results/rounds.md)."""


@dataclass(frozen=True)
class DemoSettings:
    """The configurations of the random model and the three stages, as the commands would parse them."""

    tiny: TinyConfig
    sft: SFTConfig
    reward: RewardConfig
    ppo: PPOConfig


def run_demo(config: DemoConfig, recipe: Path = RECIPE) -> dict[str, Any]:
    """Make a world and a random model, train it in three stages, measure it, and print what happens.

    Args:
        config: the folder, seed and device.
        recipe: a folder with the settings: tiny.yaml, sft.yaml, reward.yaml and ppo.yaml.

    An unfinished demo goes on at the stage and step where it stopped. Returns the content of summary.json.

    Raises ConfigError before anything is written; later DataError, CheckpointError, RewardError and TrainingError.
    """
    started = time.perf_counter()
    settings = _for_the_labels(read_recipe(config, recipe), config)
    goes_on = check_output(config)
    resolve_device(config.device)
    console = Screen() if Screen().is_terminal else Screen(width=WIDTH)
    spent = 0.0
    if goes_on:
        done = [summary for stage in (settings.sft, settings.reward, settings.ppo) if (summary := finished(stage))]
        spent = sum(summary["seconds"] for summary in done)
    with FolderLock(config.output) if goes_on else make_beginning(config, settings.tiny):
        summary, answers = _train_and_measure(console, settings, config)
        summary |= {"seconds": round(spent + time.perf_counter() - started, 2)}
        write_json(config.output / "summary.json", summary)
        drop_replaced(config.output)
    _show_results(console, summary, answers)
    sizes = sizes_of(config.output, settings.ppo.eval_fraction)
    _say(console, "Why", story.why(summary, sizes, labelled=config.label))
    _show_next_steps(console, config, settings.ppo, summary["seconds"])
    return summary


def _train_and_measure(
    console: Console, settings: DemoSettings, config: DemoConfig
) -> tuple[dict[str, Any], list[Row]]:
    """The three stages, and what they come to: the summary and the answers of both models."""
    sizes = sizes_of(config.output, settings.ppo.eval_fraction)
    _say(console, "heedful demo", story.opening(sizes))
    trained = _train(console, settings, sizes, config)
    _say(console, "Before and after", story.before_measuring(sizes))
    measured, answers = measure_policies(settings.ppo, config.output)
    write_rows(config.output / "answers.jsonl", answers)
    draw_curves([config.output / stage for stage in STAGES], config.output / "curves.png")
    memory = {"peak_memory_gb": most_memory_gb(torch.device("cpu"))}
    return {"seed": config.seed, **measured, **trained, **memory}, answers


def _train(console: Console, settings: DemoSettings, sizes: Sizes, config: DemoConfig) -> dict[str, float]:
    """Run the three stages, each with a text before and after. Returns their part of the summary."""
    _say(console, "Stage 1 of 3: supervised fine-tuning (SFT)", story.before_sft(settings.sft, sizes))
    sft = finished(settings.sft) or train_sft(settings.sft)
    _say(console, "", story.after_sft(sft))
    if config.label:
        _say(console, "Your part: which answer is better?", story.before_labelling(config))
        count = label_pairs(config, settings.ppo, lambda text: _say(console, "", text))
        settings = _for_the_labels(settings, config)
        before = story.before_reward_from_labels(settings.reward, count)
    else:
        before = story.before_reward(settings.reward, sizes)
    _say(console, "Stage 2 of 3: the reward model", before)
    reward = finished(settings.reward) or train_reward(settings.reward)
    accuracy = measure_accuracy(settings.ppo, config.output)
    after = story.after_reward_from_labels if config.label else story.after_reward
    _say(console, "", after(reward, accuracy))
    _say(console, "Stage 3 of 3: PPO", story.before_ppo(settings.ppo))
    ppo = finished(settings.ppo) or train_ppo(settings.ppo)
    _say(console, "", story.after_ppo(ppo))
    seconds = {f"{name}.seconds": done["seconds"] for name, done in zip(STAGES, (sft, reward, ppo), strict=True)}
    return {"reward.accuracy": accuracy, **seconds}


def read_recipe(config: DemoConfig, recipe: Path) -> DemoSettings:
    """Read the recipe's YAML files with the demo's folders, seed and device, as a user could type after each command.

    Raises ConfigError, also if the files do not hold out the same prompts.
    """
    out = config.output

    def read(config_class: type[C], name: str, *flags: str) -> C:
        words = [str(recipe / f"{name}.yaml"), f"--output={out}/{'base' if name == 'tiny' else name}", *flags]
        return parse(config_class, [*words, f"--seed={config.seed}"], prog=f"heedful {name}")

    def sources(model: str, data: str) -> list[str]:
        places = [f"--model={out}/{model}", f"--data={out}/world/{data}.jsonl"]
        return [*places, f"--device={config.device}", f"--dtype={config.dtype}"]

    labels = out / LABELS
    from_labels = [f"--data={labels / TRAIN}", f"--eval-data={labels / EVAL}", *FROM_LABELS]
    settings = DemoSettings(
        tiny=read(TinyConfig, "tiny"),
        sft=read(SFTConfig, "sft", *sources("base", "demonstrations")),
        reward=read(
            RewardConfig, "reward", *sources("sft/final", "preferences"), *(from_labels if config.label else ())
        ),
        ppo=read(
            PPOConfig,
            "ppo",
            *sources("sft/final", "prompts"),
            *([FOR_FEW_LABELS] if config.label else ()),
            "--rewards",
            f"model:{out}/reward/final",
        ),
    )
    fractions = {name: getattr(settings, name).eval_fraction for name in STAGES}
    if len(set(fractions.values())) > 1 or not fractions["ppo"]:
        raise ConfigError(
            f"{recipe}: all stages must hold out the same prompts, so eval_fraction must be one number above 0; got "
            f"{', '.join(f'{fraction} in {name}.yaml' for name, fraction in fractions.items())}"
        )
    return settings


def _for_the_labels(settings: DemoSettings, config: DemoConfig) -> DemoSettings:
    """The settings with batches that are no larger than the user's preferences are many: most labels may be ties."""
    file = config.output / LABELS / TRAIN
    if not (config.label and file.is_file()):
        return settings
    batch_size = min(settings.reward.batch_size, file.read_bytes().count(b"\n"))
    return replace(settings, reward=replace(settings.reward, batch_size=batch_size))


def sizes_of(output: Path, eval_fraction: float) -> Sizes:
    """Count the records of the world that are trained on, and the parameters of the random model.

    Args:
        output: the demo's folder.
        eval_fraction: the share of prompts that the stages hold out.
    """
    world = output / "world"
    prompts = read_prompts(str(world / "prompts.jsonl"))
    held_out = {prompt_key(prompt.prompt) for prompt in split_by_prompt(prompts, eval_fraction)[1]}
    demonstrations, pairs = (
        [row for row in read_rows(world / f"{name}.jsonl") if row["prompt"][0]["content"] not in held_out]
        for name in ("demonstrations", "preferences")
    )
    return Sizes(
        prompts=len(prompts),
        held_out=len(held_out),
        demonstrations=len(demonstrations),
        good_share=sum(row["kind"] == GOOD for row in demonstrations) / len(demonstrations),
        pairs=len(pairs),
        swapped_share=sum(row["flipped"] for row in pairs) / len(pairs),
        parameters=(output / "base" / "model.safetensors").stat().st_size // 4,
    )


def read_rows(path: Path) -> list[Row]:
    """Read the objects of a JSON Lines file that heedful wrote."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write objects as UTF-8 JSON Lines."""
    path.write_text("".join(f"{to_json(row)}\n" for row in rows), encoding="utf-8")


def _show_results(console: Console, summary: dict[str, Any], answers: Sequence[Row]) -> None:
    """Print the answers of both models side by side, and the numbers of both."""
    shown = [
        {
            "prompt": row["prompt"],
            "SFT answer": row["sft_response"],
            "SFT reward": row["sft_reward"],
            "SFT gold": row["sft_gold"],
            "PPO answer": row["ppo_response"],
            "PPO reward": row["ppo_reward"],
            "PPO gold": row["ppo_gold"],
        }
        for row in first_of_families(answers, SHOWN_ANSWERS)
    ]
    for rows in (shown, story.results(summary)):
        console.print()
        print_table(console, "", rows)
    _say(console, "", story.after_measuring(summary))


def _show_next_steps(console: Console, config: DemoConfig, ppo: PPOConfig, seconds: float) -> None:
    _say(console, "What to run next", story.what_is_there(config, seconds))
    for heading, commands in story.next_steps(config, ppo):
        console.print()
        console.print(heading, markup=False, highlight=False)
        for command in commands:
            console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)


def _say(console: Console, heading: str, text: str) -> None:
    """Print an empty line, the heading if it is not empty, and paragraphs of at most `WIDTH` columns."""
    console.print()
    if heading:
        console.print(heading, style="bold", markup=False, highlight=False)
    for paragraph in text.split("\n"):
        wrapped = textwrap.fill(paragraph, min(console.width, WIDTH), break_on_hyphens=False)
        console.print(wrapped, markup=False, highlight=False, soft_wrap=True)
