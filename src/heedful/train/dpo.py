"""Direct preference optimisation: a policy learns from pairs of responses, without a reward model (Rafailov et al. 2023).

SimPO and ORPO are other losses of the same trainer. They have no reference, so none is loaded.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heedful import core
from heedful.configs.offline import DPOConfig
from heedful.configs.options import SamplingOptions
from heedful.core.policy_losses import Metrics
from heedful.data.batches import AdaptiveMicroBatch, own_micro_batches
from heedful.data.chat import Renderer, plain_text
from heedful.data.fitting import Counts, max_length
from heedful.data.loading import EncodedPrompt, encode_split, load_split
from heedful.data.schemas import read_rankings
from heedful.data.splits import BatchOrder
from heedful.models.heads import disable_dropout
from heedful.models.policy import Policy
from heedful.models.shape import check_rows, context_length
from heedful.models.source import load_config, resolve
from heedful.models.tokenizer import check_companion, load_chat_tokenizer
from heedful.parallel.sharding import passes
from heedful.planning.memory import Lengths
from heedful.sampling.sampler import Sampler, make_sampler
from heedful.train.fsdp import divide, divides
from heedful.train.learner import PolicyLearner
from heedful.train.memory_preflight import check_memory
from heedful.train.metric_sums import MetricSums
from heedful.train.non_finite import NonFiniteGuard
from heedful.train.optimization import Schedule, make_optimizer, seed_everything
from heedful.train.pairs import EncodedPair, encode_preferences, response_logprobs, with_reference
from heedful.train.run import Run
from heedful.train.setup import check_start, load_reference, load_trained, prepare, resolve_machine
from heedful.types import MicroBatch, Prompt, plain_response

SHOWN = {"loss/dpo": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin"}
SAMPLED_TOKENS = 64
"""Longest response in the table of samples."""


def train_dpo(config: DPOConfig) -> dict[str, Any]:
    """Train a policy on preference pairs and write a run folder. Returns what summary.json holds.

    The reference's log-probs do not change, so they are computed once, before the first step.

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError during training.
    """
    learner, data = start(config)
    with Run(
        config,
        learner,
        "dpo",
        learner.schedule.total_steps,
        objective="eval/loss",
        higher_is_better=False,
        shown=SHOWN,
        parents=[config.model, *([config.reference] if config.reference else [])],
        facts={"data": data.counts},
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
class DPOData:
    """Pairs, with the reference's log-probs if the loss has one, and those whose prompts the table of samples answers."""

    train: list[EncodedPair]
    held_out: list[EncodedPair]
    counts: Counts
    pad_id: int
    shown: list[EncodedPair]
    sampler: Sampler


