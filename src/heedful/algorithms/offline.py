"""Set-up, optimizer step and loop shared by the offline trainers: SFT, reward models, DPO and KTO."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.checks.findings import Finding, LoadedRun, TokenRow
from heedful.configs.offline import EpochOptions
from heedful.configs.options import ReferenceOptions, SamplingOptions
from heedful.data.batches import AdaptiveMicroBatch, Batch, collate_padding_behind, own_micro_batches
from heedful.data.chat import Renderer, plain_text, stop_ids
from heedful.data.fitting import Counts
from heedful.data.loading import EncodedPrompt, Example
from heedful.data.splits import BatchOrder, HasPrompt
from heedful.display import counted
from heedful.distributed import ranks
from heedful.distributed.sharding import gathered_on_first, is_sharded, lockstep_forwards
from heedful.engines.sampler import make_sampler
from heedful.errors import ConfigError, RefusedError
from heedful.kernels.waiting import on_device
from heedful.models.policy import Policy
from heedful.models.reward_model import RewardModel
from heedful.models.save import save_policy
from heedful.models.shape import check_rows, context_length
from heedful.models.source import Source, load_config, resolve
from heedful.models.tokenizer import load_chat_tokenizer
from heedful.planning.memory import Lengths
from heedful.training.alarms import OFFLINE, Alarms, Limits
from heedful.training.callbacks import Callbacks
from heedful.training.compilation import compile_layers
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
    random_state,
    scaler_state,
    set_random_state,
    trained_weights,
)
from heedful.training.verdict import Yardstick
from heedful.types import MicroBatch, Prompt

SAMPLED_TOKENS = 64
"""Length limit of responses in the sample table, in tokens."""


class TokenRecord(Protocol):
    """A record as token ids, with its source (file and line) for messages and its number of trained tokens."""

    @property
    def source(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...


Item = TypeVar("Item", bound=TokenRecord)
Part = TypeVar("Part")
Read = TypeVar("Read", bound=HasPrompt)
Shown = list[tuple[EncodedPrompt, dict[str, str]]]
"""Prompts of the sample table, each with its responses in the data."""


# Before the first step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A trainer's objects before it reads its data."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype
    source: Source
    tokenizer: PreTrainedTokenizerBase
    adaptive: AdaptiveMicroBatch = field(default_factory=AdaptiveMicroBatch)
    resumes: bool = False
    """Whether an unfinished run goes on."""


def set_up(config: EpochOptions) -> Setup:
    """Check the settings that need no model, seed, and load the tokenizer. Raises ConfigError, CheckpointError."""
    plan = check_start(config)
    generator = seed_everything(config.seed)
    device, dtype = resolve_machine(config)
    source = resolve(config.model, config)
    return Setup(generator, device, dtype, source, load_chat_tokenizer(source, config), resumes=plan.resumes)


def load(config: EpochOptions, setup: Setup, longest: int, texts: Iterable[tuple[str, Sequence[int]]]) -> Policy:
    """Load the policy to train, and check memory for ``longest`` tokens and the vocabulary for ``texts``."""
    check_memory(config, Lengths(longest), setup.device, setup.dtype)
    policy = load_trained(config, setup.source, setup.device, setup.dtype)
    check_rows(policy.lm, setup.tokenizer, texts)
    return policy


def loaded_run_of(
    config: EpochOptions,
    setup: Setup,
    policy: Policy,
    renderer: Renderer,
    *,
    rows: Sequence[TokenRow],
    split: tuple[Sequence[Read], Sequence[Read], Counts],
    counts: Counts,
) -> LoadedRun:
    """What is examined before the first step: the ``rows`` that a policy learns from, and the records that they were."""
    return LoadedRun(
        config=config,
        tokenizer=setup.tokenizer,
        model=policy.lm,
        rows=rows,
        records=split[:2],
        counts=counts,
        renderer=renderer,
        stop_ids=stop_ids(renderer, policy.lm.generation_config.eos_token_id),
        resumes=setup.resumes,
    )


def reference_of(config: EpochOptions, setup: Setup, policy: Policy) -> Policy:
    """The reference model: the policy itself before its first step, unless the settings name another model or
    device."""
    assert isinstance(config, ReferenceOptions)
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
    """Call ``read`` on the indices of all items, in micro-batches that fit into memory; returns a result per item.

    An item has ``rows`` rows; ``lengths`` has the tokens of each item's longest row. The longest items come first, so
    that memory runs out at once or never.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    found: dict[int, Part] = {}

    @torch.no_grad()
    def read_all(limit: MicroBatch) -> None:
        limit, step = MicroBatch(rows * limit.rows, limit.tokens), lockstep_forwards((reference, reference.dummy_loss))
        for part in own_micro_batches(order, limit, lambda i: (rows, lengths[i]), step):
            found.update(zip(part, read(part), strict=True))

    with on_device(reference):
        (adaptive or AdaptiveMicroBatch()).run(read_all, limit, rows=len(lengths))
    of_all = ranks.merged(found)
    return [of_all[i] for i in range(len(lengths))]


