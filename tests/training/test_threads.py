"""Threads by the size of a model: the decision, not its seconds."""

import pytest
import torch

from heedful.kernels.cpu import threads
from heedful.kernels.cpu.threads import SMALL, choose_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two(monkeypatch):
    """Two threads that nobody asked for."""
    before = torch.get_num_threads()
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_small_model_gets_one_thread_and_a_line_says_so():
    assert choose_threads(265_344, CPU) == (
        "computes with 1 of 2 threads, which is faster for a model of 265,344 weights (OMP_NUM_THREADS=2 uses all)"
    )
    assert torch.get_num_threads() == 1
    assert not choose_threads(265_344, CPU), "said once"


@pytest.mark.parametrize(("weights", "device"), [(SMALL, CPU), (265_344, torch.device("cuda"))])
def test_other_models_and_devices_keep_all(weights, device):
    assert not choose_threads(weights, device)
    assert torch.get_num_threads() == 2


def test_a_processor_with_avx_512_keeps_all(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not choose_threads(265_344, CPU)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_the_environment_decides(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    assert not choose_threads(265_344, CPU)
    assert torch.get_num_threads() == 2


def test_a_command_chooses_and_a_program_keeps_its_own(heedful, sft_into, tmp_path):
    sft_into(tmp_path / "程序", max_steps=1, eval_fraction=0.0)
    assert torch.get_num_threads() == 2
    outcome = heedful("sft", tmp_path / "程序" / "config.yaml", output=tmp_path / "命令")
    assert outcome.status == 0, outcome.err
    assert "computes with 1 of 2 threads" in outcome.err
    assert torch.get_num_threads() == 1
