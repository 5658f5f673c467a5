"""What the trainers on given texts share: SFT, reward models, DPO and KTO begin, step and end in the same way."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.configs.offline import DPOConfig, KTOConfig, RewardConfig, SFTConfig
from heedful.configs.options import SamplingOptions
from heedful.data.batches import AdaptiveMicroBatch, collate_padding_behind, own_micro_batches
from heedful.data.chat import Renderer, plain_text
from heedful.data.fitting import Counts
from heedful.data.loading import EncodedPrompt
from heedful.data.splits import BatchOrder, HasPrompt
from heedful.distributed import ranks
from heedful.distributed.sharding import gathered_on_first, is_sharded, passes
from heedful.engines.sampler import make_sampler
from heedful.errors import RefusedError
from heedful.models.policy import Policy
from heedful.models.reward_model import RewardModel
from heedful.models.save import save_policy
from heedful.models.shape import check_rows, context_length
from heedful.models.source import Source, load_config, resolve
from heedful.models.tokenizer import load_chat_tokenizer
from heedful.planning.memory import Lengths
from heedful.training.callbacks import Callbacks
from heedful.training.fsdp import divide, divides
from heedful.training.memory_preflight import check_memory
from heedful.training.non_finite import NonFiniteGuard, StepResult
from heedful.training.optimization import Schedule, make_optimizer, optimizer_step, seed_everything, step_metrics
from heedful.training.performance import performance
from heedful.training.result import TrainingResult
from heedful.training.run import Run
from heedful.training.setup import check_start, load_reference, load_trained, prepare, resolve_machine
from heedful.training.state import (
    load_optimizer_state,
    load_scaler_state,
    load_trained_weights,
    optimizer_state,
    random_state,
    scaler_state,
    set_random_state,
    trained_weights,
)
from heedful.types import MicroBatch, Prompt

SAMPLED_TOKENS = 64
"""Longest response in the table of samples."""

Config = SFTConfig | RewardConfig | DPOConfig | KTOConfig


class TokenRecord(Protocol):
    """A record as token ids: where it was read, for messages, and how many tokens are learned from it."""

    @property
    def source(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...


Item = TypeVar("Item", bound=TokenRecord)
Part = TypeVar("Part")
Read = TypeVar("Read", bound=HasPrompt)
Shown = list[tuple[EncodedPrompt, dict[str, str]]]
"""Prompts of the table of samples, and what the data say to each."""


# Before the first step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What a trainer has before it reads its data."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype
    source: Source
    tokenizer: PreTrainedTokenizerBase
    adaptive: AdaptiveMicroBatch = field(default_factory=AdaptiveMicroBatch)


def set_up(config: Config) -> Setup:
    """Check what needs no model, seed, and load the tokenizer. Raises ConfigError, CheckpointError."""
    check_start(config)
    generator = seed_everything(config.seed)
    device, dtype = resolve_machine(config)
    source = resolve(config.model, config)
    return Setup(generator, device, dtype, source, load_chat_tokenizer(source, config))


def load(config: Config, setup: Setup, longest: int, texts: Iterable[tuple[str, Sequence[int]]]) -> Policy:
    """The policy to train, if memory and vocabulary hold texts of ``longest`` tokens and of these."""
    check_memory(config, Lengths(longest), setup.device, setup.dtype)
    policy = load_trained(config, setup.source, setup.device, setup.dtype)
    check_rows(policy.lm, setup.tokenizer, texts)
    return policy


def reference_of(config: DPOConfig | KTOConfig, setup: Setup, policy: Policy) -> Policy:
    """The model that reads the records before the first step: the policy itself, if no other model or device is asked for."""
    is_apart = config.reference is not None or config.reference_device == "cpu" or divides(config)
    reference = load_reference(config, setup.source, policy, setup.device) if is_apart else policy
    divide(config, setup.device, reference)
    return reference


def read_once(
    reference: Policy,
    lengths: Sequence[int],
    read: Callable[[list[int]], Iterable[Part]],
    limit: MicroBatch,
    adaptive: AdaptiveMicroBatch | None = None,
    *,
    rows: int = 1,
) -> list[Part]:
    """What ``read`` returns for each of some items, called with the indices of as many as memory has room for.

    An item has ``rows`` rows; ``lengths`` are the tokens of their longest ones. The longest are read first, so that memory
    runs out at once or never.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    found: dict[int, Part] = {}

    @torch.no_grad()
    def read_all(limit: MicroBatch) -> None:
        limit, step = MicroBatch(rows * limit.rows, limit.tokens), passes((reference, reference.dummy_loss))
        for part in own_micro_batches(order, limit, lambda i: (rows, lengths[i]), step):
            found.update(zip(part, read(part), strict=True))

    (adaptive or AdaptiveMicroBatch()).run(read_all, limit, rows=len(lengths))
    of_all = ranks.merged(found)
    return [of_all[i] for i in range(len(lengths))]


