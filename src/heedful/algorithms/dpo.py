"""Direct preference optimisation: train a policy on pairs of responses, without a reward model (Rafailov et al. 2023).

The same trainer has SimPO and ORPO as losses; they need no reference, so none is loaded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack, cast

import torch
from torch import Tensor

from heedful import core, user_code
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
from heedful.checks.preflight import Examine, refuse_unfit
from heedful.configs.offline import DPOConfig
from heedful.core.masking import rightness
from heedful.core.policy_losses import Metrics
from heedful.data.batches import AdaptiveMicroBatch, own_micro_batches
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.fitting import Counts, Refusal, if_equal, max_length
from heedful.data.learned import remember
from heedful.data.loading import Example, RankingRows, as_example, encode_rankings, encode_split, load_split
from heedful.data.schemas import read_rankings
from heedful.data.splits import item_key
from heedful.devices import upload
from heedful.distributed.sharding import lockstep_forwards
from heedful.errors import CheckpointError, DataError
from heedful.models.heads import disable_dropout
from heedful.models.policy import Policy
from heedful.models.shape import context_length
from heedful.models.source import load_config
from heedful.models.tokenizer import check_companion
from heedful.training.from_python import Objects, spill_to_files
from heedful.training.metric_sums import MetricSums
from heedful.training.result import TrainingResult
from heedful.training.verdict import Yardstick
from heedful.types import MicroBatch, Ranking, Response, plain_response

LOSS = "--loss"
Kind = Literal["sigmoid", "robust", "ipo", "hinge"]
SHOWN = {"loss/dpo": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin"}


@dataclass(frozen=True)
class EncodedPair:
    """A preference pair as token ids, with the reference's log-probs of both responses."""

    ranking: Ranking
    prompt: list[int]
    """The prompt alone, as for sampling. That of an example lacks a token that also has the beginning of its response."""
    chosen: Example
    rejected: Example
    ref_chosen: float = math.nan
    """Log-probability of the whole response, in nats."""
    ref_rejected: float = math.nan

    @property
    def read_by_reference(self) -> tuple[Example, float]:
        """A response, and the reference's log-prob of it."""
        return self.chosen, self.ref_chosen

    @property
    def source(self) -> str:
        return self.ranking.source

    @property
    def num_tokens(self) -> int:
        return self.chosen.num_tokens + self.rejected.num_tokens

    @property
    def length(self) -> int:
        return max(self.chosen.length, self.rejected.length)


def train_dpo(config: DPOConfig, **objects: Unpack[Objects]) -> TrainingResult:
    """Train a policy on preference pairs and write a run folder.

    The reference's log-probs do not change, so they are computed once, before the first step.

    Args:
        config: the settings.
        objects: models and data in memory, and functions to call (`Objects`).

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError during training.
    """
    with spill_to_files(config, DPOConfig, **objects) as (settings, callbacks):
        learner, data = start(settings)
        return fit(
            settings,
            learner,
            data,
            learn=lambda pairs: learn(learner, pairs, settings),
            evaluate=lambda limit, each: evaluate_pairs(
                learner.model, data.held_out, learner.pad_id, settings, limit, each=each
            ),
            samples=lambda: sample_rows(learner, data),
            shown=SHOWN,
            callbacks=callbacks,
            yardstick=Yardstick(
                "eval/accuracy", higher_is_better=True, prompts=[item_key(pair.ranking) for pair in data.held_out]
            ),
        )


def start(config: DPOConfig, examine: Examine = refuse_unfit) -> tuple[PolicyLearner, TrainingData[EncodedPair]]:
    """Load and check everything, have it examined, and compute the reference's log-probs. Nothing is written."""
    if user_code.is_named(config.loss):
        user_code.load(LOSS, config.loss)
    setup = set_up(config)
    renderer = Renderer(setup.tokenizer, config.special_tokens)
    limit = max_length(config.max_length, context_length(load_config(setup.source)))
    split = load_split(read_rankings, config)
    train, held_out, counts = encode_split(
        lambda records, refused: encode_preferences(records, renderer, limit, config, refused),
        split,
        config,
        renderer,
    )
    longest = max(pair.length for pair in train + held_out)
    check_companion("--reference", config.reference, setup.source, setup.tokenizer, longest, options=config)
    batches = batches_of(config, len(train), len(held_out), "pair")
    texts = (
        (pair.source, ids)
        for pair in train + held_out
        for ids in (pair.prompt, pair.chosen.response, pair.rejected.response)
    )
    policy = load(config, setup, longest, texts)
    disable_dropout(policy)
    rows = [
        row
        for pair in train
        for name, one in (("chosen", pair.chosen), ("rejected", pair.rejected))
        for row in token_rows([one], name)
    ]
    examine(loaded_run_of(config, setup, policy, renderer, rows=rows, split=split, counts=counts))
    remember(setup.tokenizer, (one.prompt for one in split[0]))
    if config.loads_reference:
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
    return learner, TrainingData(train, held_out, {"data": counts}, shown)