def token_rows(examples: Iterable[Example], name: str = "") -> list[TokenRow]:
    """What is learned of each example, for the checks: a row for each answer, after all that was said before it.

    ``name`` says which response of its record it is.
    """
    rows = []
    for one in examples:
        learned, start = [True] * len(one.response) if one.learned is None else one.learned, 0
        for is_learned, group in groupby(learned):
            end = start + len(list(group))
            if is_learned:
                rows.append(TokenRow(one.source, one.prompt + one.response[:start], one.response[start:end], name))
            start = end
    return rows


def as_batch(examples: Sequence[Example], pad_id: int) -> Batch:
    """Examples as tensors, with all padding at the end; ``response_mask`` marks what is learned."""
    learned = None
    if any(one.learned is not None for one in examples):
        learned = [[True] * len(one.response) if one.learned is None else one.learned for one in examples]
    prompts, responses = [one.prompt for one in examples], [one.response for one in examples]
    return collate_padding_behind(prompts, responses, pad_id=pad_id, own=learned)


def whole_logprobs(policy: Policy, examples: Sequence[Example], pad_id: int) -> Tensor:
    """Log-probabilities of responses to their prompts, summed over the tokens that are learned, ``[responses]``."""
    batch = as_batch(examples, pad_id).to(policy.device)
    logprobs = policy(batch.ids, batch.attention_mask, batch.response_mask).logprobs
    return torch.where(batch.response_mask, logprobs, 0.0).sum(dim=1)


def batches_of(config: EpochOptions, train: int, held_out: int, item: str = "record") -> BatchOrder:
    """The order of a run's records.

    Args:
        config: the settings.
        train, held_out: numbers of records to train on and held out.
        item: what a record is, in messages.

    Raises ConfigError if a step takes more records than there are.
    """
    if train < config.batch_size:
        is_split = held_out and config.eval_data is None
        besides = f", besides {held_out} held out (--eval-fraction {config.eval_fraction:g})" if is_split else ""
        raise ConfigError(
            f"a step learns {counted(config.batch_size, item)} (--batch-size); there {'is' if train == 1 else 'are'} "
            f"{counted(train, item)} to train on{besides}. Set --batch-size {train - train % (8 if train >= 16 else 1)}, "
            f"or give more {item}s"
        )
    return BatchOrder(train, config.batch_size, config.seed, shuffle=config.shuffle, items=f"{item}s")


# The learner ----------------------------------------------------------------------------------------------------------


