"""What steps cost, of trainers that learn from data that is there: tokens per second, and memory."""

import json

import pytest

from heedful import DPOConfig, KTOConfig, RewardConfig, SFTConfig
from heedful.train import dpo, kto, reward, sft

RECORD = {"prompt": "天空是什么颜色？", "chosen": "蓝色。", "rejected": "the colour of it is not known"}
TRAINERS = {
    "sft": (SFTConfig, sft.train_sft, lambda data: sum(len(one.response) for one in data.train)),
    "dpo": (DPOConfig, dpo.train_dpo, lambda data: sum(len(p.chosen) + len(p.rejected) for p in data.train)),
    "kto": (KTOConfig, kto.train_kto, lambda data: sum(len(one.response) for one in data.train)),
    "reward": (
        RewardConfig,
        reward.train_reward,
        lambda rows: sum(len(row["input_ids"]) for ranking in rows for row in ranking.rows),
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_tokens_per_second_and_memory(tiny, tmp_path, name):
    """One step over all records, so its tokens are those of the data."""
    kind, train, count = TRAINERS[name]
    records = [RECORD | {"prompt": f"{RECORD['prompt']}{i}"} for i in range(4)]
    if name == "sft":
        records = [{"prompt": one["prompt"], "completion": one["chosen"]} for one in records]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records), encoding="utf-8")
    settings = {"model": tiny("gpt2"), "data": str(path), "output": tmp_path / "run", "eval_fraction": 0.0}
    settings |= {"max_steps": 1, "batch_size": 8 if name == "kto" else 4, "sample_every": 0}
    settings |= {"dtype": "float32", "device": "cpu"}
    config = kind(**settings)
    tokens = count({"sft": sft, "dpo": dpo, "kto": kto, "reward": reward}[name].start(config)[1])
    train(config)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = json.loads(line)
    assert metrics["perf/tokens_per_second"] * metrics["time/update"] == pytest.approx(tokens, rel=1e-3)
    assert metrics["perf/memory_gb"] > 0.05
