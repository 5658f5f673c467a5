"""KTO: train a policy on single responses labelled good or bad, without pairs (Ethayarajh et al. 2024)."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch

from heedful import core
from heedful.algorithms.offline import (
    EachRecord,
    PolicyLearner,
    TrainingData,
    batches_of,
    fit,
    load,
    loaded_run_of,
    read_once,
    reference_of,
    sample_rows,
    set_up,
    shown_of,
    token_rows,
    whole_logprobs,
)
from heedful.checks import arithmetic
from heedful.checks.preflight import Examine, refuse_unfit
from heedful.configs.offline import KTOConfig
from heedful.core.masking import rightness
from heedful.data.batches import AdaptiveMicroBatch, own_micro_batches
from heedful.data.chat import Renderer
from heedful.data.fitting import Counts, Refusal, max_length
from heedful.data.learned import remember
from heedful.data.loading import Example, encode_responses, encode_split, load_split
from heedful.data.schemas import read_labelled
from heedful.data.splits import prompt_key
from heedful.devices import upload
from heedful.distributed import ranks
from heedful.distributed.sharding import lockstep_forwards
from heedful.errors import DataError
from heedful.models.heads import disable_dropout
from heedful.models.policy import Policy
from heedful.models.shape import context_length
from heedful.models.source import load_config
from heedful.models.tokenizer import check_companion
from heedful.training.from_python import Objects, spill_to_files
from heedful.training.metric_sums import MetricSums
from heedful.training.result import TrainingResult
from heedful.training.thresholds import UNBALANCED
from heedful.training.verdict import Yardstick
from heedful.types import Labelled, MicroBatch, plain_response

SHOWN = {"loss/kto": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin", "reference/z0": "z0"}


@dataclass(frozen=True)
class LabelledRow:
    """A labelled response as token ids, with the reference's log-probs."""

    record: Labelled
    asked: list[int]
    """The prompt alone, as for sampling."""
    example: Example
    """The prompt, without a token that also contains the response's beginning, and the response."""
    other: Example
    """``asked`` with a response to another prompt, for the estimate of the KL to the reference."""
    ref: float = math.nan
    """The reference's log-prob of the whole response, in nats."""
    ref_other: float = math.nan
    """The reference's log-prob of ``other`` after ``asked``, in nats."""

    @property
    def read_by_reference(self) -> tuple[Example, float]:
        """A response, and the reference's log-prob of it."""
        return self.example, self.ref

    @property
    def source(self) -> str:
        return self.record.source

    @property
    def num_tokens(self) -> int:
        return self.example.num_tokens

    @property
    def length(self) -> int:
        return self.example.length


def train_kto(config: KTOConfig, **objects: Unpack[Objects]) -> TrainingResult:
    """Train a policy on labelled responses and write a run folder.

    The reference's log-probs do not change, so they are computed once, before the first step.

    Args:
        config: the settings.
        objects: models and data in memory, and functions to call (`Objects`).

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError during training.
    """
    with spill_to_files(config, KTOConfig, **objects) as (settings, callbacks):
        learner, data = start(settings)
        return fit(
            settings,
            learner,
            data,
            learn=lambda labelled: learn(learner, labelled, settings),
            evaluate=lambda limit, each: evaluate_labelled(
                learner.model, data.held_out, learner.pad_id, settings, limit, each=each
            ),
            samples=lambda: sample_rows(learner, data),
            shown=SHOWN,
            callbacks=callbacks,
            yardstick=Yardstick(
                "eval/accuracy", higher_is_better=True, prompts=[prompt_key(one.record.prompt) for one in data.held_out]
            ),
        )


