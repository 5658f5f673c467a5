"""KTO: a policy learns from single responses that are good or bad, without pairs (Ethayarajh et al. 2024)."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heedful import core
from heedful.configs.offline import KTOConfig
from heedful.configs.options import SamplingOptions
from heedful.data.batches import AdaptiveMicroBatch, own_micro_batches
from heedful.data.chat import Renderer, plain_text
from heedful.data.fitting import Counts, max_length
from heedful.data.loading import EncodedPrompt, encode_split, load_split
from heedful.data.schemas import read_labelled
from heedful.data.splits import BatchOrder
from heedful.models.heads import disable_dropout
from heedful.models.policy import Policy
from heedful.models.shape import check_rows, context_length
from heedful.models.source import load_config, resolve
from heedful.models.tokenizer import check_companion, load_chat_tokenizer
from heedful.parallel import ranks
from heedful.parallel.sharding import passes
from heedful.planning.memory import Lengths
from heedful.sampling.sampler import Sampler, make_sampler
from heedful.train.fsdp import divide, divides
from heedful.train.labelled import LabelledRow, check_labels, encode_labelled, with_others, with_reference
from heedful.train.learner import PolicyLearner
from heedful.train.memory_preflight import check_memory
from heedful.train.metric_sums import MetricSums
from heedful.train.non_finite import NonFiniteGuard
from heedful.train.optimization import Schedule, make_optimizer, seed_everything
from heedful.train.pairs import whole_logprobs
from heedful.train.run import Run
from heedful.train.setup import check_start, load_reference, load_trained, prepare, resolve_machine
from heedful.types import MicroBatch, Prompt, plain_response

SHOWN = {"loss/kto": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin", "reference/z0": "z0"}
SAMPLED_TOKENS = 64
"""Longest response in the table of samples."""
BALANCED = (1.0, 1.5)
"""Weight times number of the good responses over that of the bad ones, as the paper advises (eq. 9)."""


def train_kto(config: KTOConfig) -> dict[str, Any]:
    """Train a policy on labelled responses and write a run folder. Returns what summary.json holds.

    The reference's log-probs do not change, so they are computed once, before the first step.

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError during training.
    """
    learner, data = start(config)
    with Run(
        config,
        learner,
        "kto",
        learner.schedule.total_steps,
        objective="eval/loss",
        higher_is_better=False,
        shown=SHOWN,
        parents=[config.model, *([config.reference] if config.reference else [])],
        facts={"data": data.counts},
        notes=notes_of(data.train, config),
        can_evaluate=bool(data.held_out),
    ) as run:
        for step in run.steps():
            if run.needs_update(step):
                with run.update():
                    run.log(
                        step, learn(learner, [data.train[row] for row in next(learner.batches)], data.pad_id, config)
                    )
                    learner.skips.check()
            if run.samples_due(step):
                run.show_samples(step, sample_rows(learner, data))
            if run.evaluation_due(step):
                run.evaluate(step, evaluate(learner, data, config))
    return run.summary


@dataclass(frozen=True)
class KTOData:
    """Labelled responses with the reference's log-probs, and those whose prompts the table of samples answers."""

    train: list[LabelledRow]
    held_out: list[LabelledRow]
    counts: Counts
    pad_id: int
    shown: list[LabelledRow]
    sampler: Sampler


