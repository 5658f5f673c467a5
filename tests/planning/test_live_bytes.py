"""The plan beside the live bytes of trainers on CUDA fake tensors (benchmarks/live_bytes.py, fake_memory.py)."""

import importlib
from pathlib import Path

import pytest
import torch

from heedful.planning.memory import CUDA_CONTEXT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FEW = 2
"""Layers of the quick test, in place of 24."""


@pytest.fixture
def fake_memory(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fake_memory")


def planned_and_live(fake_memory, folder, run):
    """The plan of a run, its live bytes in each phase, and the phase with the peak, which must be the plan's."""
    fake_memory.make(folder, "0.5B")
    config = fake_memory.settings(folder, "0.5B", run)
    plan, live = fake_memory.planned(config, "0.5B"), fake_memory.measure(config)
    peak = max(live, key=live.__getitem__)
    assert peak == plan.peak_phase
    return plan, live, peak


def test_the_plan_of_a_trainer_is_what_its_tensors_take(fake_memory, tmp_path, monkeypatch):
    """SFT of 0.5B's widths, to a hundredth, so that no part of the plan can be missing."""
    monkeypatch.setitem(fake_memory.SIZES["0.5B"], "num_hidden_layers", FEW)
    plan, live, peak = planned_and_live(fake_memory, tmp_path, "SFT")
    assert plan.total(peak) - CUDA_CONTEXT == pytest.approx(live[peak], rel=0.01)
    assert plan.total("step") - CUDA_CONTEXT == pytest.approx(live["step"], rel=0.001)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(27))
def test_the_plan_of_every_trainer_is_what_its_tensors_take(fake_memory, tmp_path, number):
    runs = list(fake_memory.RUNS)
    assert len(runs) == 27
    plan, live, peak = planned_and_live(fake_memory, tmp_path, runs[number])
    assert plan.total(peak) - CUDA_CONTEXT == pytest.approx(live[peak], rel=0.025)


def test_a_device_of_shapes_counts_frees_and_refuses_as_cuda_does(fake_memory):
    torch.ones(1, requires_grad=True).backward()  # starts autograd's threads, and none of them is for CUDA
    with fake_memory.LiveBytes() as device:
        weight = torch.zeros(1000, requires_grad=True, device="cuda")
        assert device.live == 4096  # 4,000 bytes in granules of 512
        with device.in_phase("backward"):
            (weight * 2).sum().backward()
        assert device.peaks["backward"] >= 2 * 4096
        assert device.live == 2 * 4096
        weight.grad = None
        assert device.live == 4096
        with pytest.raises(RuntimeError, match="two devices"):
            weight + torch.zeros(1000)
        found = torch.tensor([3, 1, 2], device="cuda")[torch.tensor([True, False, True], device="cuda")]
        assert found.tolist() == [3, 2]
        assert found.device.type == "cuda"
