"""What all trainers that learn from data have in common: the same run again, its verdict, what a step costs."""

import pytest

from cases import often
from jsonl import read_metrics, write_jsonl
from trainers import CONFIGS, MODULES, TRAIN


@pytest.mark.parametrize("name", often(MODULES, ["kto"]))
def test_same_seed_same_run_bit_for_bit(offline, numbers, tmp_path, name):
    runs = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        settings = offline(name, output=tmp_path / folder, seed=seed, max_steps=2, batch_size=2, sample_every=2)
        TRAIN[type(settings)](settings)
        weights = (settings.output / "final" / "model.safetensors").read_bytes()
        runs.append((weights, numbers(settings.output), (settings.output / "samples.jsonl").read_bytes()))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]
    assert runs[0][1] != runs[2][1]


ANSWERS = {"sft": {"completion": "好的。"}, "kto": {"completion": "好的。"}}
PAIR = {"chosen": "好的。", "rejected": "不。"}
TOKENS = {
    "sft": lambda data: sum(len(one.response) for one in data.train),
    "dpo": lambda data: sum(len(pair.chosen.response) + len(pair.rejected.response) for pair in data.train),
    "kto": lambda data: sum(len(one.example.response) for one in data.train),
    "reward": lambda data: sum(len(row["input_ids"]) for ranking in data.train for row in ranking.rows),
}
"""That are learned from."""


@pytest.mark.parametrize("name", MODULES)
def test_a_run_is_judged_by_its_own_metric_and_says_what_its_steps_cost(name, tiny, tmp_path):
    """Three steps go once over all records, so their tokens are those of the data."""

    def rows(first):
        for n in range(first, first + 24):
            label = {"label": True} if n % 2 else {"completion": "不。", "label": False}
            yield {"prompt": f"{n} 加 1?"} | ANSWERS.get(name, PAIR) | (label if name == "kto" else {})

    options = {"batch_size": 8, "max_steps": 9, "learning_rate": 1e-2, "micro_batch_size": 3, "sample_every": 0}
    data, held_out = (write_jsonl(tmp_path / f"{n}.jsonl", rows(n)) for n in (0, 24))
    settings = CONFIGS[name](
        model=tiny(), data=data, eval_data=held_out, output=tmp_path / "run", device="cpu", dtype="float32", **options
    )
    wanted = TOKENS[name](MODULES[name].start(settings)[1])
    done = TRAIN[type(settings)](settings)
    found, metric = done.verdict, "eval/loss" if name == "sft" else "eval/accuracy"
    assert (found.metric, found.verdict) == (metric, "better")
    assert found.first == pytest.approx(done["first_evaluation"][metric], rel=1e-5)
    assert found.last == pytest.approx(done["last_evaluation"][metric], rel=1e-5)
    steps = read_metrics(done.folder, having="perf/tokens_per_second")[:3]
    tokens = sum(step["perf/tokens_per_second"] * step["time/update"] for step in steps)
    assert tokens == pytest.approx(wanted, rel=1e-3)
    assert all(step["perf/memory_gb"] > 0.05 for step in steps)
