"""Direct preference optimisation: a policy learns from pairs of responses, without a reward model (Rafailov et al. 2023)."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heedful import core
from heedful.checkpoints.save import save_policy
from heedful.checkpoints.source import load_config
from heedful.checkpoints.tokenizer import check_companion, load_tokenizer
from heedful.configs.dpo import DPOConfig
from heedful.configs.options import SamplingOptions
from heedful.data.batch_order import BatchOrder
from heedful.data.chat import Renderer, RewardInputs, plain_text
from heedful.data.collate import collate_padding_behind
from heedful.data.fitting import Counts, max_length
from heedful.data.loading import EncodedPrompt, PairRows, encode_pairs, encode_split, load_split
from heedful.data.micro_batches import in_micro_batches
from heedful.data.schemas import read_rankings
from heedful.errors import CheckpointError, DataError
from heedful.models.context import context_length
from heedful.models.heads import disable_dropout
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
from heedful.train.setup import load_reference, load_trained, prepare, resolve_machine
from heedful.types import Prompt, Ranking

SHOWN = {"loss/dpo": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin"}
SAMPLED_TOKENS = 64
"""Longest response in the table of samples."""


@dataclass(frozen=True)
class Pair:
    """A preference as token ids, and how likely the reference finds both responses."""

    ranking: Ranking
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    ref_chosen: float = math.nan
    """Log-probability of the whole response, in nats."""
    ref_rejected: float = math.nan

    @property
    def length(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def train_dpo(config: DPOConfig) -> dict[str, Any]:
    """Train a policy on preference pairs and write a run folder. Returns what summary.json holds.

    The reference's log-probs do not change, so they are computed once, before the first step.

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError while it trains.
    """
    check_output(config)
    generator = seed_everything(config.seed)
    device, dtype = resolve_machine(config)
    tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
    renderer = Renderer(tokenizer)
    context = context_length(load_config(config.model))
    limit = max_length(config.max_length, context)
    train, held_out, counts = encode_split(
        lambda records: encode_preferences(records, renderer, limit, config), load_split(read_rankings, config), config
    )
    check_companion("--reference", config.reference, tokenizer, max(pair.length for pair in train + held_out))
    sampler = BatchOrder(len(train), config.batch_size, config.seed)
    total_steps = config.max_steps or math.ceil(config.epochs * len(train) / config.batch_size)
    policy = load_trained(config, device, dtype)
    disable_dropout(policy)
    is_apart = config.reference is not None or config.reference_device == "cpu"
    reference = load_reference(config, policy) if is_apart else policy
    train, held_out = (with_reference(reference, pairs, renderer.pad_id, config) for pairs in (train, held_out))
    del reference
    prepare(policy, config, base=config.model)
    optimizer = make_optimizer([(policy, config.learning_rate)], config)
    new_tokens = min(SAMPLED_TOKENS, context // 2)
    table = make_sampler(SamplingOptions(max_new_tokens=new_tokens), renderer, policy)
    shown = _shown(held_out or train, config.num_samples, room=context - new_tokens)

    def step(i: int) -> Numbers:
        started = time.perf_counter()
        learning_rate = set_learning_rate(optimizer, lr_factor(i, total_steps=total_steps, options=config))
        metrics = accumulate(policy, [train[row] for row in next(sampler)], renderer.pad_id, config)
        grad_norm = optimizer_step(optimizer, [policy], config.max_grad_norm)
        return {
            **metrics,
            **step_metrics([grad_norm]),
            "optimizer/learning_rate": learning_rate,
            "time/update": time.perf_counter() - started,
        }

    def samples() -> list[dict[str, Any]]:
        if not shown:
            return []
        prompts = [EncodedPrompt(Prompt(pair.ranking.prompt, pair.ranking.source), pair.prompt) for pair in shown]
        _, completions = table.respond(policy, prompts, generator)
        return [
            {
                "prompt": plain_text(pair.ranking.prompt),
                "chosen": pair.ranking.responses[pair.ranking.ranks.index(min(pair.ranking.ranks))],
                "rejected": pair.ranking.responses[pair.ranking.ranks.index(max(pair.ranking.ranks))],
                "response": completion.response,
            }
            for pair, completion in zip(shown, completions, strict=True)
        ]

    trainer = Trainer(
        step=step,
        save=lambda folder: save_policy(policy, tokenizer, folder, stop_ids=table.stop_ids),
        evaluate=(lambda: evaluate_pairs(policy, held_out, renderer.pad_id, config)) if held_out else None,
        samples=samples,
        objective="eval/loss",
        higher_is_better=False,
    )
    return run(
        trainer,
        config,
        algorithm="dpo",
        total_steps=total_steps,
        shown=SHOWN,
        parents=[config.model, *([config.reference] if config.reference else [])],
        facts={"data": counts},
    )


def encode_preferences(
    rankings: Sequence[Ranking], renderer: Renderer, limit: int, config: DPOConfig
) -> tuple[list[Pair], Counts]:
    """Pairs as token ids, too long and equal ones treated as `encode_pairs` does.

    Raises DataError, also for an empty prompt, and CheckpointError for an encoder's tokenizer.
    """
    inputs = RewardInputs(renderer.tokenizer)
    if inputs.renderer is None:
        raise CheckpointError("the model's tokenizer has CLS and SEP tokens: it reads pairs of texts and writes none")
    rows, counts = encode_pairs(
        rankings, inputs, max_length=limit, action=config.too_long, equal_pairs=config.equal_pairs
    )
    return [_split(row, renderer) for row in rows], counts


def _split(row: PairRows, renderer: Renderer) -> Pair:
    prompt = renderer.prompt_ids(row.ranking.prompt)
    if not prompt:
        raise DataError(
            f"{row.ranking.source}: the prompt is empty and the model has no BOS, so a response's first token follows "
            "nothing. DPO needs prompts; `heedful reward` compares whole texts"
        )
    chosen, rejected = (side["input_ids"][len(prompt) :] for side in (row.chosen, row.rejected))
    return Pair(row.ranking, prompt, chosen, rejected)


def _shown(pairs: Sequence[Pair], number: int, *, room: int) -> list[Pair]:
    """The first pairs of different prompts whose prompt leaves the table's responses their place in the context."""
    by_prompt = {pair.ranking.prompt: pair for pair in pairs if len(pair.prompt) <= room}
    return list(by_prompt.values())[:number]


