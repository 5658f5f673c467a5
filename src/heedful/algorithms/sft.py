"""Supervised fine-tuning: maximise the likelihood of demonstrations."""

import math
from collections.abc import Sequence
from typing import Unpack

import torch

from heedful import core
from heedful.algorithms.offline import (
    EachRecord,
    PolicyLearner,
    TrainingData,
    as_batch,
    batches_of,
    fit,
    load,
    loaded_run_of,
    sample_rows,
    set_up,
    shown_of,
    token_rows,
)
from heedful.checks.preflight import Examine, refuse_unfit
from heedful.configs.offline import SFTConfig
from heedful.data.batches import own_micro_batches
from heedful.data.chat import Renderer
from heedful.data.fitting import max_length
from heedful.data.learned import remember
from heedful.data.loading import Example, encode_demonstrations, encode_split, load_split, read_to_learn
from heedful.distributed.ranks import own_random_numbers
from heedful.distributed.sharding import lockstep_forwards
from heedful.models.policy import Policy
from heedful.models.shape import context_length
from heedful.models.source import load_config
from heedful.training.from_python import Objects, spill_to_files
from heedful.training.metric_sums import MetricSums
from heedful.training.result import TrainingResult
from heedful.training.verdict import Yardstick
from heedful.types import MicroBatch, plain_response

SHOWN = {"loss/sft": "loss", "optimizer/learning_rate": "lr", "perf/tokens_per_second": "tokens/s"}


def train_sft(config: SFTConfig, **objects: Unpack[Objects]) -> TrainingResult:
    """Fine-tune a language model on demonstrations and write a run folder.

    Args:
        config: the settings.
        objects: models and data in memory, and functions to call (`Objects`).

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError during training.
    """
    with spill_to_files(config, SFTConfig, **objects) as (settings, callbacks):
        learner, data = start(settings)
        return fit(
            settings,
            learner,
            data,
            learn=lambda examples: learn(learner, examples, settings),
            evaluate=lambda limit, each: evaluate_loss(learner.model, data.held_out, learner.pad_id, limit, each),
            samples=lambda: sample_rows(learner, data),
            shown=SHOWN,
            callbacks=callbacks,
            yardstick=Yardstick(
                "eval/loss", higher_is_better=False, prompts=[str(one.prompt or one.source) for one in data.held_out]
            ),
        )


def start(config: SFTConfig, examine: Examine = refuse_unfit) -> tuple[PolicyLearner, TrainingData[Example]]:
    """Load and check everything, and have it examined. Nothing is written."""
    setup = set_up(config)
    renderer = Renderer(setup.tokenizer, config.special_tokens)
    limit = max_length(config.max_length, context_length(load_config(setup.source)))
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
    chats = [
        demonstration.prompt for demonstration in (*split[0], *split[1]) if not isinstance(demonstration.prompt, str)
    ]
    if chats:
        counts["multi_turn"] = sum(any(message.role == "assistant" for message in chat) for chat in chats)
    batches = batches_of(config, len(train), len(held_out))
    texts = ((one.source, ids) for one in train + held_out for ids in (one.prompt, one.response))
    policy = load(config, setup, max(example.length for example in train + held_out), texts)
    examine(loaded_run_of(config, setup, policy, renderer, rows=token_rows(train), split=split, counts=counts))
    remember(setup.tokenizer, (one.prompt for one in split[0]))
    learner = PolicyLearner(config, setup, policy, batches, renderer)
    shown = shown_of(
        (demonstration for demonstration in split[1] or split[0] if demonstration.prompt),
        learner,
        config.num_samples,
        lambda demonstration: {"demonstration": plain_response(demonstration.response)},
    )
    return learner, TrainingData(train, held_out, {"data": counts}, shown)


def learn(learner: PolicyLearner, examples: Sequence[Example], config: SFTConfig) -> dict[str, float]:
    """One optimizer step on some examples. Returns its metrics."""
    if not learner.model.training:
        learner.model.train()
    with own_random_numbers():  # of dropout
        return learner.learn(
            examples, lambda limit: accumulate(learner.model, examples, learner.pad_id, limit), config.micro_batch
        )


def accumulate(
    policy: Policy, examples: Sequence[Example], pad_id: int, limit: MicroBatch, each: EachRecord | None = None
) -> dict[str, float]:
    """Accumulate gradients of the SFT loss over a step's examples in micro-batches; returns its metrics.

    The loss is divided by the step's token count, so the micro-batch size does not change the gradient. Rows are
    ordered by length, to pad less. ``each`` gets every example's own loss and number of tokens.
    """
    ordered, step = sorted(examples, key=lambda example: example.length), lockstep_forwards((policy, policy.dummy_loss))
    num_tokens = sum(example.num_tokens for example in ordered)
    sums = MetricSums()
    for part in own_micro_batches(ordered, limit, lambda example: (1, example.length), step):
        batch = as_batch(part, pad_id).to(policy.device)
        outputs = policy(batch.ids, batch.attention_mask, batch.response_mask)
        loss, metrics = core.sft_loss(outputs.logprobs, batch.response_mask, num_tokens=num_tokens)
        if torch.is_grad_enabled():
            loss.backward()
        if each is not None:
            nll = -torch.where(batch.response_mask, outputs.logprobs, 0.0).sum(dim=1)
            each.add(part, nll, [example.num_tokens for example in part])
        sums.add(metrics)
    return sums.add_ranks().means(1)


def evaluate_loss(
    policy: Policy, examples: Sequence[Example], pad_id: int, limit: MicroBatch, each: EachRecord | None = None
) -> dict[str, float]:
    """Mean negative log-likelihood per token of held-out demonstrations, and its exponential, the perplexity."""
    policy.eval()
    with torch.no_grad():
        loss = accumulate(policy, examples, pad_id, limit, each)["loss/sft"]
    return {"eval/loss": loss, "eval/perplexity": math.exp(loss) if loss < 700 else math.inf}
