"""Benchmarks can be imported; what same_numbers.py and parity.py call equal."""

import argparse
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def same_numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("same_numbers")


@pytest.fixture
def output(same_numbers, tmp_path):
    """``output(name, loss=..., weight=...)``: what two runs of same_numbers.py leave, one of them with these numbers."""

    def write(name, *, loss=0.5, weight=1.0, sample="ab", failed=None):
        folder = tmp_path / name
        for run, own in (("first", (loss, weight, sample)), ("second", (0.5, 1.0, "ab"))):
            loss_of, weight_of, sample_of = own
            (folder / "runs" / run / "final").mkdir(parents=True)
            metrics = [{"step": 1, "loss": 0.5, "time/update": len(name)}, {"step": 2, "loss": loss_of}]
            lines = "".join(json.dumps(line) + "\n" for line in metrics)
            (folder / "runs" / run / "metrics.jsonl").write_text(lines, encoding="utf-8")
            (folder / "runs" / run / "samples.jsonl").write_text(sample_of, encoding="utf-8")
            save_file({"w": torch.tensor([weight_of, 2.0])}, folder / "runs" / run / "final" / "model.safetensors")
            numbers = same_numbers.numbers_of(folder / "runs" / run)
            if failed and run == "first":
                numbers = same_numbers.FAILED | {"failed": failed}
            (folder / "runs" / run / "numbers.json").write_text(json.dumps(numbers), encoding="utf-8")
        facts = {"heedful": name, "revision": "r", "torch": "t", "transformers": "t", "cpu": "c"}
        facts["seconds"] = {"first": 1.0, "second": 1.0}
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        return folder

    return write


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["All that counts is equal."]),
        ({"loss": 0.4}, ["loss: differs by up to 2.0e-01 of its size", "1 runs differ: first"]),
        ({"loss": None}, ["loss: not finite in one of the two", "1 runs differ: first"]),
        ({"weight": 3.0}, ["final/model.safetensors w: differs by up to 8.9e-01 of its size", "1 runs differ: first"]),
        ({"sample": "ba"}, ["samples.jsonl: differs", "1 runs differ: first"]),
        ({"failed": "ValueError: x"}, ["failed after: ValueError: x", "1 runs differ: first"]),
    ],
    ids=["equal", "metric", "not-finite", "weights", "samples", "failed"],
)
def test_runs_of_two_revisions_are_compared_bit_for_bit(same_numbers, output, capsys, changes, said):
    folders = {"before": output("before"), "after": output("after", **changes)}
    differs = same_numbers.compare(argparse.Namespace(**folders, redefined=[]))
    assert differs == bool(changes)
    printed = capsys.readouterr().out
    assert all(text in printed for text in said), printed
    redefined = argparse.Namespace(**folders, redefined=["loss"])
    assert same_numbers.compare(redefined) == (bool(changes) and "loss" not in changes)


def test_benchmarks_can_be_imported(monkeypatch):
    """What they take from the library is there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gpu_day"))
    for path in [*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("gpu_day/*.py")]:
        assert importlib.import_module(path.stem).__doc__, path


@pytest.mark.parametrize("name", ["IPO", pytest.param("GRPO, two updates", marks=pytest.mark.exhaustive)])
def test_parity_notices_a_weight_a_loss_and_a_norm(monkeypatch, tmp_path, name):
    """Both sides are heedful's own run here: equal, until one number is not. TRL is given what it needs to repeat the run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    parity = importlib.import_module("parity")
    parity.make_models(tmp_path)
    start = load_file(tmp_path / "policy" / "model.safetensors")
    (case,) = (case for case in parity.CASES if case.name == name)
    ours = parity.train(case, tmp_path)
    peer = json.loads(json.dumps(ours["for_peer"]))
    assert len(peer["learning_rates"]) == parity.STEPS * case.epochs
    rollouts = peer["rollouts"] or []
    assert [len(batch["scores"]) for batch in rollouts] == [parity.BATCH] * parity.STEPS * (case.command == "grpo")
    assert len(peer["records"]) == parity.STEPS * (2 if rollouts else parity.BATCH)
    theirs = {n: [x for x in ours[n] for _ in range(case.epochs)] for n in ("losses", "norms")}
    theirs["weights"] = {n: tensor.clone() for n, tensor in ours["weights"].items()}
    row = parity.compare(case, ours, theirs, start)
    assert row.is_as_expected
    assert max(row.loss, row.norm, row.weights) == 0.0 < row.moved
    assert not parity.compare(replace(case, differs=True), ours, theirs, start).is_as_expected
    for changed in (
        theirs | {"losses": [1.001 * x + 1e-5 for x in theirs["losses"]]},
        theirs | {"norms": [1.001 * x for x in theirs["norms"]]},
        theirs | {"weights": theirs["weights"] | {"model.norm.weight": theirs["weights"]["model.norm.weight"] + 1e-5}},
    ):
        assert not parity.compare(case, ours, changed, start).is_as_expected
    failed = parity.compare(case, ours, {"error": "没有"}, start)
    lines = parity.table([row, failed]).splitlines()
    assert lines[2].startswith(f"| {name} | `heedful {case.command} --")
    assert "| 0.0e+00 | 0.0e+00 | 0.0e+00 (" in lines[2]
    assert "**not as expected**" in lines[3]
    assert "TRL did not run: 没有" in lines[3]