def learn(learner: PolicyLearner, pairs: Sequence[EncodedPair], config: DPOConfig) -> dict[str, float]:
    """One optimizer step on some pairs. Returns its metrics."""
    return learner.learn(
        pairs, lambda limit: accumulate(learner.model, pairs, learner.pad_id, config, limit), config.micro_batch
    )


def accumulate(
    policy: Policy,
    pairs: Sequence[EncodedPair],
    pad_id: int,
    config: DPOConfig,
    limit: MicroBatch | None = None,
    *,
    each: EachRecord | None = None,
) -> dict[str, float]:
    """Accumulate gradients of the loss over a step's pairs in micro-batches; returns its metrics.

    The loss is divided by the step's number of pairs (and of chosen tokens), so the micro-batch size does not change
    the gradient. ``limit`` is the config's by default. ``each`` gets every pair's own accuracy.
    """
    ordered = sorted(pairs, key=lambda pair: pair.length)
    num_tokens = sum(pair.chosen.num_tokens for pair in ordered)
    sums = MetricSums()
    limit, step = (limit or config.micro_batch).of_pairs, lockstep_forwards((policy, policy.dummy_loss))
    for part in own_micro_batches(ordered, limit, lambda pair: (2, pair.length), step):
        chosen, rejected = response_logprobs(policy, part, pad_id)
        loss, metrics = pair_loss(chosen, rejected, part, config, num_pairs=len(ordered))
        if config.nll_weight:
            all_count = torch.ones_like(chosen, dtype=torch.bool)
            nll, _ = core.sft_loss(chosen, all_count, num_tokens=num_tokens)
            loss, metrics = loss + config.nll_weight * nll, {**metrics, "loss/nll": nll.detach()}
        if torch.is_grad_enabled():
            loss.backward()
        if each is not None:
            each.add(part, rightness(margins(chosen, rejected, part, config)))
        sums.add({"loss/dpo": loss.detach(), **metrics})
    return sums.add_ranks().means(1)


def pair_loss(
    chosen: Tensor, rejected: Tensor, pairs: Sequence[EncodedPair], config: DPOConfig, *, num_pairs: int
) -> tuple[Tensor, Metrics]:
    """The loss selected by ``--loss``, and its metrics.

    Args:
        chosen, rejected: log-probs of the pairs' responses, summed over tokens, ``[pairs]``.
        pairs: the pairs.
        config: the settings.
        num_pairs: number of pairs of the whole optimizer step.
    """
    tokens = _tokens(pairs, chosen)
    if user_code.is_named(config.loss):
        return own_loss(chosen, rejected, pairs, config, tokens, num_pairs=num_pairs)
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
            *_references(pairs, chosen),
            beta=config.strength,
            kind="ipo" if config.loss == "ipo-sum" else cast(Kind, config.loss),
            label_smoothing=config.label_smoothing,
            chosen_tokens=tokens[0] if config.is_per_token else None,
            rejected_tokens=tokens[1] if config.is_per_token else None,
            num_pairs=num_pairs,
        )
    return loss, {name: value for name, value in metrics.items() if not name.startswith("loss/")}


def own_loss(
    chosen: Tensor,
    rejected: Tensor,
    pairs: Sequence[EncodedPair],
    config: DPOConfig,
    tokens: tuple[Tensor, Tensor],
    *,
    num_pairs: int,
) -> tuple[Tensor, Metrics]:
    """The loss of the user's function and its metrics, beside accuracy and margin of the log-ratios to the reference.

    Raises ConfigError if it raises, or does not return a scalar and a dictionary.
    """
    ref_chosen, ref_rejected = _references(pairs, chosen)
    loss, metrics = user_code.call_loss(
        LOSS,
        config.loss,
        chosen,
        rejected,
        ref_chosen,
        ref_rejected,
        chosen_tokens=tokens[0],
        rejected_tokens=tokens[1],
        config=config,
        num_pairs=num_pairs,
    )
    margin = margins(chosen, rejected, pairs, config)
    common = {"reward/accuracy": rightness(margin).sum(), "reward/margin": config.strength * margin.sum()}
    return loss, {name: number / num_pairs for name, number in common.items()} | metrics


def margins(chosen: Tensor, rejected: Tensor, pairs: Sequence[EncodedPair], config: DPOConfig) -> Tensor:
    """By how much each pair's chosen response is preferred, ``[pairs]``, without gradient: what the losses' accuracy counts.

    It is the difference of the log-probs per token without a reference; with one, of the log-ratios, per token only if
    the loss divides them.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    if config.loads_reference:
        ref_chosen, ref_rejected = _references(pairs, chosen)
        chosen, rejected = chosen - ref_chosen, rejected - ref_rejected
    if config.is_per_token or not config.loads_reference:
        chosen_tokens, rejected_tokens = _tokens(pairs, chosen)
        chosen, rejected = chosen / chosen_tokens, rejected / rejected_tokens
    return chosen - rejected


def _tokens(pairs: Sequence[EncodedPair], chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of tokens of both responses of some pairs."""
    return (
        upload(torch.tensor([pair.chosen.num_tokens for pair in pairs]), chosen.device),
        upload(torch.tensor([pair.rejected.num_tokens for pair in pairs]), chosen.device),
    )


