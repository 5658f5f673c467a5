"""Supervised fine-tuning: maximise the likelihood of demonstrations."""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heedful import core
from heedful.configs.offline import SFTConfig
from heedful.configs.options import SamplingOptions
from heedful.data.batches import AdaptiveMicroBatch, collate_padding_behind, own_micro_batches
from heedful.data.chat import Renderer, plain_text
from heedful.data.fitting import Counts, max_length
from heedful.data.loading import EncodedPrompt, Example, encode_demonstrations, encode_split, load_split, read_to_learn
from heedful.data.splits import BatchOrder
from heedful.errors import RefusedError
from heedful.models.policy import Policy
from heedful.models.shape import check_rows, context_length
from heedful.models.source import load_config, resolve
from heedful.models.tokenizer import load_chat_tokenizer
from heedful.parallel.ranks import own_random_numbers
from heedful.parallel.sharding import passes
from heedful.planning.memory import Lengths
from heedful.sampling.sampler import Sampler, make_sampler
from heedful.train.fsdp import divide
from heedful.train.learner import PolicyLearner
from heedful.train.memory_preflight import check_memory
from heedful.train.metric_sums import MetricSums
from heedful.train.non_finite import NonFiniteGuard
from heedful.train.optimization import Schedule, make_optimizer, seed_everything
from heedful.train.run import Run
from heedful.train.setup import check_start, load_trained, prepare, resolve_machine
from heedful.types import Demonstration, MicroBatch, Prompt, plain_response

SHOWN = {"loss/sft": "loss", "optimizer/learning_rate": "lr", "perf/tokens_per_second": "tokens/s"}
SAMPLED_TOKENS = 64
"""Longest response in the table of samples."""


