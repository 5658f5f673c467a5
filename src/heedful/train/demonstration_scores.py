"""Demonstrations as a reward model reads them, and their mean score: what ``--offset-data`` makes 0."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from heedful.configs.options import RecordOptions
from heedful.data.batches import own_micro_batches
from heedful.data.chat import RewardInputs
from heedful.data.fitting import Counts, Refusal, added, check_dropped, each_rendered, fitted, settle
from heedful.data.loading import Row, read_usable
from heedful.data.schemas import read_demonstrations
from heedful.errors import DataError
from heedful.models.reward_model import RewardModel
from heedful.parallel import ranks
from heedful.parallel.sharding import passes
from heedful.types import Demonstration, MicroBatch


def encode_scored(
    path: str, options: RecordOptions, inputs: RewardInputs, *, max_length: int
) -> tuple[list[Row], Counts]:
    """The demonstrations of a file as rows, and their counts. ``--columns`` is for the preferences, not for this file.

    Raises DataError, also where more was dropped than ``max_dropped`` allows.
    """
    try:
        demonstrations, unusable = read_usable(read_demonstrations, path, replace(options, columns=""))
    except DataError as error:
        raise DataError(
            f"--offset-data: {error} (--columns is for --data and does not rename anything here)"
        ) from error
    records = len(demonstrations) + unusable["dropped_unusable"]
    refused: list[Refusal] = []

    def encode(d: Demonstration, limit: int | None = None) -> Row:
        return inputs.encode(d.prompt, d.response, truncated=d.truncated, max_length=limit)

    demonstrations, rows = each_rendered(demonstrations, encode, refused)
    unusable = added(unusable, settle(refused, len(rows), options))
    both = list(zip(demonstrations, rows, strict=True))
    kept, too_long = fitted(
        both,
        [len(row["input_ids"]) for row in rows],
        [d.source for d in demonstrations],
        lambda one: (one[0], encode(one[0], max_length)),
        limit=max_length,
        action=options.too_long,
        what="demonstrations",
    )
    counts = {"records": records, **unusable, **too_long}
    check_dropped(counts, max_dropped=options.max_dropped, path=path)
    return [row for _, row in kept], {name: count for name, count in counts.items() if count}


def mean_output(model: RewardModel, rows: Sequence[Row], *, micro_batch: MicroBatch) -> float:
    """Mean of what the head gives for the rows, without the model's offset: the offset at which their mean score is 0."""
    ordered = sorted(rows, key=lambda row: len(row["input_ids"]))
    scores: list[float] = []
    with torch.no_grad():
        step = passes((model, model.zero))
        for part in own_micro_batches(ordered, micro_batch, lambda row: (1, len(row["input_ids"])), step):
            scores += model(part).tolist()
    return math.fsum(itertools.chain.from_iterable(ranks.gather(scores))) / len(rows) + model.offset
