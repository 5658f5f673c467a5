"""Reward-model training on preferences between responses: pairs or longer rankings."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from heedful import core
from heedful.algorithms.offline import EachRecord, OfflineLearner, Setup, TrainingData, batches_of, fit, set_up
from heedful.checks.findings import LoadedRun, TokenRow
from heedful.checks.preflight import Examine, refuse_unfit
from heedful.configs.offline import RewardConfig
from heedful.configs.options import RecordOptions
from heedful.data.batches import own_micro_batches
from heedful.data.chat import RewardInputs, plain_text
from heedful.data.fitting import (
    Counts,
    Refusal,
    added,
    check_dropped,
    each_rendered,
    fitted,
    if_equal,
    max_length,
    settle,
)
from heedful.data.learned import remember
from heedful.data.loading import RankingRows, Row, encode_rankings, encode_split, load_split, read_usable
from heedful.data.schemas import read_demonstrations, read_rankings
from heedful.data.splits import BatchOrder, item_key
from heedful.distributed import ranks
from heedful.distributed.sharding import is_sharded, lockstep_forwards
from heedful.errors import DataError
from heedful.models.heads import disable_dropout
from heedful.models.load import four_bit, load_reward_model
from heedful.models.reward_model import RewardModel
from heedful.models.save import save_reward_model
from heedful.models.shape import check_rows
from heedful.planning.memory import Lengths
from heedful.rewards.models import agreement_with
from heedful.training.from_python import Objects, spill_to_files
from heedful.training.fsdp import divide, loading_device
from heedful.training.memory_preflight import check_memory
from heedful.training.metric_sums import MetricSums
from heedful.training.result import TrainingResult
from heedful.training.setup import float32_experts, prepare, stored_dtype
from heedful.training.verdict import Yardstick
from heedful.types import Demonstration, MicroBatch, Ranking, plain_response

SHOWN = {"loss/reward": "loss", "reward/accuracy": "accuracy", "reward/margin": "margin"}
MEASURED = ("ece", "length_correlation", "accuracy_similar_length")
"""Evaluation metrics besides the means that training also logs."""


class RewardLearner(OfflineLearner):
    """A reward model in training, with the demonstrations that set the score offset of saved models, if any."""

    model: RewardModel

    def __init__(
        self, config: RewardConfig, setup: Setup, model: RewardModel, batches: BatchOrder, demonstrations: Sequence[Row]
    ) -> None:
        super().__init__(config, setup, model, batches)
        self.demonstrations, self.micro_batch = demonstrations, config.micro_batch

    def save(self, folder: Path) -> None:
        """Write the model in Hugging Face format, with the offset of its scores."""
        save_reward_model(self.model, self.tokenizer, folder, offset=self._offset())

    def unsharded(self) -> Self:
        """An unsharded learner for saving; all ranks measure the offset of a sharded model first."""
        if not is_sharded(self.model):
            return self
        offset, whole = self._offset(), super().unsharded()
        if whole is not self and offset is not None:
            whole.model.offset, whole.demonstrations = offset, ()
        return whole

    def _offset(self) -> float | None:
        """The offset at which the demonstrations' mean score is 0; None without demonstrations."""
        if not self.demonstrations:
            return None
        return self.adaptive.run(
            lambda limit: mean_output(self.model, self.demonstrations, micro_batch=limit.of_pairs),
            self.micro_batch,
            rows=len(self.demonstrations),
        )


