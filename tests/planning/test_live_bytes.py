"""The plan beside the live bytes of trainers on CUDA fake tensors (benchmarks/live_bytes.py, fake_memory.py)."""

import importlib
from pathlib import Path

import pytest
import torch

from heedful import GRPOConfig
from heedful.kernels.head_logprobs import head_logprobs
from heedful.planning.memory import CUDA_CONTEXT, Lengths, plan_of
from heedful.planning.shapes import decoder

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


@pytest.mark.parametrize("run", ["SFT", "SFT, bfloat16 weights, optimizer on the CPU", "DPO, reference on the CPU"])
def test_the_plan_of_a_trainer_is_what_its_tensors_take(fake_memory, tmp_path, monkeypatch, run):
    """0.5B's widths, to a hundredth, so that no part of the plan can be missing."""
    monkeypatch.setitem(fake_memory.SIZES["0.5B"], "num_hidden_layers", FEW)
    plan, live, peak = planned_and_live(fake_memory, tmp_path, run)
    assert plan.total(peak) - CUDA_CONTEXT == pytest.approx(live[peak], rel=0.01)
    assert plan.total("step") - CUDA_CONTEXT == pytest.approx(live["step"], rel=0.001)
    if "scoring" in live:
        assert plan.total("scoring") - CUDA_CONTEXT == pytest.approx(live["scoring"], rel=0.02)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(27))
def test_the_plan_of_every_trainer_is_what_its_tensors_take(fake_memory, tmp_path, number):
    runs = list(fake_memory.RUNS)
    assert len(runs) == 27
    plan, live, peak = planned_and_live(fake_memory, tmp_path, runs[number])
    for phase in plan.phases:
        most = 0.02 if phase == peak else 0.03
        assert plan.total(phase) - CUDA_CONTEXT == pytest.approx(live[phase], rel=most), phase


@pytest.mark.parametrize(("trained", "entropy_coef"), [("all", 0.1), ("adapters", 0.0), ("nothing", 0.0)])
def test_logits_take_what_is_planned_and_less_where_the_head_has_no_gradient(fake_memory, trained, entropy_coef):
    """2,048 tokens of 152k words in bfloat16: 1,024 at a time where the matrix has a gradient, else 256; 220 in float32."""
    shape = decoder(vocabulary=151_936, hidden=2, layers=1, heads=1, kv_heads=1, head_dim=2, intermediate=2, tied=True)
    config = GRPOConfig(
        model="m", data="d", output="o", rewards=("rule:digits",), micro_batch_size=4, max_new_tokens=512,
        lora_rank=int(trained == "adapters"), entropy_coef=entropy_coef,
    )  # fmt: skip
    phases = plan_of(config, lambda _: shape, Lengths(513, 1), device="cuda", half=True).phases
    planned = phases["scoring"]["activations"] if trained == "nothing" else phases["backward"]["logits"]
    with fake_memory.LiveBytes() as device, torch.set_grad_enabled(trained != "nothing"):
        hidden = torch.zeros(2048, 2, device="cuda", requires_grad=True)
        weight = torch.zeros(151_936, 2, device="cuda", requires_grad=trained != "adapters")
        ids = torch.zeros(2048, dtype=torch.long, device="cuda")
        logprobs, entropy = head_logprobs(hidden, weight, ids, with_entropy=True, compute_dtype=torch.bfloat16)
        if trained != "nothing":
            (logprobs.sum() + entropy_coef * entropy.sum() if entropy_coef else logprobs.sum()).backward()
    chunk, block = (1024 if trained == "all" else 256) * 151_936, 220 * 151_936
    products = 1 if trained == "nothing" else 2
    assert planned == 2 * products * chunk + 4 * block * (3 if entropy_coef and trained != "nothing" else 2)
    assert planned == pytest.approx(device.peaks[""], rel=0.01)


def test_logits_that_no_backward_pass_reads_are_not_kept(fake_memory):
    """4,096 tokens of 4,096 words, 1,024 at a time: in bfloat16, and two numbers in float32."""
    with fake_memory.LiveBytes() as device, torch.no_grad():
        hidden, ids = torch.zeros(4096, 2, device="cuda"), torch.zeros(4096, dtype=torch.long, device="cuda")
        weight = torch.zeros(4096, 2, device="cuda", requires_grad=True)
        head_logprobs(hidden, weight, ids, with_entropy=True, compute_dtype=torch.bfloat16)
    assert device.peaks[""] == pytest.approx((2 + 2 * 4) * 1024 * 4096, rel=0.01)


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
