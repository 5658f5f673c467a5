"""Reward-model training: learn a score from preferences between pairs of responses."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from heedful import core
from heedful.configs.reward import RewardConfig
from heedful.data.chat import RewardInputs, plain_text
from heedful.data.fitting import max_length
from heedful.data.loading import PairRows, encode_pairs, encode_split, load_split
from heedful.data.sampler import BatchSampler
from heedful.data.schemas import read_rankings
from heedful.models.checkpoints import load_tokenizer
from heedful.models.heads import disable_dropout
from heedful.models.quantize import four_bit
from heedful.models.reward_model import RewardModel, load_reward_model, save_reward_model
from heedful.train.loop import Numbers, Trainer, run
from heedful.train.memory import prepare, resolve_machine
from heedful.train.optimization import (
    MetricSums,
    lr_factor,
    make_optimizer,
    optimizer_step,
    seed_everything,
    set_learning_rate,
    step_metrics,
)
from heedful.train.run_folder import check_output

SHOWN = {"loss/reward": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin"}


def train_reward(config: RewardConfig) -> dict[str, Any]:
    """Train a reward model on preference pairs and write a run folder. Returns what summary.json holds.

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError while it trains.
    """
    check_output(config)
    seed_everything(config.seed)
    device, dtype = resolve_machine(config)
    tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
    model = load_reward_model(
        config.model,
        tokenizer,
        device=device,
        compute_dtype=dtype,
        seed=config.seed,
        four_bit=four_bit(config, device, dtype),
    )
    prepare(model, config, base=config.model)
    disable_dropout(model)
    inputs = RewardInputs(tokenizer)
    limit = max_length(config.max_length, model.max_length)
    train, held_out, counts = encode_split(
        lambda records: encode_pairs(
            records,
            inputs,
            max_length=limit,
            action=config.too_long,
            equal_pairs=config.equal_pairs,
        ),
        load_split(read_rankings, config),
        config,
    )
    sampler = BatchSampler(len(train), config.batch_size, config.seed)
    total_steps = config.max_steps or math.ceil(config.epochs * len(train) / config.batch_size)
    optimizer = make_optimizer([(model, config.learning_rate)], config)

    def step(i: int) -> Numbers:
        started = time.perf_counter()
        learning_rate = set_learning_rate(optimizer, lr_factor(i, total_steps=total_steps, options=config))
        metrics = accumulate(model, [train[row] for row in next(sampler)], config)
        grad_norm = optimizer_step(optimizer, [model], config.max_grad_norm)
        return {
            **metrics,
            **step_metrics([grad_norm]),
            "optimizer/learning_rate": learning_rate,
            "time/update": time.perf_counter() - started,
        }

    def samples() -> list[dict[str, Any]]:
        shown = (held_out or train)[: config.num_samples]
        with torch.no_grad():
            scores = model([row for pair in shown for row in (pair.chosen, pair.rejected)]).tolist()
        return [
            {
                "prompt": plain_text(pair.ranking.prompt),
                "chosen": pair.ranking.responses[pair.ranking.ranks.index(min(pair.ranking.ranks))],
                "chosen score": scores[2 * i],
                "rejected": pair.ranking.responses[pair.ranking.ranks.index(max(pair.ranking.ranks))],
                "rejected score": scores[2 * i + 1],
            }
            for i, pair in enumerate(shown)
        ]

    trainer = Trainer(
        step=step,
        save=lambda folder: save_reward_model(model, tokenizer, folder),
        evaluate=(lambda: evaluate_pairs(model, held_out, config)) if held_out else None,
        samples=samples,
        objective="eval/accuracy",
        higher_is_better=True,
    )
    return run(
        trainer,
        config,
        algorithm="reward",
        total_steps=total_steps,
        shown=SHOWN,
        parents=[config.model],
        facts={"data": counts},
    )


def accumulate(model: RewardModel, pairs: Sequence[PairRows], config: RewardConfig) -> dict[str, float]:
    """Gradients of the pairwise loss over a step's pairs, ``micro_batch_size`` pairs at a time, and its metrics.

    Every micro-batch is divided by the step's number of pairs, so their size does not change the gradient.
    """
    ordered = sorted(pairs, key=lambda pair: len(pair.chosen["input_ids"]) + len(pair.rejected["input_ids"]))
    sums = MetricSums()
    for start in range(0, len(ordered), config.micro_batch_size):
        part = ordered[start : start + config.micro_batch_size]
        scores = model([pair.chosen for pair in part] + [pair.rejected for pair in part])
        margins = [pair.ranking.margin for pair in part]
        loss, metrics = core.pairwise_reward_loss(
            scores[: len(part)],
            scores[len(part) :],
            num_pairs=len(ordered),
            margin=None if not any(margins) else scores.new_tensor([margin or 0.0 for margin in margins]),
            center_coef=config.center_coef,
            label_smoothing=config.label_smoothing,
        )
        if torch.is_grad_enabled():
            loss.backward()
        sums.add(metrics)
        sums.add({"reward/score_mean": scores.detach().sum() / (2 * len(ordered))})
    return sums.means(1)


def evaluate_pairs(model: RewardModel, pairs: Sequence[PairRows], config: RewardConfig) -> Numbers:
    """Loss, accuracy, margin and mean score on held-out pairs."""
    with torch.no_grad():
        metrics = accumulate(model, pairs, config)
    return {
        "eval/accuracy": metrics["reward/accuracy"],
        "eval/loss": metrics["loss/reward"],
        "eval/margin": metrics["reward/margin"],
        "eval/score_mean": metrics["reward/score_mean"],
    }
