"""A model in training and everything that changes with it, for trainers that learn from data that is there."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.data.batches import AdaptiveMicroBatch
from heedful.data.splits import BatchOrder
from heedful.models.policy import Policy
from heedful.models.reward_model import RewardModel
from heedful.models.save import save_policy
from heedful.parallel.sharding import gathered_on_first, is_sharded
from heedful.train.non_finite import NonFiniteGuard, StepResult
from heedful.train.optimization import Schedule, optimizer_step, step_metrics
from heedful.train.performance import performance
from heedful.train.state import (
    load_optimizer_state,
    load_scaler_state,
    load_trained_weights,
    optimizer_state,
    random_state,
    scaler_state,
    set_random_state,
    trained_weights,
)


@dataclass
class OfflineLearner:
    """A policy or reward model, its optimizer and schedule, the order of its batches, and its random numbers."""

    model: Policy | RewardModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    batches: BatchOrder
    generator: torch.Generator
    max_grad_norm: float
    skips: NonFiniteGuard
    room: AdaptiveMicroBatch
    """What memory has room for."""

    def update(
        self, metrics: Mapping[str, float], started: float, sources: Sequence[str], *, num_tokens: float
    ) -> dict[str, float]:
        """One optimizer step on the gradients that are there. Returns the step's metrics, with those given.

        If a metric or the gradient is not a finite number, the step is left out (`NonFiniteGuard`). In float16 only a metric
        counts: gradients that are too large are how the scale is found.

        Args:
            metrics: of the step.
            started: when it began, by ``time.perf_counter``.
            sources: where its records were read.
            num_tokens: how many tokens it learns from.
        """
        learning_rate = self.schedule.advance()
        broken, grad_norm = {name: value for name, value in metrics.items() if not math.isfinite(value)}, math.nan
        if broken:
            self.clear()
        else:
            grad_norm = optimizer_step(self.optimizer, [self.model], self.max_grad_norm)
            if not math.isfinite(grad_norm) and self.model.grad_scaler is None:
                broken = {"gradient norm": grad_norm}
        if broken:
            self.skips.leave_out(self.schedule.done, 1, broken, sources)
        self.skips.count([StepResult(grad_norm, bool(broken))])
        seconds = time.perf_counter() - started
        return {
            **metrics,
            **step_metrics([grad_norm]),
            "optimizer/learning_rate": learning_rate,
            "time/update": seconds,
            **performance(num_tokens, seconds, next(self.model.parameters()).device),
        }

    def parts(self) -> tuple[Sequence[PreTrainedModel], PreTrainedTokenizerBase]:
        """The model that is saved, without heads of ours, and its tokenizer."""
        model = self.model.lm if isinstance(self.model, Policy) else self.model.classifier
        return [model], self.tokenizer

    def unsharded(self) -> Self:
        """A learner to be saved (`RunLearner.unsharded`)."""
        model = gathered_on_first(self.model) if is_sharded(self.model) else self.model
        return self if model is None or model is self.model else replace(self, model=model)

    def clear(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on bit for bit; frozen weights are not in it."""
        return {
            "model": trained_weights(self.model),
            "grad_scaler": scaler_state(self.model),
            "optimizer": optimizer_state(self.optimizer),
            "schedule": self.schedule.state_dict(),
            "batches": self.batches.state_dict(),
            "random": random_state(self.generator),
            "skipped_in_a_row": self.skips.in_a_row,
            "room": self.room.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        load_trained_weights(self.model, state["model"])
        load_scaler_state(self.model, state["grad_scaler"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.batches.load_state_dict(state["batches"])
        set_random_state(self.generator, state["random"])
        self.skips.in_a_row = state["skipped_in_a_row"]
        self.room.load_state_dict(state["room"])


@dataclass
class PolicyLearner(OfflineLearner):
    """A policy in training."""

    model: Policy
    stop_ids: Sequence[int] = ()
    """The tokens that end a response."""

    def save(self, folder: Path) -> None:
        """Write the policy, or its adapters, in Hugging Face format."""
        save_policy(self.model, self.tokenizer, folder, stop_ids=self.stop_ids)