def start(config: DPOConfig) -> tuple[PolicyLearner, DPOData]:
    """Load everything, check that it fits together, and let the reference read the pairs. Nothing is written."""
    check_start(config)
    generator = seed_everything(config.seed)
    device, dtype = resolve_machine(config)
    source = resolve(config.model, config)
    tokenizer = load_chat_tokenizer(source, config)
    renderer = Renderer(tokenizer, config.special_tokens)
    context = context_length(load_config(source))
    limit = max_length(config.max_length, context)
    train, held_out, counts = encode_split(
        lambda records, refused: encode_preferences(records, renderer, limit, config, refused),
        load_split(read_rankings, config),
        config,
        renderer,
    )
    longest = max(pair.length for pair in train + held_out)
    check_companion("--reference", config.reference, tokenizer, longest, config)
    batches = BatchOrder(len(train), config.batch_size, config.seed)
    total_steps = config.max_steps or math.ceil(config.epochs * len(train) / config.batch_size)
    check_memory(config, Lengths(longest), device, dtype)
    policy = load_trained(config, source, device, dtype)
    texts = ((one.ranking.source, ids) for one in train + held_out for ids in (one.prompt, one.chosen, one.rejected))
    check_rows(policy.lm, tokenizer, texts)
    disable_dropout(policy)
    room = AdaptiveMicroBatch()
    if config.needs_reference:
        is_apart = config.reference is not None or config.reference_device == "cpu" or divides(config)
        reference = load_reference(config, source, policy, device) if is_apart else policy
        divide(config, device, reference)
        train, held_out = (
            with_reference(reference, pairs, renderer.pad_id, config.micro_batch, room) for pairs in (train, held_out)
        )
        del reference
    prepare(policy, config, base=config.model)
    divide(config, device, policy)
    optimizer = make_optimizer([(policy, config.learning_rate)], config)
    new_tokens = min(SAMPLED_TOKENS, context // 2)
    sampler = make_sampler(
        SamplingOptions(max_new_tokens=new_tokens), renderer, policy, is_used=config.sample_every > 0
    )
    shown = _shown(held_out or train, config.num_samples, room=context - new_tokens)
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
    return learner, DPOData(train, held_out, counts, renderer.pad_id, shown, sampler)


def learn(learner: PolicyLearner, pairs: Sequence[EncodedPair], pad_id: int, config: DPOConfig) -> dict[str, float]:
    """One optimizer step on some pairs. Returns its metrics."""
    started = time.perf_counter()
    metrics = learner.room.run(
        lambda limit: accumulate(learner.model, pairs, pad_id, config, limit),
        config.micro_batch,
        rows=len(pairs),
        undo=learner.clear,
    )
    num_tokens = sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    return learner.update(metrics, started, [pair.ranking.source for pair in pairs], num_tokens=num_tokens)


def sample_rows(learner: PolicyLearner, data: DPOData) -> list[dict[str, Any]]:
    """Rows for the table of samples: pairs, and what the policy answers to their prompts."""
    if not data.shown:
        return []
    prompts = [EncodedPrompt(Prompt(pair.ranking.prompt, pair.ranking.source), pair.prompt) for pair in data.shown]
    _, completions = data.sampler.respond(learner.model, prompts, learner.generator)
    return [
        {
            "prompt": plain_text(pair.ranking.prompt),
            "chosen": plain_response(pair.ranking.responses[pair.ranking.ranks.index(min(pair.ranking.ranks))]),
            "rejected": plain_response(pair.ranking.responses[pair.ranking.ranks.index(max(pair.ranking.ranks))]),
            "response": completion.response,
        }
        for pair, completion in zip(data.shown, completions, strict=True)
    ]


def _shown(pairs: Sequence[EncodedPair], number: int, *, room: int) -> list[EncodedPair]:
    """The first pairs of different prompts that leave the table's responses their room in the context."""
    by_prompt = {pair.ranking.prompt: pair for pair in pairs if len(pair.prompt) <= room}
    return list(by_prompt.values())[:number]


def accumulate(
    policy: Policy, pairs: Sequence[EncodedPair], pad_id: int, config: DPOConfig, limit: MicroBatch | None = None
) -> dict[str, float]:
    """Gradients of the loss over a step's pairs, a micro-batch at a time, and its metrics.

    Every micro-batch is divided by the step's number of pairs (and of chosen tokens), so their size does not change the
    gradient. ``limit`` is the config's unless given.
    """
    ordered = sorted(pairs, key=lambda pair: pair.length)
    num_tokens = sum(len(pair.chosen) for pair in ordered)
    sums = MetricSums()
    limit, step = (limit or config.micro_batch).of_pairs, passes((policy, policy.zero))
    for part in own_micro_batches(ordered, limit, lambda pair: (2, pair.length), step):
        chosen, rejected = response_logprobs(policy, part, pad_id)
        loss, metrics = pair_loss(chosen, rejected, part, config, num_pairs=len(ordered))
        if config.nll_weight:
            all_count = torch.ones_like(chosen, dtype=torch.bool)
            nll, _ = core.sft_loss(chosen, all_count, num_tokens=num_tokens)
            loss, metrics = loss + config.nll_weight * nll, {**metrics, "loss/nll": nll.detach()}
        if torch.is_grad_enabled():
            loss.backward()
        sums.add({"loss/dpo": loss.detach(), **metrics})
    return sums.add_ranks().means(1)


def pair_loss(
    chosen: Tensor, rejected: Tensor, pairs: Sequence[EncodedPair], config: DPOConfig, *, num_pairs: int
) -> tuple[Tensor, Metrics]:
    """The loss that ``--loss`` names, and the rewards of its responses.

    Args:
        chosen, rejected: log-probs of the pairs' responses, summed over tokens, ``[pairs]``.
        pairs: what they are of.
        config: the settings.
        num_pairs: the pairs of the whole optimizer step.
    """
    tokens = (
        torch.tensor([len(pair.chosen) for pair in pairs], device=chosen.device),
        torch.tensor([len(pair.rejected) for pair in pairs], device=chosen.device),
    )
    if config.loss == "simpo":
        loss, metrics = core.simpo_loss(
            chosen, rejected, *tokens, beta=config.strength, target_margin=config.target_margin, num_pairs=num_pairs
        )
    elif config.loss == "orpo":
        loss, metrics = core.orpo_loss(chosen, rejected, *tokens, beta=config.strength, num_pairs=num_pairs)
    else:
        loss, metrics = core.dpo_loss(
            chosen,
            rejected,
            chosen.new_tensor([pair.ref_chosen for pair in pairs]),
            chosen.new_tensor([pair.ref_rejected for pair in pairs]),
            beta=config.strength,
            kind="ipo" if config.loss == "ipo-sum" else config.loss,
            label_smoothing=config.label_smoothing,
            chosen_tokens=tokens[0] if config.is_per_token else None,
            rejected_tokens=tokens[1] if config.is_per_token else None,
            num_pairs=num_pairs,
        )
    return loss, {name: value for name, value in metrics.items() if not name.startswith("loss/")}


def evaluate(learner: PolicyLearner, data: DPOData, config: DPOConfig) -> dict[str, float]:
    """Loss, accuracy and margin of the implicit rewards on held-out pairs."""
    pairs = data.held_out
    if not pairs:
        return {}
    with torch.no_grad():
        metrics = learner.room.run(
            lambda limit: accumulate(learner.model, pairs, data.pad_id, config, limit),
            config.micro_batch,
            rows=len(pairs),
        )
    of_nll = {"eval/nll": metrics["loss/nll"]} if config.nll_weight else {}
    return {
        "eval/loss": metrics["loss/dpo"],
        **of_nll,
        "eval/accuracy": metrics["reward/accuracy"],
        "eval/margin": metrics["reward/margin"],
    }