def with_reference(reference: Policy, pairs: Sequence[Pair], pad_id: int, config: DPOConfig) -> list[Pair]:
    """The pairs, in their order, with the reference's log-probs; the longest first, so memory runs out at once or never."""
    order = sorted(range(len(pairs)), key=lambda i: pairs[i].length, reverse=True)
    done: dict[int, Pair] = {}
    for part in in_micro_batches(order, config.micro_batch.of_pairs, lambda i: (2, pairs[i].length)):
        with torch.no_grad():
            chosen, rejected = response_logprobs(reference, [pairs[i] for i in part], pad_id)
        for i, ref_chosen, ref_rejected in zip(part, chosen.tolist(), rejected.tolist(), strict=True):
            pair = pairs[i]
            done[i] = Pair(pair.ranking, pair.prompt, pair.chosen, pair.rejected, ref_chosen, ref_rejected)
    return [done[i] for i in range(len(pairs))]


def response_logprobs(policy: Policy, pairs: Sequence[Pair], pad_id: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the chosen and of the rejected responses, summed over their tokens, ``[pairs]``."""
    batch = collate_padding_behind(
        [pair.prompt for _ in range(2) for pair in pairs],
        [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)],
        pad_id=pad_id,
    ).to(policy.device)
    logprobs = policy(batch.ids, batch.attention_mask, batch.response_mask).logprobs
    whole = torch.where(batch.response_mask, logprobs, 0.0).sum(dim=1)
    return whole[: len(pairs)], whole[len(pairs) :]


def accumulate(policy: Policy, pairs: Sequence[Pair], pad_id: int, config: DPOConfig) -> dict[str, float]:
    """Gradients of the DPO loss over a step's pairs, a micro-batch at a time, and its metrics.

    Every micro-batch is divided by the step's number of pairs, so their size does not change the gradient.
    """
    ordered = sorted(pairs, key=lambda pair: pair.length)
    sums = MetricSums()
    for part in in_micro_batches(ordered, config.micro_batch.of_pairs, lambda pair: (2, pair.length)):
        chosen, rejected = response_logprobs(policy, part, pad_id)
        loss, metrics = core.dpo_loss(
            chosen,
            rejected,
            chosen.new_tensor([pair.ref_chosen for pair in part]),
            chosen.new_tensor([pair.ref_rejected for pair in part]),
            beta=config.beta,
            kind=config.loss,
            label_smoothing=config.label_smoothing,
            num_pairs=len(ordered),
        )
        if torch.is_grad_enabled():
            loss.backward()
        sums.add(metrics)
    return sums.means(1)


def evaluate_pairs(policy: Policy, pairs: Sequence[Pair], pad_id: int, config: DPOConfig) -> Numbers:
    """Loss, accuracy and margin of the implicit rewards on held-out pairs."""
    with torch.no_grad():
        metrics = accumulate(policy, pairs, pad_id, config)
    return {
        "eval/loss": metrics["loss/dpo"],
        "eval/accuracy": metrics["reward/accuracy"],
        "eval/margin": metrics["reward/margin"],
    }
