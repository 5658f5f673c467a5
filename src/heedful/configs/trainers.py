"""Every trainer, as the rest of heedful knows it: help, plan, doctor, report and pictures read this table.

An algorithm is its page in ``algorithms/``, its settings, and its entry here. Its settings tell what depends on them, such as
the rows of a step and whether there is a reference (`heedful.configs.options.TrainingOptions`). Nothing is imported until it
is used: ``heedful --help``, ``plan`` and ``report`` need no torch.
"""

import importlib
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ACRONYM = re.compile(r"\b(ppo|a2c|grpo|dpo)\b")
OFFLINE = (
    "learning_rate", "epochs", "batch_size", "micro_batch_size", "max_length", "lora_rank", "gradient_checkpointing",
    "dtype", "eval_data", "eval_every", "save_every", "track", "seed",
)  # fmt: skip
ONLINE = (
    "learning_rate", "steps", "rollout_batch_size", "minibatch_size", "micro_batch_size", "ppo_epochs", "max_new_tokens",
    "temperature", "kl_coef", "clip_range", "lora_rank", "dtype", "eval_every", "track",
)  # fmt: skip
LEARNED_REWARD = "model:runs/reward/final"


@dataclass(frozen=True)
class Panel:
    """One quantity over the steps of a run."""

    title: str
    quantity: str
    """Label of the vertical axis, with the unit."""
    training: str
    """Metric measured during training, drawn as a thin line."""
    held_out: str | None = None
    """Metric measured on held-out prompts, drawn as a line with dots."""
    logarithmic: bool = False
    smoothed: bool = False
    """Draw training values as means over neighbouring steps, because single steps are noisy."""
    if_varies: bool = False
    """Draw it only if its values differ."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What the rest of heedful knows of a trainer."""

    config: str
    """The class of its settings, as ``module:name``."""
    function: str
    """The function that trains, as ``module:name``; the module is its page."""
    summary: str
    """Its line in ``heedful --help``."""
    often: tuple[str, ...]
    """Its main settings, in the order of ``heedful COMMAND --help``."""
    panels: tuple[Panel, ...]
    """What its curves show, in drawing order."""
    data: str
    """The data of its example, without ``.jsonl``."""
    model: str = "runs/sft/final"
    """The model of its example."""
    rewards: str = ""
    """The reward of its example, if it learns from responses that the policy samples; else empty."""

    @property
    def is_online(self) -> bool:
        """Whether it learns from responses that the policy samples, scored by rewards."""
        return bool(self.rewards)

    @property
    def example(self) -> str:
        """Arguments that it needs."""
        return f"--model {self.model} --data {self.data}.jsonl" + f" --rewards {self.rewards}" * self.is_online

    def settings(self) -> Any:
        """The class of its settings."""
        return imported(self.config)

    def page(self) -> ModuleType:
        """The module that trains. It has ``learn``, and ``start``, or ``make_experience`` if it is online."""
        return importlib.import_module(f"heedful.{self.function.partition(':')[0]}")


