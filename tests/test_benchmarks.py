"""Benchmarks: the counts of flops.py against what PyTorch counts and numbers by hand; what same_numbers.py calls equal."""

import argparse
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROMPTS, RESPONSES = (5, 3, 4), (4, 1, 6)
LENGTHS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


@pytest.fixture
def flops(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("flops")


@pytest.fixture
def model(tiny):
    """``model(architecture)``: a tiny model whose attention is made of plain products."""

    def load(architecture):
        return AutoModelForCausalLM.from_pretrained(tiny(architecture), attn_implementation="eager")

    return load


def counted(run):
    """FLOPs that PyTorch counts, those of rotary positions (a product of every position with every frequency) left out."""
    with FlopCounterMode(display=False) as counter:
        run()
    by_module = counter.get_flop_counts()
    rotary = sum(sum(c.values()) for name, c in by_module.items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - rotary


@torch.no_grad()
def generate(lm, prompt, response):
    """Token by token, as causal attention is counted: each reads itself and those before it, and nothing is masked."""
    cache = DynamicCache(config=lm.config)
    for position in range(prompt + response - 1):
        module = lm if position >= prompt - 1 else lm.base_model
        module(input_ids=torch.tensor([[position]]), past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_sampling_costs_what_pytorch_counts(flops, model, architecture):
    lm = model(architecture)
    decoder = flops.decoder_of(lm.config)
    parts = [flops.prefill(decoder, PROMPTS, width=2), flops.decode(decoder, PROMPTS, RESPONSES, width=2)]
    run = [counted(lambda p=p, r=r: generate(lm, p, r)) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert sum(part.total_flops for part in parts) == sum(run)


def one_pass(lm, prompt, response, *, with_head):
    """Forward and backward over a whole row, with logits at the response tokens alone or without a head."""
    ids = torch.arange(prompt + response).unsqueeze(0)
    hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
    outputs = lm.get_output_embeddings()(hidden[:, prompt - 1 : -1]) if with_head else hidden
    outputs.sum().backward()


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_an_update_costs_what_pytorch_counts(flops, model, architecture):
    """But for attention, which PyTorch counts over all pairs of positions, later ones too."""
    lm = model(architecture)
    decoder = flops.decoder_of(lm.config)
    all_pairs = sum(4 * decoder.layers * decoder.heads * decoder.head_dim * length**2 for length in LENGTHS)
    causal = sum(decoder.attention(0, length) for length in LENGTHS)
    settings = {"head_tokens": sum(RESPONSES), "epochs": 2, "steps": 4, "micro_batch_size": 2, "width": 2}
    policy, value = (
        sum(
            counted(lambda p=p, r=r, head=head: one_pass(lm, p, r, with_head=head))
            for p, r in zip(PROMPTS, RESPONSES, strict=True)
        )
        for head in (True, False)
    )
    shared = flops.train(decoder, None, LENGTHS, **settings).total_flops
    separate = flops.train(decoder, decoder, LENGTHS, **settings).total_flops
    assert shared == 2 * (policy - 3 * (all_pairs - causal))
    assert separate - shared == 2 * (value - 3 * (all_pairs - causal))


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
        (
            {"weight": 3.0},
            ["final/model.safetensors w: differs by up to 8.9e-01 of its size", "1 runs differ: first"],
        ),
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


def test_cases_of_two_revisions_have_names_of_their_own(same_numbers):
    cases = importlib.import_module("same_numbers_cases").cases()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) >= 70
    assert names[0].startswith("start-")


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_can_be_imported(monkeypatch, name):
    """What it takes from the library is there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert importlib.import_module(name).__doc__


@pytest.fixture
def parity(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("parity")


def test_parity_notices_a_weight_a_loss_and_a_norm(parity, tmp_path):
    """Both sides are heedful's own run here: equal, until one number is not. TRL is given what it needs to repeat the run."""
    parity.make_models(tmp_path)
    start = load_file(tmp_path / "policy" / "model.safetensors")
    for name in ("IPO", "GRPO, two updates"):
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
            theirs
            | {"weights": theirs["weights"] | {"model.norm.weight": theirs["weights"]["model.norm.weight"] + 1e-5}},
        ):
            assert not parity.compare(case, ours, changed, start).is_as_expected
        failed = parity.compare(case, ours, {"error": "没有"}, start)
        lines = parity.table([row, failed]).splitlines()
        assert lines[2].startswith(f"| {name} | `heedful {case.command} --")
        assert "| 0.0e+00 | 0.0e+00 | 0.0e+00 (" in lines[2]
        assert "**not as expected**" in lines[3]
        assert "TRL did not run: 没有" in lines[3]
