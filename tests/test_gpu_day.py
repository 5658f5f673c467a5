"""The kit for a GPU (benchmarks/gpu_day): its rows on the CPU; a row that hangs or fails does not stop the others."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jsonl import read_jsonl

KIT = Path(__file__).parents[1] / "benchmarks" / "gpu_day"


class Kept(list):
    """Results in memory."""

    add = list.append


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    monkeypatch.syspath_prepend(str(KIT.parent))
    monkeypatch.syspath_prepend(str(KIT))


@pytest.fixture
def kit():
    return importlib.import_module("day")


@pytest.fixture
def small(tmp_path):
    """``small(row)``: a dry day on the CPU, whose results are a list."""

    def make(row):
        return importlib.import_module("common").day(row, "cpu", Kept(), tmp_path, dry=True)

    return make


@pytest.fixture
def options(kit, tmp_path):
    return kit.parser().parse_args(["--dry", "--out", str(tmp_path), "--device", "cpu"])


def test_the_table_has_each_row_and_a_calls_rows_fit_into_its_minutes(kit):
    text = (KIT / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (\d+) \|", text, re.MULTILINE)
    assert table == [(row.name, row.call, f"{row.limit:g}") for row in kit.ROWS]
    for call, minutes in {"numbers": 5, "speed": 7}.items():
        assert kit.MINUTES[call] == minutes
        assert kit.INSTALL + sum(row.limit for row in kit.ROWS if row.call == call) <= 60 * minutes


def test_a_row_that_hangs_or_fails_is_written_down_and_does_not_stop_the_call(kit, options):
    row = kit.NAMES["versions"]
    assert not kit.run_row(row, 0.05, options)
    assert not kit.run_row(replace(row, environment={"PYTHONHOME": "/nowhere"}), 60, options)
    hung, failed = read_jsonl(options.out / "results.jsonl")
    assert (hung["ended"], failed["ended"]) == ("stopped after 0 s", "with status 1")
    assert not hung["right"]
    assert not failed["right"]
    assert any("encodings" in said for said in failed["said"]), "the log's last lines have the cause"


def test_speed_is_refused_before_numbers_and_after_wrong_ones(kit, tmp_path, capsys):
    found, out = tmp_path / "numbers.jsonl", tmp_path / "out"
    names = [row.name for row in kit.ROWS if row.call == "numbers"]
    good = [{"row": name, "ended": "in time", "right": True} for name in names]
    wrong = [{"row": "truth", "what": "log-probs", "value": "nan", "limit": 1, "right": False}]
    for lines, why in ((good[:-1], "has no result of doctor; first: run.sh numbers"), (wrong + good, "in truth; mend")):
        found.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        assert kit.main(["--dry", "speed", f"--numbers={found}", f"--out={out}"]) == 2
        assert why in capsys.readouterr().err
    assert list(out.iterdir()) == [], "nothing was measured"
    found.write_text("".join(json.dumps(line) + "\n" for line in good), encoding="utf-8")
    assert kit.refusal(found) is None


def test_a_number_is_wrong_above_its_limit_and_if_it_is_none(small):
    day = small("truth")
    for value in (1.0, 1.5, float("nan")):
        day.check("x", value, 1.0)
    assert [(line["value"], line["right"]) for line in day.results] == [(1.0, True), (1.5, False), ("nan", False)]


def test_differences_of_gradients_and_of_tokens(small):
    truth = importlib.import_module("truth")
    assert truth.relative([torch.tensor([3.0]), torch.tensor([4.5])], [torch.tensor([3.0]), torch.tensor([4.0])]) == 0.1
    day = small("truth")
    lm, tokenizer = day.policy("0.6B")
    policy, prompts = truth.Policy.from_pretrained(lm, tokenizer, device="cpu", dtype="float32"), [[300, 301], [302]]
    plain = truth.greedy(day, policy, prompts, graphs=False)
    assert truth.parting(policy, plain, plain) == 0
    other = truth.generate(
        policy,
        prompts,
        truth.SamplingOptions(max_new_tokens=6, response_length="fixed"),
        stop_ids=(),
        pad_id=0,
        generator=torch.Generator().manual_seed(0),
    )
    assert truth.parting(policy, plain, other) > 0.1, "sampled tokens are less likely than the greedy ones"


@pytest.mark.parametrize("row", ["truth", "memory"])
def test_numbers_are_right_on_a_cpu(small, row):
    """On a pretend device, where they could be wrong: tests/accelerator/test_gpu_day.py."""
    day = small(row)
    getattr(importlib.import_module("truth"), row)(day)
    assert [line for line in day.results if not line.get("right", True)] == []
    assert len(day.results) == {"truth": 13, "memory": 4}[row]
    if row == "memory":
        assert day.results[0]["halvings"] == 3


@pytest.mark.parametrize("row", ["decode", "fit"])
def test_speed_is_measured_on_a_cpu(small, row, monkeypatch):
    day, machine = small(row), importlib.import_module("machine")
    monkeypatch.setattr(machine, "LARGE", (machine.Product(1, 8, 8, 8),))  # seconds on a CPU
    getattr(importlib.import_module("speed"), row)(day)
    measured = [line for line in day.results if "left_out" not in line]
    assert len(measured) == {"decode": 4, "fit": 1}[row]
    assert all(line["tokens_per_second"] > 0 for line in measured)


@pytest.mark.exhaustive
def test_the_whole_kit_runs_dry(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "WORK", tmp_path / "work")
    assert kit.main(["--dry", f"--out={tmp_path}", "numbers", "speed"]) == 0
    lines = read_jsonl(tmp_path / "results.jsonl")
    assert [line["row"] for line in lines if "ended" in line] == list(kit.NAMES)