def imported(reference: str) -> Any:
    """What ``module:name`` names, a module of heedful's."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(f"heedful.{module}"), name)


def rollout_panels(algorithm: str = "") -> tuple[Panel, ...]:
    """What the curves of an online trainer show: all of them log the same metrics."""
    name = ACRONYM.sub(lambda word: word[0].upper(), algorithm).replace("-", " ")
    of = f"{name}: " if name else ""
    return (
        Panel(f"{of}score", "mean score per response", "reward/score_mean", "eval/score_mean"),
        Panel(f"{of}KL to the reference", "nats per response", "reference/kl", "eval/kl"),
        Panel(f"{of}KL coefficient", "per nat", "reference/kl_coef", if_varies=True),
        Panel(f"{of}length", "tokens per response", "rollout/response_length", "eval/response_length"),
        Panel(f"{of}responses that end", "share of responses", "rollout/eos_frac", "eval/eos_frac"),
        Panel(f"{of}entropy", "nats per token", "policy/entropy"),
        *(
            Panel(f"{of}variance explained {how}", "share of variance", f"value/{metric}", f"eval/{metric}")
            for how, metric in (
                ("by values", "explained_variance"),
                ("by the prompt's value", "explained_variance_prompt"),
                ("at the first token", "explained_variance_first"),
            )
        ),
        Panel(f"{of}KL of the update", "nats per token", "policy/approx_kl"),
        Panel(f"{of}clipped", "share of tokens", "policy/clip_frac"),
    )


TRAINERS = {
    "sft": Trainer(
        config="configs.offline:SFTConfig",
        function="algorithms.sft:train_sft",
        summary="fine-tune on demonstrations or plain text",
        model="Qwen/Qwen3-0.6B-Base",
        data="demonstrations",
        often=OFFLINE,
        panels=(Panel("SFT: loss", "nats per token", "loss/sft", "eval/loss", logarithmic=True),),
    ),
    "reward": Trainer(
        config="configs.offline:RewardConfig",
        function="algorithms.reward_model:train_reward",
        summary="learn a reward model from preferences",
        data="preferences",
        often=(*OFFLINE, "center_coef"),
        panels=(Panel("Reward model: accuracy", "share of pairs", "reward/accuracy", "eval/accuracy", smoothed=True),),
    ),
    "ppo": Trainer(
        config="configs.online:PPOConfig",
        function="algorithms.ppo:train_ppo",
        summary="optimise a policy against a reward",
        data="prompts",
        rewards=LEARNED_REWARD,
        often=(*ONLINE[:10], "gae_lambda", *ONLINE[10:]),
        panels=rollout_panels("ppo"),
    ),
    "a2c": Trainer(
        config="configs.online:A2CConfig",
        function="algorithms.ppo:train_ppo",
        summary="optimise a policy against a reward, one step per rollout batch",
        data="prompts",
        rewards=LEARNED_REWARD,
        often=tuple(name for name in ONLINE if name not in ("minibatch_size", "ppo_epochs", "clip_range")),
        panels=rollout_panels("a2c"),
    ),
    "critic": Trainer(
        config="configs.online:CriticConfig",
        function="algorithms.critic:train_critic",
        summary="train PPO's critic before the policy moves",
        data="prompts",
        rewards=LEARNED_REWARD,
        often=(*ONLINE[:5], "ppo_epochs", "max_new_tokens", "temperature", "lora_rank", "dtype", "eval_every", "track"),
        panels=(
            Panel("critic: loss", "half the squared error", "loss/value", logarithmic=True),
            Panel("critic: held-out error", "squared error", "eval/value_error", "eval/value_error", logarithmic=True),
            *rollout_panels("critic"),
        ),
    ),
    "grpo": Trainer(
        config="configs.online:GRPOConfig",
        function="algorithms.ppo:train_grpo",
        summary="optimise a policy against a reward, without a critic",
        data="prompts",
        rewards="verify:math",
        often=(*ONLINE[:2], "samples_per_prompt", *ONLINE[2:10], "advantage", *ONLINE[10:]),
        panels=rollout_panels("grpo"),
    ),
    "online-dpo": Trainer(
        config="configs.online:OnlineDPOConfig",
        function="algorithms.online_dpo:train_online_dpo",
        summary="optimise a policy on pairs of its own responses, ranked by a reward",
        data="prompts",
        rewards=LEARNED_REWARD,
        often=("beta", "loss", "samples_per_prompt", *(n for n in ONLINE if n not in ("kl_coef", "clip_range"))),
        panels=rollout_panels("online-dpo"),
    ),
    "dpo": Trainer(
        config="configs.offline:DPOConfig",
        function="algorithms.dpo:train_dpo",
        summary="optimise a policy on preference pairs, without a reward",
        data="preferences",
        often=("beta", "loss", *OFFLINE),
        panels=(
            Panel("DPO: loss", "mean loss per pair", "loss/dpo", "eval/loss"),
            Panel("DPO: accuracy", "share of pairs", "reward/accuracy", "eval/accuracy", smoothed=True),
        ),
    ),
    "kto": Trainer(
        config="configs.offline:KTOConfig",
        function="algorithms.kto:train_kto",
        summary="optimise a policy on single responses labelled good or bad",
        data="labelled",
        often=("beta", *OFFLINE),
        panels=(
            Panel("KTO: loss", "mean loss per response", "loss/kto", "eval/loss"),
            Panel("KTO: accuracy", "share of responses", "reward/accuracy", "eval/accuracy", smoothed=True),
        ),
    ),
}
"""The trainers by their commands, which are the names of their runs."""
