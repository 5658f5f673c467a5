"""benchmarks/gpu.py runs on a CPU with toy shapes, and its limits are those worked out by hand."""

import contextlib
import functools
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from heedful.models import load_causal_lm
from jsonl import read_jsonl

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
MEASURED = (
    "sampler, batch 8",
    "sampler with --cuda-graphs, batch 8",
    "graph steps, greedy, batch 8",
    "sampler, batch 2",
    "sampler with --cuda-graphs, batch 2",
    "graph steps, greedy, batch 2",
    "PPO, E=1",
    "PPO, E=4",
    "GRPO",
)


def module(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def limits():
    yield module("gpu_limits")
    del sys.modules["gpu_limits"]


@pytest.fixture(scope="module")
def shapes():
    yield module("gpu_models").shapes(smoke=False)
    del sys.modules["gpu_models"]


def gpu(*arguments):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
def test_every_measurement_is_made_and_written_down(tmp_path):
    done = gpu("--smoke", "--iterations=1", f"--output={tmp_path}", "--peer-ppo=no-such-python")
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(tmp_path / "gpu.jsonl")
    toys = ("toy GPT-2", "toy Qwen2", "toy Llama")
    measured = [what for what in MEASURED if "--cuda-graphs" not in what]
    assert [(row["shape"], row["what"]) for row in rows] == [(toy, what) for toy in toys for what in measured]
    assert done.stdout.count("Left out: ") == len(toys) * (len(MEASURED) - len(measured) + 1)
    assert all(
        f"Left out: {toy}, {what}: cpu has no CUDA graphs." in done.stdout
        for toy in toys
        for what in set(MEASURED) - set(measured)
    )
    for row in rows:
        assert min(value for value in row.values() if not isinstance(value, str)) > 0
        assert row["percent_of_limit"] == pytest.approx(100 * row["limit_seconds"] / row["seconds"], rel=1e-2)
    assert all(f"| {row['shape']} | {row['what']} | " in done.stdout for row in rows)
    assert all(f"Left out: {toy}, TRL PPO, E=4, tuned: FileNotFoundError" in done.stdout for toy in toys)


@pytest.mark.exhaustive
def test_what_no_longer_fits_is_left_out_and_named(tmp_path):
    done = gpu("--smoke", "--minutes=0", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Left out: ") == 3 * len(MEASURED)
    assert not (tmp_path / "gpu.jsonl").exists()


def test_what_runs_without_graphs_is_left_out_with_the_reason(tmp_path, monkeypatch):
    """Its time would stand in the table as that of graphs. Other warnings say nothing of what was measured."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("gpu")
    report = script.Report(tmp_path / "gpu.jsonl", torch.device("cpu"), deadline=float("inf"))

    def warned(message):
        warnings.warn(message, stacklevel=2)
        return {"seconds": 2.0}

    for what, message in (("steps", "LM is sampled without CUDA graphs, so slower: it walks"), ("PPO", "it rains")):
        with contextlib.nullcontext() if what == "steps" else pytest.warns(UserWarning, match="it rains"):
            report.measure("shape", what, functools.partial(warned, message), limit=1.0, tokens=1, times=1)
    assert report.left_out == ["shape, steps: LM is sampled without CUDA graphs, so slower: it walks"]
    assert [row["what"] for row in report.rows] == ["PPO"]
    assert report.shares == {"PPO": 0.5}


def test_models_are_as_the_library_loads_them(tmp_path, monkeypatch):
    """Random ones would else attend by torch's own attention, with a cache that grows, and another gradient."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("gpu_models")
    config = script.shapes(smoke=True)["toy Qwen2"]
    made = script.make_model(AutoModelForCausalLM.from_config, config, torch.device("cpu"))
    made.save_pretrained(tmp_path)
    loaded = load_causal_lm(str(tmp_path))
    assert made.config._attn_implementation == loaded.config._attn_implementation == "heedful"
    assert made.get_input_embeddings().padding_idx is loaded.get_input_embeddings().padding_idx is None
    assert made.training is loaded.training is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.exhaustive
def test_without_a_device_there_is_one_line_and_exit_code_1(tmp_path):
    done = gpu(f"--output={tmp_path / 'new'}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip().splitlines() == [
        "gpu.py: no CUDA device here; --smoke runs the same code with toy shapes on the CPU"
    ]
    assert not (tmp_path / "new").exists()


def test_weights_are_those_of_the_models(limits, shapes):
    """GPT-2: 12 x 12 x 768^2 and 768 x 50,257; Qwen2.5-0.5B and Llama-3.2-1B as published, without norms and biases."""
    counts = [(limits.Cost(config).body, limits.Cost(config).head) for config in shapes.values()]
    assert counts[0] == (12 * 12 * 768**2, 768 * 50_257)
    assert counts[1] == (24 * (896 * (14 + 4) * 64 + 896**2 + 3 * 896 * 4864), 896 * 151_936)
    assert [sum(pair) / 1e6 for pair in counts] == pytest.approx([124, 494, 1236], rel=1e-2)


def test_seconds_of_each_phase_on_an_h200(limits, shapes):
    """512 responses of 128 tokens to prompts of 128, four epochs, in ms: worked out apart from this code."""
    work, rates = limits.Workload(batch=512), limits.Rates(989e12, 4.8e12)
    expected = {  # prefill and decode; reference; value; update; optimizer
        "GPT-2 124M": (12 + 104, 28, 23, 617, 6),
        "Qwen2.5 0.5B": (48 + 67, 114, 96, 2528, 25),
        "Llama-3.2 1.2B": (130 + 165, 295, 260, 6661, 62),
    }
    for shape, (rollout, reference, value, update, optimizer) in expected.items():
        cost = limits.Cost(shapes[shape])
        whole = cost.iteration(work, rates, epochs=4, critic=True)
        assert 1e3 * cost.rollout(work, rates, prompts=512) == pytest.approx(rollout, rel=0.02)
        assert 1e3 * cost.one_pass(work, head=True) / 989e12 == pytest.approx(reference, rel=0.02)
        assert 1e3 * cost.one_pass(work, head=False) / 989e12 == pytest.approx(value, rel=0.02)
        assert 1e3 * cost.update(work, epochs=4, critic=True) / 989e12 == pytest.approx(update, rel=0.01)
        assert 1e3 * whole == pytest.approx(rollout + reference + 2 * value + update + optimizer, rel=0.01)


def test_a_group_reads_its_prompt_once_and_has_no_critic(limits, shapes):
    """With rates of one: FLOPs, bytes being free, by hand for two rows of one prompt of two and a response of one."""
    config = shapes["GPT-2 124M"]
    work, rates = limits.Workload(batch=2, prompt=2, response=1, group=2), limits.Rates(1.0, 1e30)
    cost, layers, width = limits.Cost(config), 12, 768
    body, head = cost.body, cost.head
    attention = [2 * layers * width * length * (length + 1) for length in range(4)]
    prefill = 2 * body * 2 + attention[2] + 2 * head
    decode = 2 * (2 * (body + head) + attention[3] - attention[2])
    one_pass = 2 * (2 * body * 3 + attention[3] + 2 * head)
    assert cost.iteration(work, rates, epochs=1, critic=False) == prefill + decode + one_pass + 3 * one_pass


def test_weights_cache_and_optimizer_are_what_is_moved(limits, shapes):
    """FLOPs being free, in bytes: weights read for prefill and one step, three tokens' keys and values a row, AdamW twice."""
    work, rates = limits.Workload(batch=2, prompt=2, response=1), limits.Rates(1e30, 1.0)
    cost = limits.Cost(shapes["Qwen2.5 0.5B"])
    weights = cost.body + cost.head
    cache = 2 * 3 * (2 * 24 * 2 * 64) * 2
    assert cost.iteration(work, rates, epochs=2, critic=False) == 2 * 2 * weights + cache + 2 * 30 * weights
    assert cost.iteration(work, rates, epochs=2, critic=True) == 2 * 2 * weights + cache + 2 * 2 * 30 * weights
