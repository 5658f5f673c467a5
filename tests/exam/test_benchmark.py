"""benchmarks/exam.py: its rank correlation and interval by hand, and what each flaw does to pairs."""

import importlib
import random
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("exam")


def test_rank_correlation(benchmark):
    """Ranks 1 2.5 2.5 4 and 2 1 3 4: products sum to 3, squares to 4.5 and 5."""
    assert benchmark.ranks([3, 5, 5, 9]) == [1, 2.5, 2.5, 4]
    assert benchmark.spearman([3, 5, 5, 9], [2, 1, 3, 40]) == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert benchmark.spearman([1, 1], [1, 2]) == 0


def test_the_interval_is_that_of_the_mean(benchmark):
    """Of 100 numbers 0 and 1, half each: 0.5 +- 1.96 * 0.05."""
    rows = [{"x": at % 2} for at in range(100)]
    low, high = benchmark.interval(rows, lambda some: sum(row["x"] for row in some) / len(some))
    assert (low, high) == (pytest.approx(0.4, abs=0.015), pytest.approx(0.6, abs=0.015))


def pair(chosen, rejected, kinds=("good", "curt")):
    said = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    return {
        "prompt": [], "chosen": said[0], "rejected": said[1], "chosen_kind": kinds[0], "rejected_kind": kinds[1],
        "family": "sums",
    }  # fmt: skip


def texts(rows):
    return [tuple(row[side][0]["content"] for side in ("chosen", "rejected")) for row in rows]


def test_flaws(benchmark):
    rows = [pair("Of course! It is 2.", "2"), pair("2", "Of course! It is 3. And so on.", ("good", "wrong"))] * 500
    draw = random.Random(0)
    longer = texts(benchmark.longer(rows, draw))
    assert all(pair in longer for pair in set(texts(rows)))
    swapped = longer.count(("Of course! It is 3. And so on.", "2"))
    assert 120 < swapped < 330, "30 to 60 % of 500"
    assert longer.count(("Of course! It is 2.", "2")) == 500, "it was the longer one"
    assert 30 <= len(benchmark.few(rows, draw)) <= 400
    noisy = texts(benchmark.noise(rows, draw))
    assert 190 < sum(now != before for now, before in zip(noisy, texts(rows), strict=True)) < 310
    thanked = benchmark.polite(rows, draw)
    more = [row for row in texts(thanked) if row[0].startswith(row[1])]
    assert 100 <= len(more) <= 300
    assert len(thanked) == 1000 + len(more)
    assert texts(benchmark.blind(rows, draw)) == [("Of course! It is 2.", "2")] * 500
    assert benchmark.gaps([pair("a", "b", ("good", "off-topic")), rows[0]], draw) == [rows[0]]
    assert all(row["truncated"] for row in benchmark.position(rows, draw))