def whole_logprobs(policy: Policy, prompts: Sequence[list[int]], responses: Sequence[list[int]], pad_id: int) -> Tensor:
    """Log-probabilities of responses to their prompts, summed over their tokens, ``[responses]``."""
    batch = collate_padding_behind(prompts, responses, pad_id=pad_id).to(policy.device)
    logprobs = policy(batch.ids, batch.attention_mask, batch.response_mask).logprobs
    return torch.where(batch.response_mask, logprobs, 0.0).sum(dim=1)


# What learns -------------------------------------------------------------------------------------------------------------


class OfflineLearner:
    """A policy or reward model, its optimizer and schedule, the order of its batches, and its random numbers."""

    def __init__(self, config: Config, setup: Setup, model: Policy | RewardModel, batches: BatchOrder) -> None:
        self.model = model
        self.tokenizer, self.generator, self.adaptive = setup.tokenizer, setup.generator, setup.adaptive
        self.batches = batches
        self.optimizer = make_optimizer([(model, config.learning_rate)], config)
        steps = config.max_steps or math.ceil(config.epochs * batches.num_items / config.batch_size)
        self.schedule = Schedule(self.optimizer, steps, config)
        self.max_grad_norm = config.max_grad_norm
        self.skips = NonFiniteGuard(config.folder)

    def learn(
        self,
        records: Sequence[Item],
        gradients: Callable[[MicroBatch], Mapping[str, float]],
        limit: MicroBatch,
        *,
        rows: int | None = None,
    ) -> dict[str, float]:
        """One optimizer step on some records. Returns its metrics.

        If a metric or the gradient is not a finite number, the step is left out (`NonFiniteGuard`). In float16 only a metric
        counts: gradients that are too large are how the scale is found.

        Args:
            records: what the step learns from.
            gradients: adds up the gradients of their loss, a micro-batch at a time, and returns metrics.
            limit: the micro-batch of the settings.
            rows: how many rows, or pairs, they are if not one each.
        """
        started = time.perf_counter()
        count = len(records) if rows is None else rows
        metrics = self.adaptive.run(gradients, limit, rows=count, undo=self.clear)
        learning_rate = self.schedule.advance()
        broken, grad_norm = {name: value for name, value in metrics.items() if not math.isfinite(value)}, math.nan
        if broken:
            self.clear()
        else:
            grad_norm = optimizer_step(self.optimizer, [self.model], self.max_grad_norm)
            if not math.isfinite(grad_norm) and self.model.grad_scaler is None:
                broken = {"gradient norm": grad_norm}
        if broken:
            self.skips.leave_out(self.schedule.done, 1, broken, [record.source for record in records])
        self.skips.count([StepResult(grad_norm, bool(broken))])
        seconds = time.perf_counter() - started
        return {
            **metrics,
            **step_metrics([grad_norm]),
            "optimizer/learning_rate": learning_rate,
            "time/update": seconds,
            **performance(sum(record.num_tokens for record in records), seconds, next(self.model.parameters()).device),
        }

    def parts(self) -> tuple[Sequence[PreTrainedModel], PreTrainedTokenizerBase]:
        """The model that is saved, without heads of ours, and its tokenizer."""
        model = self.model.lm if isinstance(self.model, Policy) else self.model.classifier
        return [model], self.tokenizer

    def unsharded(self) -> Self:
        """A learner to be saved (`RunLearner.unsharded`)."""
        model = gathered_on_first(self.model) if is_sharded(self.model) else self.model
        if model is None or model is self.model:
            return self
        whole = copy.copy(self)
        whole.model = model
        return whole

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
            "room": self.adaptive.state_dict(),
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
        self.adaptive.load_state_dict(state["room"])


