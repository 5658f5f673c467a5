"""TRL 0.11's PPO on heedful's pieces: change ``from trl import`` to ``from heedful.compat.trl import``, and old scripts run.

The names are `PPOConfig`, `PPOTrainer`, `AutoModelForCausalLMWithValueHead`, `create_reference_model`, `LengthSampler` and
`set_seed`. docs/compat.md says what is different and what is refused. New programs use `heedful.train_ppo`.
"""

from typing import Any

from heedful.compat.trl.config import PPOConfig
from heedful.compat.trl.core import LengthSampler, respond_to_batch, set_seed
from heedful.compat.trl.model import AutoModelForCausalLMWithValueHead, create_reference_model
from heedful.compat.trl.trainer import PPOTrainer
from heedful.errors import ConfigError

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "TextEnvironment",
    "create_reference_model",
    "respond_to_batch",
    "set_seed",
]


class AutoModelForSeq2SeqLMWithValueHead:
    """Not supported: scripts import the name without using it, and using it raises ConfigError."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise ConfigError(
            "AutoModelForSeq2SeqLMWithValueHead: encoder-decoders such as T5 are not supported; use "
            "AutoModelForCausalLMWithValueHead with a causal language model such as gpt2"
        )

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> "AutoModelForSeq2SeqLMWithValueHead":
        return cls(*args, **kwargs)


class TextEnvironment:
    """Not supported: using it raises ConfigError."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise ConfigError(
            "TextEnvironment is not supported; write the environment as a Python class and train with `heedful ppo "
            "--environment` (docs/environments.md), or sample in the script and pass response_masks to PPOTrainer.step"
        )


INSTEAD = {
    "SFTTrainer": "heedful.train_sft",
    "RewardTrainer": "heedful.train_reward",
    "DPOTrainer": "heedful.train_dpo",
    "KTOTrainer": "heedful.train_kto",
    "GRPOTrainer": "heedful.train_grpo",
    "PPOv2Trainer": "heedful.train_ppo",
    "RLOOTrainer": "heedful.train_grpo with advantage='rloo'",
}
"""Trainers of TRL that are not here, and what heedful has for them."""


def __getattr__(name: str) -> Any:
    trainer = name.replace("Config", "Trainer")
    if trainer in INSTEAD:
        raise ConfigError(f"heedful.compat.trl has PPO with PPOTrainer.step only, no {name}; use {INSTEAD[trainer]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
