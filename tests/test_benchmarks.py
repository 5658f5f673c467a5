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

from heedful import PPOConfig
from heedful.data.chat import Renderer, RewardInputs
from heedful.models import load_tokenizer

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


@pytest.fixture
def small(flops):
    """6 x 4 and twice 6 x 2 in a layer's attention, 4 x 6 behind it, twice 6 x 5 and 5 x 6 in the feed-forward part."""
    return flops.Decoder(
        layers=3, hidden=6, heads=2, kv_heads=1, head_dim=2, intermediate=5, vocabulary=7, gated=True, tied=False
    )


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


def test_one_pass_is_a_third_of_an_update(flops, small):
    """The reference has a head, a critic or reward model none: 2 x 7 x 6 FLOPs a response token between them."""
    reference, value = (
        flops.score(small, LENGTHS, head_tokens=tokens, micro_batch_size=2, width=2) for tokens in (11, 0)
    )
    update = flops.train(
        small, small, LENGTHS, head_tokens=11, epochs=1, steps=1, micro_batch_size=2, width=2
    ).total_flops
    assert reference.total_flops - value.total_flops == 2 * 7 * 6 * 11
    assert update == 3 * (reference.total_flops + value.total_flops)


BODY = 3 * (6 * 4 + 2 * 6 * 2 + 4 * 6 + 3 * 6 * 5)


def test_weights_of_a_model(flops, small):
    assert small.body_weights == BODY
    assert small.parameters(head=True) == BODY + 2 * 6 * 7
    assert small.parameters(head=False) == BODY + 6 * 7


def test_weights_are_those_of_real_models(flops, model):
    """All but norms, biases and positions."""
    for architecture in ("gpt2", "qwen3"):
        lm = model(architecture)
        matrices = sum(p.numel() for n, p in lm.named_parameters() if p.dim() == 2 and "wpe" not in n)
        assert flops.decoder_of(lm.config).parameters(head=True) == matrices


def test_decoding_shrinks_with_the_rows_that_are_left(flops, small):
    """Three rows in step 1, two in steps 2 and 3, one in steps 4 and 5, none in step 6: its first token is the prefill's."""
    work = flops.decode(small, (5, 3, 4, 2), (4, 1, 6, 2), width=2)
    head = {p.rows: f for p, f in work.flops.items() if p.columns == 7}
    assert head == {rows: 2 * 6 * 7 * steps * rows for rows, steps in ((3, 1), (2, 2), (1, 2))}
    two_heads_a_cache = {flops.Product(3, 2, 2, 4, weights=3), flops.Product(3, 2, 4, 2, weights=3)}
    assert two_heads_a_cache <= set(work.flops), "in step 1: three caches of 14 / 3 tokens in the mean"
    keys = (6 + 5 + 3) + (7 + 6) + (8 + 7) + 8 + 9
    cache = 2 * 3 * 1 * 2 * 2
    weights = 2 * (BODY + 6 * 7)
    assert work.bytes == 5 * weights + cache * keys
    assert work.held == weights + cache * (5 + 3 + 4 + 2 + 4 + 1 + 6 + 2)
    assert work.total_flops == 2 * (BODY + 6 * 7) * (3 + 2 * 2 + 2) + 4 * 3 * 2 * 2 * keys


def test_what_is_moved(flops, small):
    width = {"width": 2}
    assert flops.prefill(small, PROMPTS, **width).bytes == 2 * (BODY + 6 * 7)
    assert flops.sampling(small, RESPONSES).bytes == 4 * 7 * 11
    settings = {"head_tokens": 11, "epochs": 1, "steps": 3, "micro_batch_size": 2}
    assert flops.train(small, None, LENGTHS, **settings, **width).bytes == 3 * 2 * 2 * (BODY + 42)
    assert flops.train(small, small, LENGTHS, **settings, **width).bytes == 3 * 2 * 2 * (2 * BODY + 42)
    assert flops.optimizer(10, steps=3, width=2).bytes == 3 * 10 * 30
    assert flops.optimizer(10, steps=3, width=4).bytes == 3 * 10 * 28


def test_products_have_the_size_of_a_micro_batch(flops, small):
    """Eight rows of 12 tokens, two at a time: 24 tokens a product, 2 x 2 heads, 12 positions with 12; 4 logits a row."""
    work = flops.score(small, [12] * 8, head_tokens=32, micro_batch_size=2, width=2)
    sizes = {(p.batch, p.rows) for p in work.flops}
    assert sizes == {(1, 24), (4, 12), (1, 8)}
    matrices = {p: f for p, f in work.flops.items() if p.batch == 1}
    passes = {f / (2 * p.rows * p.inner * p.columns * p.weights) for p, f in matrices.items()}
    assert passes == {4, 8}, "four micro-batches of one or two matrices of a shape"


def test_behind_every_product_are_two_of_its_size(flops):
    product = flops.Product(2, 3, 5, 7)
    behind = flops.backward({product: 420.0})
    assert behind == {flops.Product(2, 3, 7, 5): 420.0, flops.Product(2, 5, 3, 7): 420.0}


@pytest.mark.parametrize(
    ("number", "nearest"), [(0.3, 1), (1, 1), (5, 4), (5.1, 6), (10.5, 12), (21, 24), (1500, 1536)]
)
def test_sizes_in_steps(flops, number, nearest):
    assert flops.near(number) == nearest


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("limits")


