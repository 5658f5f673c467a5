"""Draws docs/tokens.png and docs/tokens-dark.png: one held-out prompt's answer before and after PPO, token by token.

    python docs/pictures.py [DEMO]

DEMO is the folder of `heedful demo` (runs/demo); the demo runs first if it is not there. Its SFT model is trained by PPO with
the demo's settings. In the first steps only the critic learns, so that there are values before PPO too.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import matplotlib.image
import matplotlib.style
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import Tensor

import heedful
from heedful import core, plot
from heedful.apps.demo.judge import gold_judge
from heedful.apps.demo.pipeline import RECIPE, read_recipe
from heedful.data import read_prompts, split_by_prompt
from heedful.types import Prompt

SEED, STEPS, WARMUP_STEPS = 0, 60, 10
RUDE, FLAWLESS = 0.29, 1.0
"""Scores of the gold judge: right but rude; without any flaw."""
STYLES = {"tokens.png": "default", "tokens-dark.png": "dark_background"}
WIDTH, DOTS = 4.8, 200
"""Inches of an answer, and dots per inch: 1,920 pixels for both, shown at about 900."""


class Answers(NamedTuple):
    """Answers to the held-out prompts, and what PPO sees of each token."""

    batch: heedful.Responses
    texts: list[list[str]]
    """Of each answer, those of its tokens."""
    gold: Tensor
    """``[B]``, the gold judge's scores; nothing learns from them."""
    numbers: dict[str, Tensor]
    """By the name of the quantity, ``[B, T]``."""


def main(demo: Path) -> None:
    settings = heedful.DemoConfig(output=demo, seed=SEED, device="cpu")
    if not (demo / "reward" / "final").is_dir():
        heedful.run_demo(settings)
    started = time.perf_counter()
    before, after = train(settings)
    row = next(i for i in range(len(before.gold)) if before.gold[i] == RUDE and after.gold[i] == FLAWLESS)
    draw(before, after, row, Path(__file__).parent)
    print(f"{STEPS} steps, gold judge {before.gold.mean():.3f} -> {after.gold.mean():.3f}, held-out prompt {row}")
    print(f"{time.perf_counter() - started:.0f} s")


def train(demo: heedful.DemoConfig) -> tuple[Answers, Answers]:
    """PPO from the demo's SFT model. Returns answers to the held-out prompts by the model before and after it."""
    recipe = read_recipe(demo, RECIPE).ppo
    prompts, held_out = split_by_prompt(read_prompts(recipe.data), recipe.eval_fraction)
    torch.manual_seed(SEED)  # of the new value head
    policy = heedful.Policy.from_pretrained(recipe.model, value_head=True, device="cpu", dtype="float32")
    reference = policy.frozen_copy()

    # the reward model's scores, shifted and scaled as PPO shifts and scales them: mean 0 and deviation 1 before PPO
    (reward_model,) = heedful.load_rewards(recipe.rewards)
    sampled = heedful.LocalEngine(policy, max_new_tokens=recipe.max_new_tokens, seed=SEED).generate(prompts[::5])
    norm = core.ScoreNorm.of(heedful.score(reward_model, sampled))

    def shift(completions: list[object], **_: object) -> list[float]:
        return [-norm.mean / norm.std] * len(completions)

    rewards = [replace(reward_model, weight=1 / norm.std), *heedful.load_rewards(shift)]
    config = replace(recipe, model="", data="", rewards=(), score_norm_samples=0)
    config = replace(config, steps=STEPS, critic_warmup_steps=WARMUP_STEPS)
    steps = heedful.ppo_steps(config, policy, [{"prompt": list(prompt.prompt)} for prompt in prompts], rewards=rewards)
    for step, _, metrics in steps:
        print(f"step {step}: score {metrics['reward/score_mean']:.3f}  KL {metrics['reference/kl']:.3f}", flush=True)
        if step == WARMUP_STEPS:
            before = look(policy, reference, rewards, held_out, config)
    return before, look(policy, reference, rewards, held_out, config)


def look(
    policy: heedful.Policy,
    reference: heedful.Policy,
    rewards: list[heedful.Reward],
    prompts: list[Prompt],
    config: heedful.PPOConfig,
) -> Answers:
    """What a step of PPO sees of the policy's answers to these prompts; advantages before they are whitened."""
    batch = heedful.LocalEngine(policy, max_new_tokens=config.max_new_tokens, seed=SEED).generate(prompts)
    old, ref = heedful.logprobs(policy, batch), heedful.logprobs(reference, batch)
    values = heedful.values(policy, batch)
    per_token = core.kl_shaped_rewards(heedful.score(rewards, batch), old, ref, batch.mask, kl_coef=config.kl_coef)
    advantages, _ = core.gae(per_token, values, batch.mask, gamma=config.gamma, gae_lambda=config.gae_lambda)
    numbers = {"advantage": advantages, "KL": old - ref, "value": values, "reward": per_token}
    texts = [plot.token_texts(ids, policy.tokenizer) for ids in batch.own_ids()]
    return Answers(batch, texts, heedful.score(gold_judge, batch), numbers)


def draw(before: Answers, after: Answers, row: int, folder: Path) -> None:
    """Both answers, side by side, with the same colours for the same numbers."""
    shown = [rows_of(answers, row) for answers in (before, after)]
    limits = {name: max(max(map(abs, values[name])) for _, values in shown) for name in before.numbers}
    question = before.batch.completions[row].prompt.prompt[-1].content
    titles = [f"“{question}” {when}" for when in ("before PPO", f"after {STEPS - WARMUP_STEPS} steps of PPO")]
    for name, style in STYLES.items():
        with matplotlib.style.context(style):
            halves = []
            for (tokens, values), title in zip(shown, titles, strict=True):
                canvas = FigureCanvasAgg(plot.tokens(tokens, values, title=title, limits=limits, width=WIDTH))
                canvas.figure.set_dpi(DOTS)
                canvas.draw()
                halves.append(np.asarray(canvas.buffer_rgba()))
            matplotlib.image.imsave(folder / name, np.concatenate(halves, axis=1), dpi=DOTS)


def rows_of(answers: Answers, row: int) -> tuple[list[str], dict[str, list[float]]]:
    """One answer's tokens, and their numbers."""
    mask = answers.batch.mask[row]
    return answers.texts[row], {name: numbers[row][mask].tolist() for name, numbers in answers.numbers.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "runs/demo"))
