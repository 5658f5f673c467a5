"""The algorithms side by side in the built-in world, from the SFT and reward models of a finished `heedful demo`.

python benchmarks/algorithms.py runs/demo --output runs/algorithms [--only NAME ...] [--steps 50]

Every algorithm sees the same number of responses and is measured on the held-out prompts as the demo measures PPO. One line
of JSON each goes to results.jsonl in the output folder.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from heedful.algorithms.dpo import train_dpo
from heedful.algorithms.kto import train_kto
from heedful.algorithms.online_dpo import train_online_dpo
from heedful.algorithms.ppo import train_grpo, train_ppo
from heedful.apps.demo.judge import gold_judge
from heedful.apps.demo.pipeline import RECIPE, read_recipe
from heedful.configs.evaluate import BestOfNConfig, KLConfig, WinRateConfig
from heedful.configs.offline import DPOConfig, KTOConfig
from heedful.configs.online import A2CConfig, GRPOConfig, OnlineDPOConfig, PPOConfig
from heedful.configs.tools import DemoConfig
from heedful.data import read_prompts, split_by_prompt
from heedful.errors import HeedfulError
from heedful.evaluate.policies import evaluate_best_of_n, evaluate_kl, evaluate_win_rate

GROUP = 8
"""Responses to each prompt if they are compared with each other."""
OF_A_CRITIC = {"gae_lambda", "value_learning_rate"}
"""Settings of the demo's PPO that only an algorithm with a critic has."""
Run = tuple[Callable, Any]
"""A trainer and its settings."""


def carried(recipe: PPOConfig, config_class: type, *but: str) -> dict[str, Any]:
    """The recipe's settings that another configuration has too, if they are not PPO's defaults."""
    known = {field.name for field in dataclasses.fields(config_class)} - set(but)
    defaults = {field.name: field.default for field in dataclasses.fields(recipe)}
    return {name: value for name, value in vars(recipe).items() if name in known and value != defaults.get(name)}


def ppo(recipe: PPOConfig, **changes: Any) -> Run:
    return train_ppo, dataclasses.replace(recipe, **changes)


def without_critic(recipe: PPOConfig, advantage: str) -> Run:
    return train_ppo, PPOConfig(**carried(recipe, PPOConfig, *OF_A_CRITIC), advantage=advantage)


def a2c(recipe: PPOConfig) -> Run:
    return train_ppo, A2CConfig(**carried(recipe, A2CConfig, "ppo_epochs", "minibatch_size"))


def grpo(recipe: PPOConfig, **changes: Any) -> Run:
    settings = carried(recipe, GRPOConfig, *OF_A_CRITIC) | {"samples_per_prompt": GROUP, "kl_coef": recipe.kl_coef}
    return train_grpo, GRPOConfig(**settings | changes)