@pytest.fixture
def machine(monkeypatch, flops):
    """A machine of known rates: 200 FLOP/s of products of three rows, 500 of large ones, 40 bytes a second of 1 MiB."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("machine")
    known = module.Machine(torch.device("cpu"), torch.float32)
    known.rates = dict.fromkeys(module.LARGE, 500.0) | {flops.Product(1, 3, 5, 7): 200.0}
    known.bandwidths = {2**20: 40.0, 2**21: 20.0}
    return known


def test_limits_of_known_rates(flops, machine):
    """Products at the best rate or at their own, or all bytes from the memory that holds them, whichever takes longer."""
    products = {flops.Product(1, 3, 5, 7): 1000.0}
    work = flops.Work(products, bytes=40.0, held=9.0)
    assert (machine.hard(work), machine.attainable(work)) == (1000 / 500, 1000 / 200)
    work = flops.Work(products, bytes=400.0, held=2.0**21)
    assert (machine.hard(work), machine.attainable(work)) == (400 / 20, 400 / 20)
    machine.rates[flops.Product(1, 3, 5, 7)] = 800.0
    assert machine.hard(flops.Work(products)) == 1000 / 800, "a product that is better than large ones is the best"
    machine.maker = (4000.0, 4000.0)
    assert machine.hard(work) == 1000 / 4000


def test_rates_are_measured_once(flops, machine, monkeypatch):
    monkeypatch.setattr(importlib.import_module("machine"), "SECONDS", 0.0)
    for product in (flops.Product(1, 3, 5, 7, weights=4), flops.Product(6, 3, 5, 7)):
        assert machine.rate(product) == machine.rates[product] == machine.rate(product) > 0
    assert machine.bandwidth(3 * 2.0**20) == machine.bandwidths[3 * 2**20] > 0


def test_lengths_of_rows(limits, tiny):
    """As tokens of each model: the end counts where there is one, and a reward model's template adds its own."""
    tokenizer = load_tokenizer(tiny())
    recorder = limits.LengthRecorder(Renderer(tokenizer), RewardInputs(tokenizer))
    given = recorder(
        prompts=["问", "abc"], completions=["好", "de"], completion_ids=[[1, 2], [3]], truncated=[False, True]
    )
    assert given == [None, None]
    assert recorder.batches == [limits.Lengths(prompts=[3, 3], responses=[3, 1], read_by_reward=[3 + 3 + 1, 3 + 2])]
    said = [{"role": "user", "content": "问"}], [{"role": "assistant", "content": "好"}]
    recorder(prompts=[said[0]], completions=[said[1]], completion_ids=[[1, 2]], truncated=[False])
    chat = limits.Lengths(prompts=[3 + 3], responses=[3], read_by_reward=[3 + 3 + 3 + 1])
    assert recorder.batches[1:] == [chat]


def test_parts_of_an_iteration(limits, flops, small):
    """Two responses a prompt, which is read once; a reward model reads tokens of its own; two updates an epoch."""
    settings = {"rollout_batch_size": 4, "minibatch_size": 2, "samples_per_prompt": 2, "ppo_epochs": 3}
    config = PPOConfig(model="m", data="d", output="o", **settings)
    lengths = limits.Lengths(prompts=[5, 5, 3, 3], responses=[4, 1, 6, 2], read_by_reward=[9, 8, 7, 6])
    tiny = replace(small, layers=1)
    models = {"policy": small, "reward": tiny, "width": 2}
    shared = limits.parts_of(lengths, config, critic=None, **models)
    separate = limits.parts_of(lengths, config, critic=tiny, **models)
    assert shared["prefill"].total_flops == flops.prefill(small, [5, 3], width=2).total_flops
    body, attention = 2 * BODY // 3 * (9 + 8 + 7 + 6), sum(tiny.attention(0, length) for length in (9, 8, 7, 6))
    assert shared["reward"].total_flops == body + attention
    value = 2 * BODY // 3 * 29 + sum(tiny.attention(0, length) for length in (9, 6, 9, 5))
    assert (shared["value"].total_flops, separate["value"].total_flops) == (0, value)
    assert separate["train"].total_flops - shared["train"].total_flops == 3 * 3 * value
    updates = 2 * 3
    assert shared["optimizer"].bytes == updates * 30 * small.parameters(head=True)
    assert separate["optimizer"].bytes == updates * 30 * (small.parameters(head=True) + tiny.parameters(head=False))


def test_shares_of_the_limits(limits, flops, machine):
    """Every part moves 20 bytes at 40 a second, train in one iteration 100 and in others 60: three, three and two parts."""
    names = [part for parts in limits.PHASES.values() for part in parts]
    works = [
        {name: flops.Work(bytes=20.0) for name in names} | {"train": flops.Work(bytes=b)} for b in (60.0, 100.0, 60.0)
    ]
    seconds = [{"rollout": x, "score": 1.5, "update": 8.0} for x in (3.0, 60.0, 2.5)]
    rows = {row["phase"]: row for row in limits.rows_of(machine, seconds, works)}
    expected = {
        "rollout": (3.0, 1.5, 50.0),
        "score": (1.5, 1.5, 100.0),
        "update": (8.0, 2.0, 25.0),
        "iteration": (12.5, 5.0, 40.0),
    }
    for limit in ("hard", "attainable"):
        found = {
            name: (row["seconds"], row[limit], row[f"{limit}_percent"])
            for name, row in rows.items()
            if "seconds" in row
        }
        assert found == expected
        assert {row[limit] for name, row in rows.items() if name.startswith("- ")} == {0.5, 1.5}
    lines = limits.table(list(rows.values())).splitlines()
    assert len(lines) == 2 + 4 + 8
    assert lines[2] == "| rollout | 0.0 | 0.00 | 3.000 | 1.5000 | 50 % | 1.5000 | 50 % |"


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
