"""The numbers and settings of the experiments. README.md says how they were chosen."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import heedful

ROLLOUT, MINIBATCH = 64, 32
"""Responses of a step, and of an update: two updates a step, of the policy and of the critic."""
ALPHAS = (0.05, 1.5)
"""VAPO's alpha and that of SAO's ports."""
RATES = {"critic": 1e-3, "ppo": 3e-4, "grpo": 3e-4}
"""Learning rates, chosen at 50 digits with seed 100 (``learning.py tune``)."""


@dataclass(frozen=True)
class Sizes:
    """How much is sampled."""

    prompts: int = 4096
    critic_steps: int = 40
    """Rollout batches that the critics of A1 learn from."""
    pretraining: int = 8
    """Those that a critic of A2, B and lag learns from before the policy moves."""
    reference: dict[int, int] = field(default_factory=lambda: {20: 100, 50: 100, 100: 75, 400: 50})
    """Batches of `ROLLOUT` responses in a reference gradient."""
    batches: dict[int, int] = field(default_factory=lambda: {20: 16, 50: 8, 100: 8, 400: 4})
    """Batches whose gradients are compared with it, for each seed."""
    steps: int = 24
    """Rollout batches of a run in A2, B and lag, those of its critic's pretraining among them."""
    held_out: int = 512
    """Held-out prompts of each length, for the success at the end."""

    @classmethod
    def of(cls, *, small: bool) -> "Sizes":
        """All of it, or little, to see that it works."""
        few = dict.fromkeys((20, 50, 100, 400), 2)
        sizes = cls()
        if small:
            sizes = replace(sizes, critic_steps=2, pretraining=2, reference=few, batches=few, steps=4, held_out=64)
        return sizes


def common(model: str, lengths: Sequence[int], seed: int, output: Path) -> dict[str, Any]:
    """The settings of every run."""
    return {
        "model": model,
        "output": output,
        "seed": seed,
        "device": "cpu",
        "dtype": "float32",
        "rollout_batch_size": ROLLOUT,
        "minibatch_size": MINIBATCH,
        "micro_batch_size": MINIBATCH,
        "micro_batch_tokens": 8192,
        "ppo_epochs": 1,
        "max_new_tokens": max(lengths) + 1,
        "max_prompt_tokens": max(lengths) + 2,
        "kl_coef": 0.0,
        "lr_schedule": "constant",
        "sample_every": 0,
        "save_minutes": 5.0,
        "save_total_limit": 1,
    }


def critic_settings(model: str, lengths: Sequence[int], seed: int, steps: int, output: Path) -> heedful.CriticConfig:
    """``heedful critic`` for a fixed number of steps, so that both critics of A1 see as much. With ``eval_data``."""
    return heedful.CriticConfig(
        **common(model, lengths, seed, output),
        critic="separate",
        steps=steps,
        learning_rate=RATES["critic"],
        eval_prompts=16,
        eval_every=0,
        early_stopping_patience=0,
    )


def warmed_critic_settings(
    model: str, lengths: Sequence[int], seed: int, sizes: Sizes, output: Path
) -> heedful.PPOConfig:
    """PPO whose critic learns from targets of lambda .95 while the policy stands still, up to the last step. Values are not
    clipped, so that only lambda differs from `critic_settings`."""
    return ppo_settings(
        model,
        lengths,
        seed,
        sizes.critic_steps,
        output,
        value_clip_range=None,
        critic_warmup_steps=sizes.critic_steps - 1,
    )


def ppo_settings(
    model: str, lengths: Sequence[int], seed: int, steps: int, output: Path, **changes: Any
) -> heedful.PPOConfig:
    """PPO with a critic of its own; without changes it is vanilla: lambda .95 for both, values clipped at .2."""
    settings = common(model, lengths, seed, output) | {
        "critic": "separate",
        "steps": steps,
        "learning_rate": RATES["ppo"],
        "value_learning_rate": RATES["critic"],
        "eval_fraction": 0.0,
        "eval_every": 0,
    }
    return heedful.PPOConfig(**settings | changes)


def grpo_settings(
    model: str, lengths: Sequence[int], seed: int, steps: int, output: Path, **changes: Any
) -> heedful.GRPOConfig:
    """GRPO with groups of 8. The loss is a mean over tokens, as PPO's, so that only the advantages differ."""
    settings = common(model, lengths, seed, output) | {
        "steps": steps,
        "learning_rate": RATES["grpo"],
        "loss_reduction": "token",
        "eval_fraction": 0.0,
        "eval_every": 0,
    }
    return heedful.GRPOConfig(**settings | changes)