def _references(pairs: Sequence[EncodedPair], chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's log-probs of both responses of some pairs."""
    return (
        upload(torch.tensor([pair.ref_chosen for pair in pairs], dtype=chosen.dtype), chosen.device),
        upload(torch.tensor([pair.ref_rejected for pair in pairs], dtype=chosen.dtype), chosen.device),
    )


def evaluate_pairs(
    policy: Policy,
    pairs: Sequence[EncodedPair],
    pad_id: int,
    config: DPOConfig,
    limit: MicroBatch,
    *,
    each: EachRecord | None = None,
) -> dict[str, float]:
    """Loss, accuracy and margin of the implicit rewards on held-out pairs, and the NLL term if there is one."""
    metrics = accumulate(policy, pairs, pad_id, config, limit, each=each)
    names = {"loss/dpo": "loss", "loss/nll": "nll", "reward/accuracy": "accuracy", "reward/margin": "margin"}
    return {f"eval/{name}": metrics[metric] for metric, name in names.items() if metric in metrics}


# Pairs as token ids -----------------------------------------------------------------------------------------------------


def encode_preferences(
    rankings: Sequence[Ranking], renderer: Renderer, limit: int, config: DPOConfig, refused: list[Refusal] | None = None
) -> tuple[list[EncodedPair], Counts]:
    """Encode pairs. Too long pairs and equal responses are handled as by `encode_rankings`.

    Raises DataError, also for rankings of more than two and an empty prompt, and CheckpointError for an encoder's
    tokenizer.
    """
    for ranking in rankings:
        if len(ranking.responses) != 2:
            raise DataError(
                f"{ranking.source}: a ranking of {len(ranking.responses)} responses; this trainer needs pairs "
                "(prompt, chosen, rejected). `heedful reward` trains on longer rankings"
            )
    inputs = RewardInputs(renderer.tokenizer, written=True, special_tokens=renderer.special_tokens)
    if inputs.renderer is None:
        raise CheckpointError("the model's tokenizer has CLS and SEP tokens: it is an encoder's; DPO needs a decoder")
    rows, counts = encode_rankings(
        rankings, inputs, max_length=limit, action=config.too_long, equal_pairs=if_equal(config), refused=refused
    )
    return [_split(row, renderer) for row in rows], counts


def _split(row: RankingRows, renderer: Renderer) -> EncodedPair:
    ranking = row.ranking
    prompt = renderer.prompt_ids(ranking.prompt, ranking.prefill)
    if not prompt:
        raise DataError(
            f"{ranking.source}: the prompt is empty and the tokenizer has no BOS token, so a response's first "
            "token has no context. DPO needs prompts; `heedful reward` compares whole texts"
        )

    def example(ids: list[int], response: Response) -> Example:
        if ids[: len(prompt)] == prompt and not isinstance(response, tuple):
            return Example(prompt, ids[len(prompt) :], ranking.source)
        cut, prefill = ranking.truncated, ranking.prefill
        written = renderer.written(ranking.prompt, response, truncated=cut, prefill=prefill)
        return as_example(written, ranking.source).cut(len(ids))

    chosen, rejected = (
        example(side["input_ids"], response) for side, response in zip(row.rows, ranking.responses, strict=True)
    )
    return EncodedPair(ranking, prompt, chosen, rejected)


def with_reference(
    reference: Policy,
    pairs: Sequence[EncodedPair],
    pad_id: int,
    micro_batch: MicroBatch,
    adaptive: AdaptiveMicroBatch | None = None,
) -> list[EncodedPair]:
    """Add the reference's log-probs to the pairs; keeps their order."""

    def read(part: list[int]) -> list[tuple[float, float]]:
        chosen, rejected = response_logprobs(reference, [pairs[i] for i in part], pad_id)
        return list(zip(chosen.tolist(), rejected.tolist(), strict=True))

    found = read_once(reference, [pair.length for pair in pairs], read, micro_batch, adaptive, rows=2)
    return [replace(pair, ref_chosen=ref[0], ref_rejected=ref[1]) for pair, ref in zip(pairs, found, strict=True)]


def response_logprobs(policy: Policy, pairs: Sequence[EncodedPair], pad_id: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the chosen and of the rejected responses, summed over their tokens, ``[pairs]``."""
    whole = whole_logprobs(policy, [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)], pad_id)
    return whole[: len(pairs)], whole[len(pairs) :]
