"""Checks of the settings alone: what their numbers rule out."""

import math

import torch

from heedful.checks.findings import Finding, finding
from heedful.configs.offline import KTOConfig
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.configs.options import TrainingOptions
from heedful.training.thresholds import (
    BALANCED,
    COLDEST,
    ENTROPY_COEF,
    FEWEST_BETA,
    FLOAT32_STEP,
    HOTTEST,
    MOST_BETA,
    TRIAL,
    VALUE_MOVES,
)

WEIGHTS = 4096
"""Weights of the embeddings, spread evenly, that say how large weights are."""


def total_steps(config: TrainingOptions, records: int) -> int:
    """The steps of a run on so many training records."""
    if isinstance(config, RolloutConfig):
        return config.steps
    return int(config.max_steps or math.ceil(config.epochs * records / config.batch_size))  # type: ignore[attr-defined]


def lost_steps(config: TrainingOptions, weight: torch.Tensor, steps: int) -> Finding | None:
    """Is the learning rate so low that steps are rounded away, or that the critic stays where it starts?"""
    flat = weight.detach().reshape(-1)
    size = float(flat[:: max(1, len(flat) // WEIGHTS)].abs().float().median())
    least = FLOAT32_STEP * size
    rate = config.learning_rate
    if rate < least:
        return finding(
            "learning-rate",
            "fail",
            f"--learning-rate {rate:g} changes no weight: a step is about as large as the rate, and is rounded away below "
            f"{least:.1g}",
            f"half of the embeddings are larger than {size:.2g} in size, and float32 has 24 bits",
            fix=f"leave --learning-rate out: its default is {float(type(config).learning_rate):g}",
        )
    value_rate = getattr(config, "value_learning_rate", None)
    if value_rate is None or value_rate * steps >= VALUE_MOVES:
        return None
    return finding(
        "learning-rate",
        "warn",
        f"--value-learning-rate {value_rate:g} leaves the critic where it starts",
        f"{steps:,} steps of it move a weight by {value_rate * steps:.1g} at most",
        fix="leave --value-learning-rate out",
    )


def warm_up(config: TrainingOptions, steps: int) -> Finding | None:
    """Does the warm-up end within the run? One of a few steps is a trial."""
    if config.warmup_steps < steps or steps < TRIAL:
        return None
    highest = config.learning_rate * steps / (config.warmup_steps + 1)
    return finding(
        "warm-up",
        "warn",
        f"--warmup-steps {config.warmup_steps} is not over when the run of {steps:,} steps ends",
        f"the learning rate rises to {highest:.2g} at most, and --learning-rate is {config.learning_rate:g}",
    )


def sampling(config: TrainingOptions) -> Finding | None:
    """Do the settings of sampling leave a choice, and still text?"""
    if not isinstance(config, RolloutConfig):
        return None
    if config.temperature < COLDEST or config.top_k == 1:
        what = f"--temperature {config.temperature:g}" if config.temperature < COLDEST else "--top-k 1"
        why = "lets a policy write the same response to a prompt each time"
    elif config.temperature > HOTTEST:
        what, why = (
            f"--temperature {config.temperature:g}",
            "lets a policy write tokens that are hardly likelier than others",
        )
    else:
        return None
    return finding("sampling", "warn", f"{what} {why}", f"temperatures between {COLDEST:g} and {HOTTEST:g} are usual")


def beta(config: TrainingOptions) -> Finding | None:
    """Is the price of moving away from the reference within what any paper has used?"""
    strength = config.strength
    if strength is None or FEWEST_BETA <= strength <= MOST_BETA:
        return None
    return finding(
        "beta",
        "warn",
        f"--beta {strength:g} {'holds the policy where it is' if strength > MOST_BETA else 'lets the policy go anywhere'}",
        f"papers have values between {FEWEST_BETA:g} and {MOST_BETA:g}",
    )


def label_balance(config: KTOConfig, good: int, bad: int, *, times: float = 1.0) -> Finding | None:
    """Are good and bad responses, with their weights, this many ``times`` outside the balance that KTO's paper recommends?"""
    balance = config.desirable_weight * good / (config.undesirable_weight * bad)
    if BALANCED[0] / times <= balance <= BALANCED[1] * times:
        return None
    few = "desirable" if balance < BALANCED[0] else "undesirable"
    weight = config.undesirable_weight * bad / good if few == "desirable" else config.desirable_weight * good / bad
    return finding(
        "labels-unbalanced",
        "warn",
        f"{good} good and {bad} bad responses, weights {config.desirable_weight:g} and {config.undesirable_weight:g}",
        f"good ones weigh {balance:.3g} times as much as bad ones; {BALANCED[0]:g} to {BALANCED[1]:g} is recommended",
        fix=f"--{few}-weight {weight:.3g} would balance them",
    )


def entropy_bonus(config: TrainingOptions) -> Finding | None:
    """Is the entropy bonus worth less than the reward?"""
    if not isinstance(config, OnlineConfig) or config.entropy_coef < ENTROPY_COEF or config.target_entropy is not None:
        return None
    return finding(
        "price-too-high",
        "warn",
        f"--entropy-coef {config.entropy_coef:g} pays more for a nat of entropy than a reward is worth that is one standard "
        "deviation above the mean",
        "advantages have a standard deviation of about 1",
        fix="lower --entropy-coef; 0.01 is usual",
    )
