"""Optimizer, schedule and step, shared by every trainer."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from heedful.configs.options import OptimizerOptions, TrainingOptions
from heedful.distributed import ranks
from heedful.distributed.sharding import clip_gradients, is_divided
from heedful.errors import TrainingError
from heedful.faults import hit
from heedful.training.compact_adamw import CompactAdamW, EightBitAdamW


def seed_everything(seed: int) -> torch.Generator:
    """Seed Python's and torch's generators, and return a separate CPU generator for sampling."""
    random.seed(seed)
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def make_optimizer(groups: Sequence[tuple[nn.Module | None, float]], options: TrainingOptions) -> torch.optim.Optimizer:
    """AdamW over the trainable weights of modules, each with its own peak learning rate; weight decay only for
    matrices."""
    parameter_groups: list[dict[str, Any]] = []
    seen: set[int] = set()
    for module, learning_rate in groups:
        parameters = [p for p in module.parameters() if p.requires_grad and id(p) not in seen] if module else []
        seen |= {id(p) for p in parameters}
        for decay, chosen in (
            (options.weight_decay, [p for p in parameters if p.dim() >= 2]),
            (0.0, [p for p in parameters if p.dim() < 2]),
        ):
            if chosen:
                parameter_groups.append(
                    {"params": chosen, "lr": learning_rate, "peak_lr": learning_rate, "weight_decay": decay}
                )
    betas = (0.9, options.adam_beta2)
    if options.optimizer == "adamw-8bit" and options.weights_dtype == "bfloat16":
        return EightBitAdamW(parameter_groups, betas=betas, eps=options.adam_eps, seed=options.seed)
    if options.optimizer == "adamw-8bit":
        from bitsandbytes.optim import AdamW8bit  # GPU only; heedful.models.load has checked for it

        eight_bit: torch.optim.Optimizer = AdamW8bit(parameter_groups, betas=betas, eps=options.adam_eps)
        return eight_bit
    if options.weights_dtype == "bfloat16" or options.optimizer_device == "cpu":
        device = torch.device("cpu") if options.optimizer_device == "cpu" else None
        return CompactAdamW(parameter_groups, betas=betas, eps=options.adam_eps, device=device, seed=options.seed)
    is_mixed = len({is_divided(p) for group in parameter_groups for p in group["params"]}) > 1
    kind = MixedAdamW if is_mixed else torch.optim.AdamW
    # One kernel, which torch has for all its devices, is several times as fast as separate operations.
    return kind(parameter_groups, betas=betas, eps=options.adam_eps, fused=True)


class MixedAdamW(torch.optim.AdamW):
    """AdamW of sharded and of replicated weights, which torch's kernel cannot take together."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # as trainers call it
        """Step the sharded weights, then the others."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for divided in (True, False):
            left = [(p, p.grad) for p in parameters if is_divided(p) is not divided]
            for parameter, _ in left:
                parameter.grad = None
            super().step(closure)
            for parameter, gradient in left:
                parameter.grad = gradient


class Schedule:
    """Sets an optimizer's learning rates before each step: linear warm-up, then the chosen schedule down to 0.

    Args:
        optimizer: its groups have a ``peak_lr``.
        total_steps: number of steps of the run.
        options: warm-up and schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, total_steps: int, options: OptimizerOptions) -> None:
        self.optimizer, self.total_steps, self.options = optimizer, total_steps, options
        self.done = 0
        """Number of steps so far."""

    def advance(self) -> float:
        """Set the learning rates of the next step; returns the first group's."""
        factor = lr_factor(self.done, total_steps=self.total_steps, options=self.options)
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        learning_rate: float = self.optimizer.param_groups[0]["lr"]
        return learning_rate

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.done = state["done"]


def lr_factor(step: int, *, total_steps: int, options: OptimizerOptions) -> float:
    """Factor of the peak learning rate at a step (from 0): linear warm-up, then the schedule down to 0."""
    if step < options.warmup_steps:
        return (step + 1) / (options.warmup_steps + 1)
    progress = (step - options.warmup_steps) / max(1, total_steps - options.warmup_steps)
    if options.lr_schedule == "linear":
        return 1 - progress
    if options.lr_schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0


def optimizer_step(optimizer: torch.optim.Optimizer, module: nn.Module, max_grad_norm: float) -> float:
    """Clip a module's gradient norm, step, and clear gradients. Returns the norm, before clipping.

    Gradients are summed over ranks first. If the norm is not finite, the step is skipped: weights, moments and the
    optimizer's step count do not change. In float16 the loss scale is then halved. Raises TrainingError if the norm is
    still not finite at a scale below 1.
    """
    scaler: torch.amp.GradScaler | None = getattr(module, "grad_scaler", None)
    ranks.add_gradients(dict.fromkeys(p for p in module.parameters() if not is_divided(p)))
    if scaler is not None:
        scaler.unscale_(optimizer)
    learned = [p for p in module.parameters() if p.grad is not None]
    norm = float(clip_gradients(learned, max_grad_norm or math.inf))  # a GPU is waited for once
    is_broken = not math.isfinite(norm)
    if is_broken and scaler is not None and scaler.get_scale() < 1:
        raise TrainingError(
            f"the gradient norm is {norm} even at a loss scale below 1; lower --learning-rate, or try --dtype float32"
        )
    hit("update.backward")
    if scaler is not None:
        scaler.step(optimizer)  # skips the step if a gradient is not finite
        scaler.update()
    elif not is_broken:
        optimizer.step()
    hit("update.stepped")
    optimizer.zero_grad(set_to_none=True)
    return norm


def step_metrics(norms: Sequence[float], others: Sequence[float] = ()) -> dict[str, float]:
    """Mean gradient norm of optimizer steps, and the number of skipped ones, if any (see `optimizer_step`), also of another
    network's."""
    mean, skipped = mean_norm(norms), sum(not math.isfinite(norm) for norm in (*norms, *others))
    metrics = {} if mean is None else {"optimizer/grad_norm": mean}
    return metrics | ({"optimizer/skipped_steps": float(skipped)} if skipped else {})


def mean_norm(norms: Sequence[float]) -> float | None:
    """Mean of the finite norms; None without any."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return sum(finite) / len(finite) if finite else None