def train_reward(config: RewardConfig, **objects: Unpack[Objects]) -> TrainingResult:
    """Train a reward model on preferences and write a run folder.

    Args:
        config: the settings.
        objects: models and data in memory, and functions to call (`Objects`).

    Raises ConfigError, DataError, CheckpointError before anything is written; TrainingError during training, and
    RewardError if a held-out score is not finite.
    """
    with spill_to_files(config, RewardConfig, **objects) as (settings, callbacks):
        learner, data = start(settings)
        train, held_out = data.train, data.held_out
        return fit(
            settings,
            learner,
            data,
            learn=lambda rankings: learn(learner, rankings, settings),
            evaluate=lambda limit, each: evaluate_rankings(learner.model, held_out, settings, limit, each),
            samples=lambda: sample_scores(learner.model, (held_out or train)[: settings.num_samples]),
            shown=SHOWN,
            callbacks=callbacks,
            yardstick=Yardstick(
                "eval/accuracy", higher_is_better=True, prompts=[item_key(one.ranking) for one in held_out]
            ),
            objective="eval/accuracy",
            higher_is_better=True,
            held_out_rows=pairs_of(held_out),
        )


def start(config: RewardConfig, examine: Examine = refuse_unfit) -> tuple[RewardLearner, TrainingData[RankingRows]]:
    """Load and check everything, and have it examined. Nothing is written."""
    setup = set_up(config)
    tokenizer, device, dtype = setup.tokenizer, setup.device, setup.dtype
    model = load_reward_model(
        setup.source,
        tokenizer,
        device=loading_device(config, device),
        compute_dtype=dtype,
        seed=config.seed,
        four_bit=four_bit(config, device, dtype),
        stored=stored_dtype(config, device, dtype),
        float32_experts=float32_experts(config),
    )
    prepare(model, config, base=config.model)
    disable_dropout(model)
    divide(config, device, model)
    inputs = RewardInputs(tokenizer, model.reads, special_tokens=config.special_tokens)
    limit = max_length(config.max_length, model.max_length)
    split = load_split(read_rankings, config)
    train, held_out, counts = encode_split(
        lambda records, refused: encode_rankings(
            records, inputs, max_length=limit, action=config.too_long, equal_pairs=if_equal(config), refused=refused
        ),
        split,
        config,
        inputs.renderer,
    )
    texts = ((one.source, row["input_ids"]) for one in train + held_out for row in one.rows)
    check_rows(model.classifier, tokenizer, texts)
    check_memory(config, Lengths(max(one.longest for one in train + held_out)), device, dtype)
    rows = [
        TokenRow(
            one.source, (), row["input_ids"], f"rank {rank}" if len(one.rows) > 2 else "rejected" if i else "chosen"
        )
        for one in train
        for i, (rank, row) in enumerate(zip(one.ranking.ranks, one.rows, strict=True))
    ]
    examine(
        LoadedRun(
            config=config,
            tokenizer=tokenizer,
            model=model.classifier,
            rows=rows,
            records=split[:2],
            counts=counts,
            renderer=inputs.renderer,
            reward_model=model,
            resumes=setup.resumes,
        )
    )
    remember(tokenizer, (one.prompt for one in split[0]))
    demonstrations, offset_counts = (
        ([], {}) if config.offset_data is None else encode_scored(config.offset_data, config, inputs, max_length=limit)
    )
    item = "pair" if all(len(one.rows) == 2 for one in train) else "ranking"
    batches = batches_of(config, len(train), len(held_out), item)
    learner = RewardLearner(config, setup, model, batches, demonstrations)
    facts = {"data": counts} | ({"offset_data": offset_counts} if offset_counts else {})
    return learner, TrainingData(train, held_out, facts)


def learn(learner: RewardLearner, rankings: Sequence[RankingRows], config: RewardConfig) -> dict[str, float]:
    """One optimizer step on some rankings. Returns its metrics."""
    return learner.learn(
        rankings,
        lambda limit: accumulate(learner.model, rankings, config, limit),
        config.micro_batch,
        rows=pairs_of(rankings),
    )


def pairs_of(rankings: Sequence[RankingRows]) -> int:
    """Number of responses over two: the size of rankings in pairs, the unit of a micro-batch."""
    return math.ceil(sum(len(one.rows) for one in rankings) / 2)


