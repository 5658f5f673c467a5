"""Direct preference optimisation: a policy learns from pairs of responses, without a reward model (Rafailov et al. 2023).

SimPO and ORPO are other losses of the same trainer. They have no reference, so none is loaded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful import core
from heedful.configs.offline import DPOConfig
from heedful.core.policy_losses import Metrics
from heedful.data.batches import own_micro_batches
from heedful.data.chat import Renderer
from heedful.data.fitting import max_length
from heedful.data.loading import encode_split, load_split
from heedful.data.schemas import read_rankings
from heedful.data.splits import BatchOrder
from heedful.models.heads import disable_dropout
from heedful.models.policy import Policy
from heedful.models.shape import context_length
from heedful.models.source import load_config
from heedful.models.tokenizer import check_companion
from heedful.parallel.sharding import passes
from heedful.train.metric_sums import MetricSums
from heedful.train.offline import PolicyData, PolicyLearner, fit, load, reference_of, sample_rows, set_up, shown_of
from heedful.train.pairs import EncodedPair, encode_preferences, response_logprobs, with_reference
from heedful.types import MicroBatch, plain_response

SHOWN = {"loss/dpo": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin"}


def train_dpo(config: DPOConfig) -> dict[str, Any]:
    """Train a policy on preference pairs and write a run folder. Returns what summary.json holds.

    The reference's log-probs do not change, so they are computed once, before the first step.

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError during training.
    """
    learner, data = start(config)
    return fit(
        config,
        learner,
        data.train,
        data.held_out,
        "dpo",
        learn=lambda pairs: learn(learner, pairs, data.pad_id, config),
        evaluate=lambda limit: evaluate_pairs(learner.model, data.held_out, data.pad_id, config, limit),
        samples=lambda: sample_rows(learner, data),
        shown=SHOWN,
        facts={"data": data.counts},
    )


def start(config: DPOConfig) -> tuple[PolicyLearner, PolicyData[EncodedPair]]:
    """Load everything, check that it fits together, and let the reference read the pairs. Nothing is written."""
    setup = set_up(config)
    renderer = Renderer(setup.tokenizer, config.special_tokens)
    limit = max_length(config.max_length, context_length(load_config(setup.source)))
    train, held_out, counts = encode_split(
        lambda records, refused: encode_preferences(records, renderer, limit, config, refused),
        load_split(read_rankings, config),
        config,
        renderer,
    )
    longest = max(pair.length for pair in train + held_out)
    check_companion("--reference", config.reference, setup.tokenizer, longest, config)
    batches = BatchOrder(len(train), config.batch_size, config.seed)
    texts = ((pair.source, ids) for pair in train + held_out for ids in (pair.prompt, pair.chosen, pair.rejected))
    policy = load(config, setup, longest, texts)
    disable_dropout(policy)
    if config.needs_reference:
        reference = reference_of(config, setup, policy)
        train, held_out = (
            with_reference(reference, pairs, renderer.pad_id, config.micro_batch, setup.adaptive)
            for pairs in (train, held_out)
        )
        del reference
    learner = PolicyLearner(config, setup, policy, batches, renderer)
    shown = shown_of(
        (pair.ranking for pair in held_out or train),
        learner,
        config.num_samples,
        lambda ranking: dict(zip(("chosen", "rejected"), map(plain_response, ranking.responses), strict=True)),
    )
    return learner, PolicyData(train, held_out, counts, renderer.pad_id, shown)


def learn(learner: PolicyLearner, pairs: Sequence[EncodedPair], pad_id: int, config: DPOConfig) -> dict[str, float]:
    """One optimizer step on some pairs. Returns its metrics."""
    return learner.learn(
        pairs, lambda limit: accumulate(learner.model, pairs, pad_id, config, limit), config.micro_batch
    )


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


def evaluate_pairs(
    policy: Policy, pairs: Sequence[EncodedPair], pad_id: int, config: DPOConfig, limit: MicroBatch
) -> dict[str, float]:
    """Loss, accuracy and margin of the implicit rewards on held-out pairs; with an NLL term, that too."""
    metrics = accumulate(policy, pairs, pad_id, config, limit)
    names = {"loss/dpo": "loss", "loss/nll": "nll", "reward/accuracy": "accuracy", "reward/margin": "margin"}
    return {f"eval/{name}": metrics[metric] for metric, name in names.items() if metric in metrics}
