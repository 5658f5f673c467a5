"""Supervised fine-tuning: maximise the likelihood of demonstrations."""

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from heedful import core
from heedful.checkpoints.save import save_policy
from heedful.checkpoints.source import load_config
from heedful.checkpoints.tokenizer import load_tokenizer
from heedful.configs.options import SamplingOptions
from heedful.configs.sft import SFTConfig
from heedful.data.batch_order import BatchOrder
from heedful.data.chat import Renderer, plain_text
from heedful.data.collate import collate_padding_behind
from heedful.data.fitting import max_length
from heedful.data.loading import EncodedPrompt, Example, encode_demonstrations, encode_split, load_split
from heedful.data.micro_batches import in_micro_batches
from heedful.data.schemas import read_demonstrations
from heedful.models.context import context_length
from heedful.models.policy import Policy
from heedful.sampling.sampler import make_sampler
from heedful.train.loop import Numbers, Trainer, run
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
from heedful.train.setup import load_trained, prepare, resolve_machine
from heedful.types import Demonstration, MicroBatch, Prompt

SHOWN = {"loss/sft": "loss", "optimizer/learning_rate": "lr", "perf/tokens_per_second": "tokens/s"}
SAMPLED_TOKENS = 64
"""Longest response in the table of samples."""


def train_sft(config: SFTConfig) -> dict[str, Any]:
    """Fine-tune a language model on demonstrations and write a run folder. Returns what summary.json holds.

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError while it trains.
    """
    check_output(config)
    generator = seed_everything(config.seed)
    device, dtype = resolve_machine(config)
    tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
    renderer = Renderer(tokenizer)
    context = context_length(load_config(config.model))
    limit = max_length(config.max_length, context)
    split = load_split(read_demonstrations, config)
    train, held_out, counts = encode_split(
        lambda records: encode_demonstrations(
            records, renderer, max_length=limit, action=config.too_long, learn_prompt=config.loss_on == "all"
        ),
        split,
        config,
    )
    sampler = BatchOrder(len(train), config.batch_size, config.seed)
    total_steps = config.max_steps or math.ceil(config.epochs * len(train) / config.batch_size)
    policy = load_trained(config, device, dtype)
    prepare(policy, config, base=config.model, dropout=config.lora_dropout)
    optimizer = make_optimizer([(policy, config.learning_rate)], config)
    new_tokens = min(SAMPLED_TOKENS, context // 2)
    table = make_sampler(SamplingOptions(max_new_tokens=new_tokens), renderer, policy)
    shown = _shown(split[1] or split[0], renderer, config.num_samples, room=context - new_tokens)
    prompts = [EncodedPrompt(Prompt(d.prompt, d.source), renderer.prompt_ids(d.prompt)) for d in shown]

    def step(i: int) -> Numbers:
        started = time.perf_counter()
        learning_rate = set_learning_rate(optimizer, lr_factor(i, total_steps=total_steps, options=config))
        policy.train()
        metrics = accumulate(policy, [train[row] for row in next(sampler)], renderer.pad_id, config.micro_batch)
        grad_norm = optimizer_step(optimizer, [policy], config.max_grad_norm)
        seconds = time.perf_counter() - started
        return {
            "loss/sft": metrics["loss/sft"],
            **step_metrics([grad_norm]),
            "optimizer/learning_rate": learning_rate,
            "time/update": seconds,
            "perf/tokens_per_second": metrics["tokens"] / seconds,
        }

    def samples() -> list[dict[str, Any]]:
        if not shown:
            return []
        _, completions = table.respond(policy, prompts, generator)
        return [
            {
                "prompt": plain_text(record.prompt),
                "demonstration": record.response,
                "response": completion.response,
            }
            for record, completion in zip(shown, completions, strict=True)
        ]

    trainer = Trainer(
        step=step,
        save=lambda folder: save_policy(policy, tokenizer, folder, stop_ids=table.stop_ids),
        evaluate=(lambda: evaluate_loss(policy, held_out, renderer.pad_id, config.micro_batch)) if held_out else None,
        samples=samples,
        objective="eval/loss",
        higher_is_better=False,
    )
    return run(
        trainer,
        config,
        algorithm="sft",
        total_steps=total_steps,
        shown=SHOWN,
        parents=[config.model],
        facts={"data": counts},
    )


def _shown(records: Sequence[Demonstration], renderer: Renderer, number: int, *, room: int) -> list[Demonstration]:
    """The first records of different prompts whose prompt leaves the table's responses their place in the context."""
    by_prompt = {record.prompt: record for record in records if record.prompt}
    fitting = (record for record in by_prompt.values() if len(renderer.prompt_ids(record.prompt)) <= room)
    return list(itertools.islice(fitting, number))


def accumulate(policy: Policy, examples: Sequence[Example], pad_id: int, micro_batch: MicroBatch) -> dict[str, float]:
    """Gradients of the SFT loss over a step's examples, a micro-batch at a time, and its metrics.

    Every micro-batch is divided by the step's token count, so their size does not change the gradient. Rows are taken in
    the order of their lengths, to pad less.
    """
    ordered = sorted(examples, key=lambda example: example.length)
    num_tokens = sum(len(example.response) for example in ordered)
    sums = MetricSums()
    for part in in_micro_batches(ordered, micro_batch, lambda example: (1, example.length)):
        batch = collate_padding_behind([e.prompt for e in part], [e.response for e in part], pad_id=pad_id).to(
            policy.device
        )
        outputs = policy(batch.ids, batch.attention_mask, batch.response_mask)
        loss, metrics = core.sft_loss(outputs.logprobs, batch.response_mask, num_tokens=num_tokens)
        if torch.is_grad_enabled():
            loss.backward()
        sums.add(metrics)
    return {**sums.means(1), "tokens": float(num_tokens)}


def evaluate_loss(policy: Policy, examples: Sequence[Example], pad_id: int, micro_batch: MicroBatch) -> Numbers:
    """Mean negative log-likelihood a token of held-out demonstrations, and its exponential, the perplexity."""
    policy.eval()
    with torch.no_grad():
        loss = accumulate(policy, examples, pad_id, micro_batch)["loss/sft"]
    return {"eval/loss": loss, "eval/perplexity": math.exp(loss) if loss < 700 else math.inf}
