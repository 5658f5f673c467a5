"""What steps cost, of trainers that learn from data that is there: tokens per second, and memory."""

import pytest

from cases import often
from jsonl import read_metrics
from trainers import MODULES, TRAIN

COUNTS = {
    "sft": (5, lambda data: sum(len(one.response) for one in data.train)),
    "dpo": (7, lambda data: sum(len(pair.chosen.response) + len(pair.rejected.response) for pair in data.train)),
    "kto": (14, lambda data: sum(len(one.example.response) for one in data.train)),
    "reward": (7, lambda data: sum(len(row["input_ids"]) for ranking in data.train for row in ranking.rows)),
}
"""All records, and the tokens that are learned from."""


@pytest.mark.parametrize("name", often(COUNTS, ["sft", "reward"]))
def test_tokens_per_second_and_memory(offline, name):
    """One step over all records, so its tokens are those of the data."""
    records, count = COUNTS[name]
    settings = offline(name, max_steps=1, batch_size=records)
    tokens = count(MODULES[name].start(settings)[1])
    TRAIN[type(settings)](settings)
    (metrics,) = read_metrics(settings.output)
    assert metrics["perf/tokens_per_second"] * metrics["time/update"] == pytest.approx(tokens, rel=1e-3)
    assert metrics["perf/memory_gb"] > 0.05