def start(config: KTOConfig, examine: Examine = refuse_unfit) -> tuple[PolicyLearner, TrainingData[LabelledRow]]:
    """Load and check everything, have it examined, and compute the reference's log-probs. Nothing is written."""
    setup = set_up(config)
    renderer = Renderer(setup.tokenizer, config.special_tokens)
    limit = max_length(config.max_length, context_length(load_config(setup.source)))
    split = load_split(read_labelled, config)
    train, held_out, counts = encode_split(
        lambda records, refused: encode_labelled(records, renderer, limit, config, refused),
        split,
        config,
        renderer,
    )
    check_labels(train, config.data)
    train, held_out, counts = _with_others(train, held_out, counts, limit, config.seed)
    longest = max(max(one.length, one.other.length) for one in train + held_out)
    check_companion("--reference", config.reference, setup.source, setup.tokenizer, longest, options=config)
    batches = batches_of(config, len(train), len(held_out), "response")
    texts = ((one.source, ids) for one in train + held_out for ids in (one.example.prompt, one.example.response))
    policy = load(config, setup, longest, texts)
    disable_dropout(policy)
    rows = [row for one in train for row in token_rows([one.example], "good" if one.record.label else "bad")]
    examine(loaded_run_of(config, setup, policy, renderer, rows=rows, split=split, counts=counts))
    remember(setup.tokenizer, (one.prompt for one in split[0]))
    reference = reference_of(config, setup, policy)
    train, held_out = (
        with_reference(reference, labelled, renderer.pad_id, config.micro_batch, setup.adaptive)
        for labelled in (train, held_out)
    )
    del reference
    learner = PolicyLearner(config, setup, policy, batches, renderer)
    shown = shown_of(
        (one.record for one in held_out or train),
        learner,
        config.num_samples,
        lambda record: {"good" if record.label else "bad": plain_response(record.response)},
    )
    good = sum(one.record.label for one in train)
    unbalanced = arithmetic.label_balance(config, good, len(train) - good, times=UNBALANCED)
    return learner, TrainingData(
        train,
        held_out,
        {"data": counts},
        shown,
        notes_of(train, config),
        findings=[] if unbalanced is None else [unbalanced],
    )


def _with_others(
    train: list[LabelledRow], held_out: list[LabelledRow], counts: Counts, limit: int, seed: int
) -> tuple[list[LabelledRow], list[LabelledRow], Counts]:
    """Add to both parts responses to other prompts from the training part; returns them and the counts."""
    good = sum(one.record.label for one in train)
    of_pairs = sum(one.record.of_a_pair for one in train + held_out)
    learned, cut = with_others(train, train, limit, seed)
    measured, cut_held_out = with_others(held_out, train, limit, seed)
    added = {"of_pairs": of_pairs, "cut_for_kl": cut + cut_held_out}
    counts = {**counts, "good": good, "bad": len(train) - good, **{name: n for name, n in added.items() if n}}
    return learned, measured, counts


def notes_of(train: Sequence[LabelledRow], config: KTOConfig) -> list[str]:
    """Notes on the records before the first step: pairs split into two records, imbalanced labels."""
    notes = []
    if any(one.record.of_a_pair for one in train):
        notes.append("each pair counts as a good and a bad response; heedful dpo trains on the pairs themselves")
    good = sum(one.record.label for one in train)
    unbalanced = arithmetic.label_balance(config, good, len(train) - good)
    if unbalanced is not None:
        notes.append(f"{unbalanced.what}: {unbalanced.fix}")
    return notes


def learn(learner: PolicyLearner, labelled: Sequence[LabelledRow], config: KTOConfig) -> dict[str, float]:
    """One optimizer step on some responses. Returns its metrics."""
    return learner.learn(
        labelled, lambda limit: accumulate(learner.model, labelled, learner.pad_id, config, limit), config.micro_batch
    )


def accumulate(
    policy: Policy,
    labelled: Sequence[LabelledRow],
    pad_id: int,
    config: KTOConfig,
    limit: MicroBatch | None = None,
    *,
    each: EachRecord | None = None,
) -> dict[str, float]:
    """Accumulate gradients of the KTO loss over a step's responses in micro-batches; returns its metrics.

    The KL is estimated first, on the step's prompts with responses to other prompts. The loss is divided by counts of
    the step, so the micro-batch size does not change the gradient. ``limit`` is the config's by default. ``each`` gets
    every response's own accuracy.
    """
    limit = limit or config.micro_batch
    kl = mean_of_others(policy, labelled, pad_id, limit)
    num_desirable = sum(one.record.label for one in labelled)
    sums = MetricSums()
    ordered, step = sorted(labelled, key=lambda one: one.length), lockstep_forwards((policy, policy.dummy_loss))
    for part in own_micro_batches(ordered, limit, lambda one: (1, one.length), step):
        logprobs = whole_logprobs(policy, [one.example for one in part], pad_id)
        references = upload(torch.tensor([one.ref for one in part], dtype=logprobs.dtype), logprobs.device)
        desirable = upload(torch.tensor([one.record.label for one in part]), logprobs.device)
        loss, metrics = core.kto_loss(
            logprobs,
            references,
            desirable,
            beta=config.beta,
            kl=kl,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
            num_responses=len(labelled),
            num_desirable=num_desirable,
        )
        if torch.is_grad_enabled():
            loss.backward()
        if each is not None:
            gain = logprobs - references - max(0.0, kl)
            each.add(part, rightness(torch.where(desirable, gain, -gain)))
        sums.add(metrics)
    return {**sums.add_ranks().means(1), "reference/z0": kl if math.isnan(kl) else max(0.0, kl)}