class OfflineLearner:
    """A policy or reward model with its optimizer, schedule, batch order and random state."""

    def __init__(self, config: EpochOptions, setup: Setup, model: Policy | RewardModel, batches: BatchOrder) -> None:
        self.model = model
        self.tokenizer, self.generator, self.adaptive = setup.tokenizer, setup.generator, setup.adaptive
        self.batches = batches
        self.optimizer = make_optimizer([(model, config.learning_rate)], config)
        steps = config.max_steps or math.ceil(config.epochs * batches.num_items / config.batch_size)
        self.schedule = Schedule(self.optimizer, steps, config)
        self.max_grad_norm = config.max_grad_norm
        self.non_finite_guard = NonFiniteGuard(config.folder)

    def learn(
        self,
        records: Sequence[Item],
        gradients: Callable[[MicroBatch], Mapping[str, float]],
        limit: MicroBatch,
        *,
        rows: int | None = None,
    ) -> dict[str, float]:
        """One optimizer step on some records. Returns its metrics.

        If a metric or the gradient is not finite, the step is skipped (`NonFiniteGuard`). In float16 only metrics
        count: the loss scale is found by gradients that overflow.

        Args:
            records: the step's records.
            gradients: accumulates the gradients of their loss in micro-batches, and returns metrics.
            limit: the micro-batch of the settings.
            rows: number of rows, or pairs, if not one per record.
        """
        started = time.perf_counter()
        count = len(records) if rows is None else rows
        metrics = self.adaptive.run(gradients, limit, rows=count, undo=self.clear)
        learning_rate = self.schedule.advance()
        broken, grad_norm = {name: value for name, value in metrics.items() if not math.isfinite(value)}, math.nan
        if broken:
            self.clear()
        else:
            grad_norm = optimizer_step(self.optimizer, self.model, self.max_grad_norm)
            if not math.isfinite(grad_norm) and self.model.grad_scaler is None:
                broken = {"gradient norm": grad_norm}
        if broken:
            self.non_finite_guard.skip(self.schedule.done, 1, broken, [record.source for record in records])
        self.non_finite_guard.count([StepResult(grad_norm, bool(broken))])
        seconds = time.perf_counter() - started
        return {
            **metrics,
            **step_metrics([grad_norm]),
            "optimizer/learning_rate": learning_rate,
            "time/update": seconds,
            **performance(sum(record.num_tokens for record in records), seconds, next(self.model.parameters()).device),
        }

    def parts(self) -> tuple[Sequence[PreTrainedModel], PreTrainedTokenizerBase]:
        """The model to save, without heedful's own heads, and its tokenizer."""
        model = self.model.lm if isinstance(self.model, Policy) else self.model.classifier
        return [model], self.tokenizer

    def unsharded(self) -> Self:
        """An unsharded learner for saving (`RunLearner.unsharded`)."""
        model = gathered_on_first(self.model) if is_sharded(self.model) else self.model
        if model is None or model is self.model:
            return self
        whole = copy.copy(self)
        whole.model = model
        return whole

    def clear(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """The state for bitwise resuming, without frozen weights."""
        return {
            "model": trained_weights(self.model),
            "grad_scaler": scaler_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "batches": self.batches.state_dict(),
            "random": random_state(self.generator),
            "skipped_in_a_row": self.non_finite_guard.in_a_row,
            "room": self.adaptive.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        load_trained_weights(self.model, state["model"])
        load_scaler_state(self.model, state["grad_scaler"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.batches.load_state_dict(state["batches"])
        set_random_state(self.generator, state["random"])
        self.non_finite_guard.in_a_row = state["skipped_in_a_row"]
        self.adaptive.load_state_dict(state["room"])


class PolicyLearner(OfflineLearner):
    """A policy in training, with the sampler for the sample table."""

    model: Policy

    def __init__(
        self, config: EpochOptions, setup: Setup, policy: Policy, batches: BatchOrder, renderer: Renderer
    ) -> None:
        prepare(policy, config, base=config.model, dropout=getattr(config, "lora_dropout", 0.0))
        divide(config, setup.device, policy)
        super().__init__(config, setup, policy, batches)
        context = context_length(load_config(setup.source))
        options = SamplingOptions(max_new_tokens=min(SAMPLED_TOKENS, context // 2))
        self.sampler = make_sampler(options, renderer, policy, is_used=config.sample_every > 0)
        self.pad_id = renderer.pad_id
        self.longest_shown = context - options.max_new_tokens
        """Length of the longest prompt in the sample table, in tokens."""

    def save(self, folder: Path) -> None:
        """Write the policy, or its adapters, in Hugging Face format."""
        save_policy(self.model, self.tokenizer, folder, stop_ids=self.sampler.stop_ids)


class EachRecord:
    """What each held-out record adds to a mean over all of them, collected while they are read."""

    def __init__(self) -> None:
        self._parts: list[tuple[list[int], Tensor, Sequence[float]]] = []

    def add(self, records: Sequence[object], sums: Tensor, counts: Sequence[float] | None = None) -> None:
        """Add a micro-batch's records: their sums ``[records]`` and, unless each is 1, their counts."""
        self._parts.append(([id(one) for one in records], sums.detach(), counts or [1.0] * len(records)))

    def shares(self, records: Sequence[object]) -> list[tuple[float, float]]:
        """The sum and the count of each record, of all ranks. Collective."""
        place = {id(one): at for at, one in enumerate(records)}
        found = ranks.merged(
            {
                place[one]: (total, count)
                for ones, sums, counts in self._parts
                for one, total, count in zip(ones, sums.tolist(), counts, strict=True)
            }
        )
        return [found[at] for at in range(len(records))]


@dataclass(frozen=True)
class TrainingData(Generic[Item]):
    """The records of a run as token ids, and what there is to say about them."""

    train: list[Item]
    held_out: list[Item]
    facts: Mapping[str, Any]
    """Counts of them, for environment.json."""
    shown: Shown = field(default_factory=list)
    """Of the sample table."""
    notes: Sequence[str] = ()
    """Sentences before the first step."""
    findings: Sequence[Finding] = ()
    """What the doctor says besides its own checks."""


def shown_of(
    records: Iterable[Read], learner: PolicyLearner, number: int, texts: Callable[[Read], dict[str, str]]
) -> Shown:
    """The first ``number`` records with different prompts whose context has room for a response of `SAMPLED_TOKENS`."""
    renderer, shown = learner.sampler.renderer, Shown()
    for record in {record.prompt: record for record in records}.values():
        if len(shown) == number:
            break
        with contextlib.suppress(RefusedError):  # it was dropped
            begun = getattr(record, "prefill", "")
            ids = renderer.prompt_ids(record.prompt, begun)
            if len(ids) <= learner.longest_shown:
                shown.append((EncodedPrompt(Prompt(record.prompt, record.source, prefill=begun), ids), texts(record)))
    return shown


def sample_rows(learner: PolicyLearner, data: TrainingData) -> list[dict[str, Any]]:
    """Rows of the sample table: prompts, their responses in the data, and the policy's responses."""
    if not data.shown:
        return []
    responses = learner.sampler.generate(learner.model, [prompt for prompt, _ in data.shown], learner.generator)
    return [
        {"prompt": plain_text(prompt.prompt.prompt), **texts, "response": completion.response}
        for (prompt, texts), completion in zip(data.shown, responses.completions, strict=True)
    ]


# The loop ----------------------------------------------------------------------------------------------------------------


def fit(
    config: EpochOptions,
    learner: Any,
    data: TrainingData[Item],
    *,
    learn: Callable[[list[Item]], Mapping[str, float]],
    evaluate: Callable[[MicroBatch, "EachRecord"], Mapping[str, float]],
    samples: Callable[[], list[dict[str, Any]]],
    shown: Mapping[str, str],
    yardstick: Yardstick,
    objective: str = "eval/loss",
    higher_is_better: bool = False,
    callbacks: Callbacks,
    held_out_rows: int | None = None,
) -> TrainingResult:
    """Train to the last step, or until evaluations stop improving, and write a run folder.

    Args:
        learner: an `OfflineLearner` with ``save``.
        data: its records.
        learn: takes an optimizer step on a batch.
        evaluate: returns metrics of the held-out records, read in the micro-batches it is given, and adds each record's
            share in the yardstick.
        samples: returns rows of the sample table.
        held_out_rows: number of held-out rows, or pairs, if not one per record.
        shown, yardstick, objective, higher_is_better, callbacks: as in `Run`.
    """
    train, held_out = data.train, data.held_out
    reference = config.reference if isinstance(config, ReferenceOptions) else None
    compile_layers(config, [learner.model])
    with Run(
        config,
        learner,
        config.algorithm,
        learner.schedule.total_steps,
        objective=objective,
        higher_is_better=higher_is_better,
        shown=shown,
        parents=[config.model, *([reference] if reference else [])],
        facts=data.facts,
        notes=data.notes,
        more_data=config.other_files,
        yardstick=yardstick if held_out else None,
        callbacks=callbacks,
        alarms=Alarms(Limits(beta=config.summed_strength), names=OFFLINE),
    ) as run:
        for step in run.steps():
            if run.needs_update(step):
                with run.update():
                    run.log(step, learn([train[row] for row in next(learner.batches)]))
                    learner.non_finite_guard.check()
            if run.samples_due(step):
                run.show_samples(step, samples())
            if run.evaluation_due(step) and held_out:
                rows = len(held_out) if held_out_rows is None else held_out_rows
                each = EachRecord()
                with torch.no_grad():
                    metrics = learner.adaptive.run(
                        lambda limit, each=each: evaluate(limit, each), config.micro_batch, rows=rows
                    )
                run.evaluate(step, metrics, each.shares(held_out))
    return TrainingResult(run.path, run.summary, config)