def train_sft(config: SFTConfig) -> dict[str, Any]:
    """Fine-tune a language model on demonstrations and write a run folder. Returns what summary.json holds.

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError during training.
    """
    learner, data = start(config)
    with Run(
        config,
        learner,
        "sft",
        learner.schedule.total_steps,
        objective="eval/loss",
        higher_is_better=False,
        shown=SHOWN,
        parents=[config.model],
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
class SFTData:
    """Demonstrations as token ids, and those whose prompts the table of samples answers."""

    train: list[Example]
    held_out: list[Example]
    counts: Counts
    pad_id: int
    shown: list[Demonstration]
    prompts: list[EncodedPrompt]
    """Of the demonstrations in ``shown``."""
    sampler: Sampler


def start(config: SFTConfig) -> tuple[PolicyLearner, SFTData]:
    """Load everything and check that it fits together. Nothing is written."""
    check_start(config)
    generator = seed_everything(config.seed)
    device, dtype = resolve_machine(config)
    source = resolve(config.model, config)
    tokenizer = load_chat_tokenizer(source, config)
    renderer = Renderer(tokenizer, config.special_tokens)
    context = context_length(load_config(source))
    limit = max_length(config.max_length, context)
    split = load_split(read_to_learn(config.loss_on), config)
    train, held_out, counts = encode_split(
        lambda records, refused: encode_demonstrations(
            records,
            renderer,
            max_length=limit,
            action=config.too_long,
            learn_prompt=config.loss_on == "all",
            refused=refused,
        ),
        split,
        config,
        renderer,
    )
    batches = BatchOrder(len(train), config.batch_size, config.seed)
    total_steps = config.max_steps or math.ceil(config.epochs * len(train) / config.batch_size)
    check_memory(config, Lengths(max(example.length for example in train + held_out)), device, dtype)
    policy = load_trained(config, source, device, dtype)
    texts = ((one.source, ids) for one in train + held_out for ids in (one.prompt, one.response))
    check_rows(policy.lm, tokenizer, texts)
    prepare(policy, config, base=config.model, dropout=config.lora_dropout)
    divide(config, device, policy)
    optimizer = make_optimizer([(policy, config.learning_rate)], config)
    new_tokens = min(SAMPLED_TOKENS, context // 2)
    sampler = make_sampler(
        SamplingOptions(max_new_tokens=new_tokens), renderer, policy, is_used=config.sample_every > 0
    )
    shown = _shown(split[1] or split[0], renderer, config.num_samples, room=context - new_tokens)
    learner = PolicyLearner(
        model=policy,
        tokenizer=tokenizer,
        optimizer=optimizer,
        schedule=Schedule(optimizer, total_steps, config),
        batches=batches,
        generator=generator,
        max_grad_norm=config.max_grad_norm,
        skips=NonFiniteGuard(config.output),
        room=AdaptiveMicroBatch(),
        stop_ids=sampler.stop_ids,
    )
    prompts = [EncodedPrompt(Prompt(d.prompt, d.source), renderer.prompt_ids(d.prompt)) for d in shown]
    return learner, SFTData(train, held_out, counts, renderer.pad_id, shown, prompts, sampler)


def learn(learner: PolicyLearner, examples: Sequence[Example], pad_id: int, config: SFTConfig) -> dict[str, float]:
    """One optimizer step on some examples. Returns its metrics."""
    started = time.perf_counter()
    learner.model.train()
    with own_random_numbers():  # of dropout
        metrics = learner.room.run(
            lambda limit: accumulate(learner.model, examples, pad_id, limit),
            config.micro_batch,
            rows=len(examples),
            undo=learner.clear,
        )
    sources = [example.source for example in examples]
    return learner.update({"loss/sft": metrics["loss/sft"]}, started, sources, num_tokens=metrics["tokens"])


def sample_rows(learner: PolicyLearner, data: SFTData) -> list[dict[str, Any]]:
    """Rows for the table of samples: demonstrations, and what the policy answers to their prompts."""
    if not data.shown:
        return []
    _, completions = data.sampler.respond(learner.model, data.prompts, learner.generator)
    return [
        {
            "prompt": plain_text(record.prompt),
            "demonstration": plain_response(record.response),
            "response": completion.response,
        }
        for record, completion in zip(data.shown, completions, strict=True)
    ]


def _shown(records: Sequence[Demonstration], renderer: Renderer, number: int, *, room: int) -> list[Demonstration]:
    """The first records of different prompts that leave the table's responses their room in the context."""
    by_prompt = {record.prompt: record for record in records if record.prompt}

    def fits(record: Demonstration) -> bool:
        try:
            return len(renderer.prompt_ids(record.prompt)) <= room
        except RefusedError:  # it was dropped
            return False

    return list(itertools.islice(filter(fits, by_prompt.values()), number))


def accumulate(policy: Policy, examples: Sequence[Example], pad_id: int, micro_batch: MicroBatch) -> dict[str, float]:
    """Gradients of the SFT loss over a step's examples, a micro-batch at a time, and its metrics.

    Every micro-batch is divided by the step's token count, so their size does not change the gradient. Rows are taken in
    the order of their lengths, to pad less.
    """
    ordered = sorted(examples, key=lambda example: example.length)
    num_tokens = sum(len(example.response) for example in ordered)
    sums = MetricSums()
    for part in own_micro_batches(
        ordered, micro_batch, lambda example: (1, example.length), passes((policy, policy.zero))
    ):
        batch = collate_padding_behind([e.prompt for e in part], [e.response for e in part], pad_id=pad_id).to(
            policy.device
        )
        outputs = policy(batch.ids, batch.attention_mask, batch.response_mask)
        loss, metrics = core.sft_loss(outputs.logprobs, batch.response_mask, num_tokens=num_tokens)
        if torch.is_grad_enabled():
            loss.backward()
        sums.add(metrics)
    return {**sums.add_ranks().means(1), "tokens": float(num_tokens)}


def evaluate(learner: PolicyLearner, data: SFTData, config: SFTConfig) -> dict[str, float]:
    """`evaluate_loss` on what is held out, as many rows at a time as memory has room for."""
    return learner.room.run(
        lambda limit: evaluate_loss(learner.model, data.held_out, data.pad_id, limit),
        config.micro_batch,
        rows=len(data.held_out),
    )


def evaluate_loss(
    policy: Policy, examples: Sequence[Example], pad_id: int, micro_batch: MicroBatch
) -> dict[str, float]:
    """Mean negative log-likelihood per token of held-out demonstrations, and its exponential, the perplexity."""
    if not examples:
        return {}
    policy.eval()
    with torch.no_grad():
        loss = accumulate(policy, examples, pad_id, micro_batch)["loss/sft"]
    return {"eval/loss": loss, "eval/perplexity": math.exp(loss) if loss < 700 else math.inf}