class PolicyLearner(OfflineLearner):
    """A policy in training, and what draws the responses of the table of samples."""

    model: Policy

    def __init__(self, config: Config, setup: Setup, policy: Policy, batches: BatchOrder, renderer: Renderer) -> None:
        prepare(policy, config, base=config.model, dropout=getattr(config, "lora_dropout", 0.0))
        divide(config, setup.device, policy)
        super().__init__(config, setup, policy, batches)
        context = context_length(load_config(setup.source))
        options = SamplingOptions(max_new_tokens=min(SAMPLED_TOKENS, context // 2))
        self.sampler = make_sampler(options, renderer, policy, is_used=config.sample_every > 0)
        self.longest_shown = context - options.max_new_tokens
        """Tokens of the longest prompt in the table of samples."""

    def save(self, folder: Path) -> None:
        """Write the policy, or its adapters, in Hugging Face format."""
        save_policy(self.model, self.tokenizer, folder, stop_ids=self.sampler.stop_ids)


@dataclass(frozen=True)
class PolicyData(Generic[Item]):
    """The records of a run as token ids."""

    train: list[Item]
    held_out: list[Item]
    counts: Counts
    pad_id: int
    shown: Shown


def shown_of(
    records: Iterable[Read], learner: PolicyLearner, number: int, texts: Callable[[Read], dict[str, str]]
) -> Shown:
    """The first ``number`` records of different prompts that leave a response of the table room in the context."""
    renderer, shown = learner.sampler.renderer, Shown()
    for record in {record.prompt: record for record in records}.values():
        if len(shown) == number:
            break
        with contextlib.suppress(RefusedError):  # it was dropped
            ids = renderer.prompt_ids(record.prompt)
            if len(ids) <= learner.longest_shown:
                shown.append((EncodedPrompt(Prompt(record.prompt, record.source), ids), texts(record)))
    return shown


def sample_rows(learner: PolicyLearner, data: PolicyData) -> list[dict[str, Any]]:
    """Rows for the table of samples: prompts, what the data say to them, and what the policy answers."""
    if not data.shown:
        return []
    _, completions = learner.sampler.respond(learner.model, [prompt for prompt, _ in data.shown], learner.generator)
    return [
        {"prompt": plain_text(prompt.prompt.prompt), **texts, "response": completion.response}
        for (prompt, texts), completion in zip(data.shown, completions, strict=True)
    ]


# The loop ----------------------------------------------------------------------------------------------------------------


def fit(
    config: Config,
    learner: Any,
    train: Sequence[Item],
    held_out: Sequence[Item],
    algorithm: str,
    *,
    learn: Callable[[list[Item]], Mapping[str, float]],
    evaluate: Callable[[MicroBatch], Mapping[str, float]],
    samples: Callable[[], list[dict[str, Any]]],
    shown: Mapping[str, str],
    facts: Mapping[str, Any],
    objective: str = "eval/loss",
    higher_is_better: bool = False,
    notes: Sequence[str] = (),
    callbacks: Callbacks,
    held_out_rows: int | None = None,
) -> TrainingResult:
    """Train to the last step, or until evaluations no longer improve, and write a run folder.

    Args:
        learner: an `OfflineLearner` that can be saved.
        learn: takes an optimizer step on a batch.
        evaluate: returns metrics of the held-out records, read as many at a time as it is told.
        samples: returns rows for the table of samples.
        held_out_rows: how many rows, or pairs, the held-out records are if not one each.
        shown, facts, objective, higher_is_better, notes, callbacks: as in `Run`.
    """
    reference, offset_data = getattr(config, "reference", None), getattr(config, "offset_data", None)
    with Run(
        config,
        learner,
        algorithm,
        learner.schedule.total_steps,
        objective=objective,
        higher_is_better=higher_is_better,
        shown=shown,
        parents=[config.model, *([reference] if reference else [])],
        facts=facts,
        notes=notes,
        more_data=[offset_data] if offset_data else [],
        can_evaluate=bool(held_out),
        callbacks=callbacks,
    ) as run:
        for step in run.steps():
            if run.needs_update(step):
                with run.update():
                    run.log(step, learn([train[row] for row in next(learner.batches)]))
                    learner.skips.check()
            if run.samples_due(step):
                run.show_samples(step, samples())
            if run.evaluation_due(step) and held_out:
                rows = len(held_out) if held_out_rows is None else held_out_rows
                with torch.no_grad():
                    metrics = learner.adaptive.run(evaluate, config.micro_batch, rows=rows)
                run.evaluate(step, metrics)
    return TrainingResult(run.path, run.summary, config)