def sample_scores(model: RewardModel, rankings: Sequence[RankingRows]) -> list[dict[str, Any]]:
    """Rows of the sample table: the best and the worst response of each ranking, with their scores."""
    with torch.no_grad():
        scores = model([row for one in rankings for row in (one.rows[0], one.rows[-1])]).tolist()
    return [
        {
            "prompt": plain_text(one.ranking.prompt),
            "chosen": plain_response(one.ranking.responses[0]),
            "chosen score": scores[2 * i],
            "rejected": plain_response(one.ranking.responses[-1]),
            "rejected score": scores[2 * i + 1],
        }
        for i, one in enumerate(rankings)
    ]


def accumulate(
    model: RewardModel, rankings: Sequence[RankingRows], config: RewardConfig, limit: MicroBatch | None = None
) -> dict[str, float]:
    """Accumulate gradients of the K-wise loss over a step's rankings in micro-batches; returns its metrics.

    The loss is divided by the step's number of rankings, so the micro-batch size does not change the gradient.
    ``limit`` is the config's by default.
    """
    sums, counts = MetricSums(), step_counts(rankings)
    for part in micro_batches(model, rankings, limit or config.micro_batch):
        loss, metrics, _ = ranked_loss(model, part, config, **counts)
        loss.backward()
        sums.add(metrics)
    return sums.add_ranks().means(1)


def evaluate_rankings(
    model: RewardModel,
    rankings: Sequence[RankingRows],
    config: RewardConfig,
    limit: MicroBatch | None = None,
    each: EachRecord | None = None,
) -> dict[str, float]:
    """Loss, accuracy, margin, mean score, calibration and correlation with length on held-out rankings. ``each`` gets every
    ranking's pairs in the right order, and all its pairs.

    Raises RewardError if a score is not finite.
    """
    sums, counts = MetricSums(), step_counts(rankings)
    seen: list[Ranking] = []
    scores: list[list[float]] = []
    with torch.no_grad():
        for part in micro_batches(model, rankings, limit or config.micro_batch):
            _, metrics, of_part = ranked_loss(model, part, config, **counts)
            sums.add(metrics)
            seen += [one.ranking for one in part]
            own = in_rows(part, of_part)
            scores += own
            if each is not None:
                pairs = [core.ordered_pairs(one.ranking.ranks, s) for one, s in zip(part, own, strict=True)]
                right = torch.tensor([float(sum(better > worse for better, worse in of)) for of in pairs])
                each.add(part, right, [len(of) for of in pairs])
    means = sums.add_ranks().means(1)
    everywhere = ranks.gather((seen, scores))
    seen, scores = ([one for part in parts for one in part] for parts in zip(*everywhere, strict=True))
    measured = agreement_with(seen, scores)
    if measured["pairs"] == len(rankings):  # one pair per ranking: same as the loss's own accuracy
        measured["accuracy"] = means["reward/accuracy"]
    return {
        "eval/accuracy": measured["accuracy"],
        "eval/loss": means["loss/reward"],
        "eval/margin": means["reward/margin"],
        "eval/score_mean": means["reward/score_mean"],
        **{f"eval/{name}": measured[name] for name in MEASURED if name in measured},
    }


def micro_batches(
    model: RewardModel, rankings: Sequence[RankingRows], limit: MicroBatch
) -> Iterator[list[RankingRows]]:
    """This rank's rankings in micro-batches, similar lengths together, limited by responses. Rankings are not split."""
    ordered = sorted(rankings, key=lambda one: one.mean_length)
    step = lockstep_forwards((model, model.dummy_loss))
    return own_micro_batches(ordered, limit.of_pairs, lambda one: (len(one.rows), one.longest), step)


def step_counts(rankings: Sequence[RankingRows]) -> dict[str, int]:
    """Divisors of a step's means: rankings with at least one pair, and responses."""
    return {
        "num_prompts": sum(one.has_pairs for one in rankings),
        "num_responses": sum(len(one.rows) for one in rankings),
    }