@torch.no_grad()
def mean_of_others(policy: Policy, labelled: Sequence[LabelledRow], pad_id: int, limit: MicroBatch) -> float:
    """KL estimate: mean log-ratio of policy to reference on responses to other prompts, in nats per response."""
    total = 0.0
    ordered = sorted(labelled, key=lambda one: one.other.length)
    for part in own_micro_batches(
        ordered, limit, lambda one: (1, one.other.length), lockstep_forwards((policy, policy.dummy_loss))
    ):
        logprobs = whole_logprobs(policy, [one.other for one in part], pad_id)
        references = torch.tensor([one.ref_other for one in part], dtype=logprobs.dtype)
        total += float((logprobs - upload(references, logprobs.device)).sum())
    ranks.raise_peer_errors()
    return ranks.total(total) / len(labelled)


def evaluate_labelled(
    policy: Policy,
    labelled: Sequence[LabelledRow],
    pad_id: int,
    config: KTOConfig,
    limit: MicroBatch,
    *,
    each: EachRecord | None = None,
) -> dict[str, float]:
    """Loss, accuracy and margin of the implicit rewards on held-out responses."""
    metrics = accumulate(policy, labelled, pad_id, config, limit, each=each)
    names = {"loss/kto": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin", "reference/z0": "z0"}
    return {f"eval/{name}": metrics[metric] for metric, name in names.items() if metric in metrics}


# Labelled responses as token ids, each with a response to another prompt -----------------------------------------------


def encode_labelled(
    records: Sequence[Labelled], renderer: Renderer, limit: int, config: KTOConfig, refused: list[Refusal] | None = None
) -> tuple[list[LabelledRow], Counts]:
    """Encode labelled responses, ``other`` still empty. Too long ones are handled as by `encode_responses`.

    Raises DataError and CheckpointError.
    """
    kept, counts = encode_responses(
        records, renderer, max_length=limit, action=config.too_long, what="labelled responses", refused=refused
    )
    asked = (renderer.prompt_ids(record.prompt, record.prefill) for record, _ in kept)
    rows = [
        LabelledRow(record, ids, example, Example(ids, [])) for ids, (record, example) in zip(asked, kept, strict=True)
    ]
    return rows, counts


def check_labels(labelled: Sequence[LabelledRow], path: str) -> None:
    """Raises DataError if all records have the same label or the same prompt: KTO cannot learn from them."""
    labels = {one.record.label for one in labelled}
    if len(labels) == 1:
        found, missing = ("true", "bad") if labels == {True} else ("false", "good")
        instead = "; `heedful sft` trains on good ones only" if labels == {True} else ""
        raise DataError(
            f"{path}: `label` is {found} in all {len(labelled)} training records, but KTO needs both: add "
            f"{missing} responses{instead}"
        )
    if len({tuple(one.asked) for one in labelled}) == 1:
        raise DataError(
            f"{path}: all {len(labelled)} training records have the same prompt, but KTO estimates the KL to the "
            "reference on responses to other prompts; add records with other prompts"
        )


def with_others(
    labelled: Sequence[LabelledRow], pool: Sequence[LabelledRow], limit: int, seed: int
) -> tuple[list[LabelledRow], int]:
    """Assign each record a response from ``pool`` to another prompt; counts those cut to fit ``limit`` tokens.

    Drawn once per run, so that the reference reads them only once. ``pool`` has at least two prompts.
    """
    draws, done = random.Random(f"{seed}: responses to other prompts"), []
    by_prompt = sorted(pool, key=lambda other: other.asked)
    sizes, first = Counter(tuple(other.asked) for other in by_prompt), dict[tuple[int, ...], int]()
    for place, other in enumerate(by_prompt):
        first.setdefault(tuple(other.asked), place)
    for one in labelled:
        own = sizes[tuple(one.asked)]
        place = draws.randrange(len(pool) - own)
        drawn = by_prompt[place + own if own and place >= first[tuple(one.asked)] else place]
        done.append((one, replace(drawn.example, prompt=one.asked)))
    cut = sum(other.length > limit for _, other in done)
    return [replace(one, other=other.cut(limit)) for one, other in done], cut


def with_reference(
    reference: Policy, labelled: Sequence[LabelledRow], pad_id: int, limit: MicroBatch, adaptive: AdaptiveMicroBatch
) -> list[LabelledRow]:
    """Add the reference's log-probs to the records; keeps their order."""
    examples = [example for one in labelled for example in (one.example, one.other)]

    def read(part: list[int]) -> list[float]:
        return whole_logprobs(reference, [examples[i] for i in part], pad_id).tolist()

    found = read_once(reference, [example.length for example in examples], read, limit, adaptive)
    return [replace(one, ref=found[2 * i], ref_other=found[2 * i + 1]) for i, one in enumerate(labelled)]