def flawless(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 if the gold judge finds nothing wrong, otherwise 0. So the responses to a prompt often tie, as checked answers do."""
    return [float(mark == 1.0) for mark in gold_judge(prompts=prompts, completions=completions, **columns)]


def dapo(recipe: PPOConfig, **changes: Any) -> Run:
    """Trained on `flawless`, not on the reward model."""
    objective = {
        "loss_reduction": "token",
        "clip_range_high": 0.28,
        "kl_coef": 0.0,
        "rewards": (),
        "score_norm_samples": 0,
    }
    _, config = grpo(recipe, **objective, **changes)
    return partial(train_grpo, rewards=[flawless]), config


def online_dpo(recipe: PPOConfig) -> Run:
    return train_online_dpo, OnlineDPOConfig(**carried(recipe, OnlineDPOConfig))


def dpo(recipe: PPOConfig, **changes: Any) -> Run:
    """As many pairs as make the responses that the others sample."""
    settings = carried(recipe, DPOConfig) | of_pairs(recipe) | {"batch_size": 64}
    settings |= {"max_steps": recipe.steps * recipe.rollout_batch_size // 2 // 64}
    return train_dpo, DPOConfig(**settings | changes)


def kto(recipe: PPOConfig) -> Run:
    """As many responses as the others sample: both of each pair, one by one."""
    settings = carried(recipe, KTOConfig) | of_pairs(recipe) | {"batch_size": 128}
    return train_kto, KTOConfig(**settings | {"max_steps": recipe.steps * recipe.rollout_batch_size // 128})


def of_pairs(recipe: PPOConfig) -> dict[str, Any]:
    return {"data": recipe.data.replace("prompts.jsonl", "preferences.jsonl"), "learning_rate": 3e-4}


ALGORITHMS: dict[str, Callable[[PPOConfig], Run]] = {
    "PPO": ppo,
    "PPO, critic separate": lambda r: ppo(r, critic="separate"),
    "PPO, critic from reward": lambda r: ppo(r, critic="reward", value_learning_rate=1e-4),
    "PPO, response-level": lambda r: ppo(r, importance_level="sequence", gae_lambda=0.95),
    "PPO without a critic": lambda r: without_critic(r, "batch-mean"),
    "REINFORCE++": lambda r: without_critic(r, "reinforce++"),
    "A2C": a2c,
    "GRPO": grpo,
    "CISPO": lambda r: grpo(r, policy_loss="cispo", loss_reduction="token", clip_range=1.0),
    "RLOO": lambda r: grpo(r, advantage="rloo", importance_level="sequence", kl_in="reward"),
    "REINFORCE": lambda r: grpo(r, samples_per_prompt=1, advantage="reinforce", kl_in="reward"),
    "DAPO without dynamic sampling": dapo,
    "DAPO": lambda r: dapo(r, dynamic_sampling_rounds=3),
    "GRPO top-p 0.9": lambda r: grpo(r, top_p=0.9),
    "GRPO top-p 0.9, TIS": lambda r: grpo(r, top_p=0.9, importance="token-truncate"),
    "GRPO top-p 0.9, sequence-truncate": lambda r: grpo(r, top_p=0.9, importance="sequence-truncate"),
    "online DPO": online_dpo,
    "DPO": dpo,
    "DPO per token": lambda r: dpo(r, length_normalise=True),
    "DPO with NLL": lambda r: dpo(r, nll_coef=0.2),
    "SimPO": lambda r: dpo(r, loss="simpo"),
    "ORPO": lambda r: dpo(r, loss="orpo"),
    "KTO": kto,
}


def measured(model: str, recipe: PPOConfig) -> dict[str, float]:
    """Gold score, win rate over the SFT model and KL to it, on the held-out prompts."""
    settings = held_out_settings(recipe)
    won = evaluate_win_rate(WinRateConfig(model=model, baseline=recipe.model, **settings), rewards=[gold_judge])
    kl = evaluate_kl(KLConfig(model=model, reference=recipe.model, **settings))
    return {
        "gold": won["score_mean"],
        "sft gold": won["baseline_score_mean"],
        "win rate": won["win_rate"],
        "kl": kl["kl"],
    }


def best_of_4(recipe: PPOConfig) -> dict[str, float]:
    """The SFT model's best of four responses under the reward model, judged by the gold judge."""
    started = time.perf_counter()
    config = BestOfNConfig(model=recipe.model, rewards=recipe.rewards, n=4, **held_out_settings(recipe))
    found = evaluate_best_of_n(config, judge=[gold_judge])
    return {
        "gold": found["judge_score_mean"],
        "sft gold": found["plain_judge_score_mean"],
        "win rate": found["win_rate"],
        "kl": found["kl_bound"],
        "seconds": time.perf_counter() - started,
    }


def held_out_settings(recipe: PPOConfig) -> dict[str, Any]:
    held_out = split_by_prompt(read_prompts(recipe.data), recipe.eval_fraction)[1]
    names = ("data", "eval_fraction", "max_new_tokens", "seed", "device", "dtype")
    return {name: getattr(recipe, name) for name in names} | {"num_samples": len(held_out)}


def run(options: argparse.Namespace) -> None:
    seed = json.loads((options.demo / "summary.json").read_text(encoding="utf-8"))["seed"]
    recipe = read_recipe(DemoConfig(output=options.demo, seed=seed, device="cpu"), RECIPE).ppo
    recipe = dataclasses.replace(recipe, steps=options.steps, eval_every=0, eval_prompts=1, overwrite=True)
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.only or [*ALGORITHMS, "best of 4"]:
        if name == "best of 4":
            found = best_of_4(recipe)
        else:
            folder = options.output / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
            train, config = ALGORITHMS[name](dataclasses.replace(recipe, output=folder))
            seconds = train(config)["seconds"]
            found = measured(f"{folder}/final", recipe) | {"seconds": seconds}
        line = {"algorithm": name, "seed": seed, **{key: round(value, 4) for key, value in found.items()}}
        with (options.output / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="folder of a finished demo")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=[*ALGORITHMS, "best of 4"], help="only these algorithms")
    parser.add_argument("--steps", type=int, default=50, help="rollout batches of 256 responses")
    try:
        run(parser.parse_args())
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