def ranked_loss(
    model: RewardModel, part: Sequence[RankingRows], config: RewardConfig, *, num_prompts: int, num_responses: int
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """A micro-batch's share of its step's loss and metrics, and its scores, in the order of `places`.

    Each response is read once, also if it is in several pairs.
    """
    where = places(part)
    scores = model([part[i].rows[j] for i, j in where])
    margins = [part[i].ranking.margin for i, _ in where]
    loss, metrics = core.ranking_reward_loss(
        scores,
        torch.tensor([part[i].ranking.ranks[j] for i, j in where]),
        torch.tensor([i for i, _ in where]),
        num_prompts=num_prompts,
        margin=None if not any(margins) else torch.tensor([margin or 0.0 for margin in margins], dtype=scores.dtype),
        center_coef=config.center_coef,
        label_smoothing=config.label_smoothing,
    )
    return loss, {**metrics, "reward/score_mean": scores.detach().sum() / num_responses}, scores.detach()


def places(part: Sequence[RankingRows]) -> list[tuple[int, int]]:
    """The order of a micro-batch's rows, as (ranking, response): the best of each, then the second of each, and so on."""
    longest = max(len(one.rows) for one in part)
    return [(i, j) for j in range(longest) for i, one in enumerate(part) if j < len(one.rows)]


def in_rows(part: Sequence[RankingRows], scores: Tensor) -> list[list[float]]:
    """Scores in `places` as a list for each ranking."""
    by_place = dict(zip(places(part), scores.tolist(), strict=True))
    return [[by_place[i, j] for j in range(len(one.rows))] for i, one in enumerate(part)]


# Demonstrations whose mean score is 0 in every saved model (--offset-data) --------------------------------------------


def encode_scored(
    path: str, options: RecordOptions, inputs: RewardInputs, *, max_length: int
) -> tuple[list[Row], Counts]:
    """The demonstrations of a file as rows, and their counts. ``--columns`` applies to the preferences, not to this
    file.

    Raises DataError, also if more were dropped than ``max_dropped`` allows.
    """
    try:
        demonstrations, unusable = read_usable(read_demonstrations, path, replace(options, columns=""))
    except DataError as error:
        raise DataError(f"--offset-data: {error} (--columns applies only to --data)") from error
    records = len(demonstrations) + unusable["dropped_unusable"]
    refused: list[Refusal] = []

    def encode(d: Demonstration, limit: int | None = None) -> Row:
        return inputs.encode(d.prompt, d.response, truncated=d.truncated, max_length=limit)

    demonstrations, rows = each_rendered(demonstrations, encode, refused)
    unusable = added(unusable, settle(refused, len(rows), options))
    lengths, sources = [len(row["input_ids"]) for row in rows], [d.source for d in demonstrations]
    rows, too_long = fitted(
        rows,
        lengths,
        sources,
        lambda i: encode(demonstrations[i], max_length),
        limit=max_length,
        action=options.too_long,
        what="demonstrations",
    )
    counts = {"records": records, **unusable, **too_long}
    check_dropped(counts, max_dropped=options.max_dropped, path=path)
    return rows, {name: count for name, count in counts.items() if count}


def mean_output(model: RewardModel, rows: Sequence[Row], *, micro_batch: MicroBatch) -> float:
    """Mean score of the rows without the model's offset; as the new offset it makes their mean score 0."""
    ordered = sorted(rows, key=lambda row: len(row["input_ids"]))
    scores: list[float] = []
    with torch.no_grad():
        step = lockstep_forwards((model, model.dummy_loss))
        for part in own_micro_batches(ordered, micro_batch, lambda row: (1, len(row["input_ids"])), step):
            scores += model(part).tolist()
    return math.fsum(itertools.chain.from_iterable(ranks.gather(scores))) / len(rows) + model.offset