def start(config: KTOConfig) -> tuple[PolicyLearner, KTOData]:
    """Load everything, check that it fits together, and read the responses with the reference. Nothing is written."""
    check_start(config)
    generator = seed_everything(config.seed)
    device, dtype = resolve_machine(config)
    source = resolve(config.model, config)
    tokenizer = load_chat_tokenizer(source, config)
    renderer = Renderer(tokenizer, config.special_tokens)
    context = context_length(load_config(source))
    limit = max_length(config.max_length, context)
    train, held_out, counts = encode_split(
        lambda records, refused: encode_labelled(records, renderer, limit, config, refused),
        load_split(read_labelled, config),
        config,
        renderer,
    )
    check_labels(train, config.data)
    train, held_out, counts = _with_others(train, held_out, counts, limit, config.seed)
    longest = max(max(one.length, one.other_length) for one in train + held_out)
    check_companion("--reference", config.reference, tokenizer, longest, config)
    batches = BatchOrder(len(train), config.batch_size, config.seed)
    total_steps = config.max_steps or math.ceil(config.epochs * len(train) / config.batch_size)
    check_memory(config, Lengths(longest), device, dtype)
    policy = load_trained(config, source, device, dtype)
    texts = ((one.record.source, ids) for one in train + held_out for ids in (one.prompt, one.response))
    check_rows(policy.lm, tokenizer, texts)
    disable_dropout(policy)
    is_apart = config.reference is not None or config.reference_device == "cpu" or divides(config)
    reference = load_reference(config, source, policy, device) if is_apart else policy
    divide(config, device, reference)
    room = AdaptiveMicroBatch()
    train, held_out = (
        with_reference(reference, labelled, renderer.pad_id, config.micro_batch, room) for labelled in (train, held_out)
    )
    del reference
    prepare(policy, config, base=config.model)
    divide(config, device, policy)
    optimizer = make_optimizer([(policy, config.learning_rate)], config)
    new_tokens = min(SAMPLED_TOKENS, context // 2)
    sampler = make_sampler(
        SamplingOptions(max_new_tokens=new_tokens), renderer, policy, is_used=config.sample_every > 0
    )
    by_prompt = {one.record.prompt: one for one in held_out or train if len(one.asked) <= context - new_tokens}
    learner = PolicyLearner(
        model=policy,
        tokenizer=tokenizer,
        optimizer=optimizer,
        schedule=Schedule(optimizer, total_steps, config),
        batches=batches,
        generator=generator,
        max_grad_norm=config.max_grad_norm,
        skips=NonFiniteGuard(config.output),
        room=room,
        stop_ids=sampler.stop_ids,
    )
    shown = list(by_prompt.values())[: config.num_samples]
    return learner, KTOData(train, held_out, counts, renderer.pad_id, shown, sampler)


def _with_others(
    train: list[LabelledRow], held_out: list[LabelledRow], counts: Counts, limit: int, seed: int
) -> tuple[list[LabelledRow], list[LabelledRow], Counts]:
    """Both parts with responses to other prompts, those of the training part, and the counts of all."""
    good = sum(one.record.label for one in train)
    of_pairs = sum(one.record.of_a_pair for one in train + held_out)
    learned, cut = with_others(train, train, limit, seed)
    measured, cut_held_out = with_others(held_out, train, limit, seed)
    added = {"of_pairs": of_pairs, "cut_for_kl": cut + cut_held_out}
    counts = {**counts, "good": good, "bad": len(train) - good, **{name: n for name, n in added.items() if n}}
    return learned, measured, counts


def notes_of(train: Sequence[LabelledRow], config: KTOConfig) -> list[str]:
    """What to say of the records before the first step: pairs that were taken apart, labels out of balance."""
    notes = []
    if any(one.record.of_a_pair for one in train):
        notes.append("each pair counts as a good and a bad response; heedful dpo learns from pairs as they are")
    good = sum(one.record.label for one in train)
    bad = len(train) - good
    balance = config.desirable_weight * good / (config.undesirable_weight * bad)
    if not BALANCED[0] <= balance <= BALANCED[1]:
        few = "desirable" if balance < BALANCED[0] else "undesirable"
        weight = config.undesirable_weight * bad / good if few == "desirable" else config.desirable_weight * good / bad
        notes.append(
            f"{good} good and {bad} bad responses, weighed {config.desirable_weight:g} and {config.undesirable_weight:g}: "
            f"--{few}-weight {weight:.3g} would balance them"
        )
    return notes


def learn(learner: PolicyLearner, labelled: Sequence[LabelledRow], pad_id: int, config: KTOConfig) -> dict[str, float]:
    """One optimizer step on some responses. Returns its metrics."""
    started = time.perf_counter()
    metrics = learner.room.run(
        lambda limit: accumulate(learner.model, labelled, pad_id, config, limit),
        config.micro_batch,
        rows=len(labelled),
        undo=learner.clear,
    )
    num_tokens = sum(len(one.response) for one in labelled)
    return learner.update(metrics, started, [one.record.source for one in labelled], num_tokens=num_tokens)


def sample_rows(learner: PolicyLearner, data: KTOData) -> list[dict[str, Any]]:
    """Rows for the table of samples: labelled responses, and what the policy answers to their prompts."""
    if not data.shown:
        return []
    prompts = [EncodedPrompt(Prompt(one.record.prompt, one.record.source), one.asked) for one in data.shown]
    _, completions = data.sampler.respond(learner.model, prompts, learner.generator)
    return [
        {
            "prompt": plain_text(one.record.prompt),
            "good" if one.record.label else "bad": plain_response(one.record.response),
            "response": completion.response,
        }
        for one, completion in zip(data.shown, completions, strict=True)
    ]


def accumulate(
    policy: Policy, labelled: Sequence[LabelledRow], pad_id: int, config: KTOConfig, limit: MicroBatch | None = None
) -> dict[str, float]:
    """Gradients of the KTO loss over a step's responses, a micro-batch at a time, and its metrics.

    The KL is estimated first, on all of the step's prompts with responses to others. Every micro-batch is divided by counts
    of the step, so their size does not change the gradient. ``limit`` is the config's unless given.
    """
    limit = limit or config.micro_batch
    kl = mean_of_others(policy, labelled, pad_id, limit)
    num_desirable = sum(one.record.label for one in labelled)
    sums = MetricSums()
    ordered, step = sorted(labelled, key=lambda one: one.length), passes((policy, policy.zero))
    for part in own_micro_batches(ordered, limit, lambda one: (1, one.length), step):
        logprobs = whole_logprobs(policy, [one.prompt for one in part], [one.response for one in part], pad_id)
        loss, metrics = core.kto_loss(
            logprobs,
            logprobs.new_tensor([one.ref for one in part]),
            torch.tensor([one.record.label for one in part], device=logprobs.device),
            beta=config.beta,
            kl=kl,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
            num_responses=len(labelled),
            num_desirable=num_desirable,
        )
        if torch.is_grad_enabled():
            loss.backward()
        sums.add(metrics)
    return {**sums.add_ranks().means(1), "reference/z0": kl if math.isnan(kl) else max(0.0, kl)}


@torch.no_grad()
def mean_of_others(policy: Policy, labelled: Sequence[LabelledRow], pad_id: int, limit: MicroBatch) -> float:
    """Mean log-ratio of policy to reference on responses to other prompts, in nats per response: an estimate of the KL."""
    total = 0.0
    ordered = sorted(labelled, key=lambda one: one.other_length)
    for part in own_micro_batches(ordered, limit, lambda one: (1, one.other_length), passes((policy, policy.zero))):
        logprobs = whole_logprobs(policy, [one.asked for one in part], [one.other for one in part], pad_id)
        total += float((logprobs - logprobs.new_tensor([one.ref_other for one in part])).sum())
    ranks.all_well()
    return ranks.total(total) / len(labelled)


def evaluate(learner: PolicyLearner, data: KTOData, config: KTOConfig) -> dict[str, float]:
    """Loss, accuracy and margin of the implicit rewards on held-out responses."""
    labelled = data.held_out
    if not labelled:
        return {}
    with torch.no_grad():
        metrics = learner.room.run(
            lambda limit: accumulate(learner.model, labelled, data.pad_id, config, limit),
            config.micro_batch,
            rows=len(labelled),
        )
    shown = {"eval/accuracy": "reward/accuracy", "eval/margin": "reward/margin", "eval/z0": "reference/z0"}
    found = {name: metrics[metric] for name, metric in shown.items() if metric in metrics}
    return {"eval/loss": metrics["loss/kto"], **found}
