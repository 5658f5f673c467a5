"""The clinic's arithmetic: when half is lost, which lines count, what the table says of runs made by hand."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from heedful.data.chat import RewardInputs
from heedful.models import load_tokenizer
from heedful.models.load import load_reward_model
from heedful.rewards.models import ModelReward
from heedful.types import Message

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LIMITS = {"steps": 40, "learning_rate": 1e-4, "max_new_tokens": 80}


@pytest.fixture
def clinic(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("clinic")


def row(case, seed, gold, **metrics):
    """A run whose metrics are those from step 21 on."""
    healthy = {"rollout/eos_frac": 1.0, "policy/entropy": 1.0}
    steps = [healthy | (metrics if step > 20 else {}) for step in range(1, 41)]
    return {"case": case, "seed": seed, "gold": gold, "steps": steps, "evaluations": [], "limits": LIMITS}


def test_half_is_lost_for_good_against_the_twin(clinic):
    twin = [0.5] * 40
    falls = [0.5] * 10 + [0.1] * 30
    assert clinic.half_lost(falls, twin) == 13, "three of the five that are averaged"
    assert clinic.half_lost(twin, twin) is None
    assert clinic.half_lost([0.41] * 40, twin) is None, "less than LOSS"
    assert clinic.half_lost([0.39] * 40, twin) == 1
    recovers = [0.5] * 5 + [0.1] * 5 + [0.5] * 10 + [0.1] * 20
    assert clinic.half_lost(recovers, twin) == 23


def test_the_table_counts_runs_alarms_and_steps_of_lead(clinic):
    good, bad = [0.5] * 40, [0.5] * 29 + [0.1] * 11
    rows = [row("ppo", 0, good), row("ppo", 1, good, **{"policy/entropy": 0.01})]
    rows += [row("wrong-sign", seed, bad, **{"rollout/eos_frac": 0.5}) for seed in (0, 1, 2)]
    lines = clinic.table(rows).splitlines()
    (line,) = [line for line in lines if line.startswith("| wrong-sign")]
    assert "| 2 | 2 | end-token-lost 2 (23), responses-cut 2 (21) | 0.10, 0.50 | 2 | 11 (11 to 11) |" in line, (
        "no twin of 2"
    )
    assert "| all | 2 | 1: 50.0% (95 % interval 9.5% to 90.5%) | entropy-collapse 1 (25) | | |" in lines
    assert "| end-token-lost | wrong-sign 3 of 3 (step 23) | 0 of 2 |" in lines
    assert "| entropy-collapse |  | 1 of 2 |" in lines


def test_a_line_that_was_cut_off_does_not_count(clinic, tmp_path):
    assert clinic.read_rows(tmp_path / "runs.jsonl") == []
    whole = json.dumps(row("ppo", 3, [0.5]))
    (tmp_path / "runs.jsonl").write_text(f"{whole}\n{whole[:40]}", encoding="utf-8")
    assert [(one["case"], one["seed"]) for one in clinic.read_rows(tmp_path / "runs.jsonl")] == [("ppo", 3)]


def test_no_seed_and_no_world_is_in_both_halves(clinic):
    (seeds, worlds), (others, other_worlds) = clinic.HALVES.values()
    assert not set(seeds) & set(others)
    assert not set(worlds) & set(other_worlds)
    assert len(clinic.DISEASES) == 12


def test_the_plants_at_the_reward_model(clinic, checkpoints):
    """Read one token early, and without the chat template."""
    folder, prompt = str(checkpoints["gpt2"]), (Message("user", "你好"),)
    tokenizer = load_tokenizer(folder)
    model = load_reward_model(folder, tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32, seed=3).eval()
    inputs = RewardInputs(tokenizer)
    whole = inputs.encode(prompt, "您好")
    reward = ModelReward(model, inputs)
    with torch.no_grad():
        before_the_end = model([{"input_ids": whole["input_ids"][:-1]}])
        assert not torch.equal(model([whole]), before_the_end)
        clinic.take_end_for_padding(reward)
        assert torch.equal(model([whole]), before_the_end)
    clinic.read_raw_text(reward)
    assert tokenizer.decode(reward.inputs.encode(prompt, "您好")["input_ids"]).startswith("User: 你好\nAssistant: 您好")
    assert inputs.encode(prompt, "您好") == whole, "the judge reads as before"


def test_the_table_has_what_the_doctor_found(clinic):
    rows = [row(case, 0, [0.5] * 40) for case in ("ppo", "read-early")]
    found = [{"check": check} for check in ("score-position", "score-position", "reward-white-space")]
    examined = [{"case": "read-early", "world": f"world-{i}", "findings": found[: 3 - i]} for i in (0, 1)]
    lines = clinic.table(rows, examined).splitlines()
    (line,) = [line for line in lines if line.startswith("| read-early")]
    assert line.endswith("| score-position 2 of 2, reward-white-space 1 of 2 |")
    (line,) = [line for line in lines if line.startswith("| ppo")]
    assert line.endswith("| 0.50 |  |")
