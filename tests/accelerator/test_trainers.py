"""heedful on the pretend accelerator: the CPU's numbers bit for bit, and how often the host may wait for the device."""

import contextlib
import io
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretend_device import phase, phases
from rehearsal import (
    CASES,
    DEVICE,
    HEAD,
    STEPS,
    Row,
    both,
    equal,
    line_of,
    prepare,
    run,
    watch,
    without_kernels_of_the_cpu,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification

from heedful import PPOConfig, core, devices, faults, make_tiny_model
from heedful.cli.chat import Conversation
from heedful.configs.options import SamplingOptions
from heedful.configs.tools import ChatConfig
from heedful.data.batches import Batch, collate
from heedful.data.chat import Renderer
from heedful.engines import generate, kv_cache
from heedful.engines.generate import CHECK_EVERY
from heedful.engines.teacher_forced import token_outputs
from heedful.kernels import weights
from heedful.models import load, load_policy, load_tokenizer
from heedful.models.source import resolve
from heedful.training import compact_adamw
from heedful.training.compact_adamw import CompactAdamW
from heedful.training.setup import load_reference
from heedful.types import MicroBatch

PAGE = Path(__file__).with_name("README.md")
MOST_PER_MINIBATCH = 3
"""Waits in a minibatch: whether its numbers are finite, the gradient norms, and one for what a setting adds."""
MOST_PER_BATCH = 3
"""Waits in sampling for each batch of prompts, however many tokens: transformers looks for padding twice."""
HOST_MOMENTS = {"sft, moments on the host", "ppo, reference and moments on the host"}
"""Copies of weights and gradients go to the host, where they are waited for, once per weight tensor."""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("模型") / "model"
    make_tiny_model("qwen3", folder, hidden_size=32, initializer_range=0.1)
    return str(folder)


PROMPTS = [[20, 21, 22], [23], [24, 25], [26, 27, 28, 29]]


def policy_on(device, folder):
    return load_policy(folder, device=torch.device(device), compute_dtype=torch.float32)


def sampled(policy, options, micro_batch=4):
    generator, limit = torch.Generator().manual_seed(1), MicroBatch(micro_batch)
    return generate.generate(
        policy, PROMPTS, options, stop_ids=range(1, 30), pad_id=0, generator=generator, micro_batch=limit
    )


def waits_in_decoding(policy, tokens):
    """Waits for a batch of prompts with responses of this length."""
    phases.clear()
    with watch(Row()):
        sampled(policy, SamplingOptions(max_new_tokens=tokens, response_length="fixed"))
    return phases["decode"].synchronisations.total()


def allowed(tokens):
    return MOST_PER_BATCH + tokens // CHECK_EVERY


OPTIONS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
}


def test_sampling_has_the_numbers_of_the_cpu(tiny_model):
    without_kernels_of_the_cpu()
    policies = [policy_on(device, tiny_model) for device in ("cpu", DEVICE)]
    for name, options in OPTIONS.items():
        found = [sampled(policy, SamplingOptions(max_new_tokens=8, **options), micro_batch=3) for policy in policies]
        assert found[1].batch.ids.device.type == DEVICE
        assert found[0].own_ids() == found[1].own_ids(), name
        assert torch.equal(found[0].logprobs, found[1].logprobs.cpu()), name


def test_no_token_waits_for_the_device(tiny_model):
    policy = policy_on(DEVICE, tiny_model)
    few, many = (waits_in_decoding(policy, tokens) for tokens in (CHECK_EVERY - 1, 2 * CHECK_EVERY + 1))
    assert few <= allowed(CHECK_EVERY - 1)
    assert many - few == 2, "one check for ended rows in 16 tokens"


# Planted mistakes: each is found


def test_a_trip_to_the_host_or_a_number_read_for_each_token_is_found(tiny_model, monkeypatch):
    next_tokens, draw_from = generate._next_tokens, generate.draw_from

    def draw(*args):
        tokens = draw_from(*args)
        assert tokens.max().item() >= 0
        return tokens

    policy = policy_on(DEVICE, tiny_model)
    with monkeypatch.context() as patched:
        patched.setattr(
            generate, "_next_tokens", lambda logits, *rest: next_tokens(logits.cpu().to(logits.device), *rest)
        )
        assert waits_in_decoding(policy, 8) > allowed(8) + 8
    monkeypatch.setattr(generate, "draw_from", draw)
    assert waits_in_decoding(policy, 8) >= 8


def test_a_mask_made_on_the_host_is_found(tiny_model, monkeypatch):
    made = kv_cache.Slots.mask
    monkeypatch.setattr(kv_cache.Slots, "mask", lambda self, dtype: made(self, dtype).cpu())
    with pytest.raises(RuntimeError, match="at least two devices, pretend:0 and cpu"):
        sampled(policy_on(DEVICE, tiny_model), SamplingOptions(max_new_tokens=3))


def test_a_generator_of_the_wrong_device_is_found(monkeypatch):
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16).to(DEVICE))
    weight.grad = torch.ones_like(weight)
    optimizer = CompactAdamW([{"params": [weight], "lr": 0.1, "weight_decay": 0.0}], betas=(0.9, 0.9), eps=1e-8)
    optimizer.step()
    make = torch.Generator
    monkeypatch.setattr(compact_adamw.torch, "Generator", lambda _device: make())
    with pytest.raises(RuntimeError, match="Expected a 'pretend' device type for generator but found 'cpu'"):
        optimizer.step()


class OnHost(TorchDispatchMode):
    """Counts the numbers that operators of the host make, by operator."""

    def __init__(self):
        super().__init__()
        self.made = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "cpu" and made.numel() > 1:
            self.made[str(function)] += made.numel()
        return made


def test_moments_on_the_host_round_on_the_device_with_the_noise_of_the_device(monkeypatch):
    """Bit for bit the steps of the CPU. On the host nothing is drawn and nothing rounded: copies arrive, and are stepped."""
    monkeypatch.setattr(compact_adamw, "PART", 100)
    generator = torch.Generator().manual_seed(0)
    first, gradients = torch.randn(20, 30, generator=generator), torch.randn(2, 20, 30, generator=generator)
    found = []
    for device in ("cpu", DEVICE):
        weight = nn.Parameter(first.bfloat16().to(device))
        groups = [{"params": [weight], "lr": 1e-2, "weight_decay": 0.1}]
        optimizer = CompactAdamW(groups, betas=(0.9, 0.999), eps=1e-8, device=torch.device("cpu"), seed=5)
        for gradient in gradients:
            weight.grad = gradient.bfloat16().to(device)
            if device == "cpu":
                optimizer.step()
                continue
            with phase("step") as counts, OnHost() as on_host:
                optimizer.step()
            assert counts.bytes["to host"] == 2 * 4 * weight.numel(), "weights and gradients in float32"
            assert counts.bytes["to device"] == 4 * weight.numel()
            assert counts.synchronisations.total() == 6, "one for each chunk"
            assert not [name for name in on_host.made if "random" in name or "bitwise" in name or "where" in name]
            phases.clear()
        assert optimizer.state[weight]["exp_avg"].device.type == "cpu"
        found.append(weight.detach().cpu())
    assert torch.equal(*found)


def test_a_reference_in_main_memory_is_on_the_device_only_while_it_is_read(tiny_model):
    """It was computed on the host."""
    without_kernels_of_the_cpu()
    policy, device = policy_on(DEVICE, tiny_model), torch.pretend
    config = PPOConfig(model=tiny_model, data="d", output="o", rewards=("rule:digits",), reference_device="cpu")
    before = device.memory_allocated()
    reference = load_reference(config, resolve(tiny_model), policy)
    size = sum(p.nbytes for p in reference.parameters())
    assert {p.device.type for p in reference.parameters()} == {"cpu"}
    assert device.memory_allocated() - before < 0.01 * size
    batch = collate(PROMPTS, PROMPTS, pad_id=0).to(torch.device(DEVICE))

    def logprobs(model):
        return token_outputs(model, batch, temperature=1.0, micro_batch=MicroBatch(2)).logprobs

    with phase("read") as counts:
        found = logprobs(reference)
    assert size <= counts.bytes["to device"] < 1.1 * size, "once for all micro-batches"
    assert device.memory_allocated() - before < 0.01 * size
    assert torch.equal(found.cpu(), logprobs(policy).cpu())
    phases.clear()


def test_weights_go_to_the_device_in_chunks_and_in_the_dtype_of_their_file(tiny_model, tmp_path, monkeypatch):
    """What is float32 there is bfloat16 on the way; 4 bytes per weight travelled, after all were float32 on the host."""
    folder = str(shutil.copytree(tiny_model, tmp_path / "half"))
    file = Path(folder, "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, {"format": "pt"})
    monkeypatch.setattr(weights, "CHUNK", 1000)
    with phase("load") as counts:
        policy = load_policy(folder, device=torch.device(DEVICE), compute_dtype=torch.bfloat16)
    matrices, vectors = ([p for p in policy.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False))
    assert {p.dtype for p in matrices} == {torch.float32}
    assert {p.device.type for p in matrices} == {DEVICE}
    travelled = sum(2 * p.numel() for p in matrices) + sum(p.nbytes for p in vectors)
    assert travelled <= counts.bytes["to device"] < 1.02 * travelled
    expected = load_policy(folder, device=torch.device("cpu"), compute_dtype=torch.bfloat16)
    for ours, theirs in zip(policy.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    phases.clear()


def test_an_index_left_behind_is_found(monkeypatch):
    """CUDA takes an index of the host, and copies it each time; anything else on the host is refused."""
    batch, rows = collate(PROMPTS, PROMPTS, pad_id=0).to(torch.device(DEVICE)), torch.tensor([1, 0]).to(DEVICE)
    with phase("right") as right:
        batch.select(rows)
    with phase("left behind") as left:
        batch.select(torch.tensor([1, 0]))
    assert right.copies.total() == 0
    assert left.synchronisations["copy to device"] == left.copies["to device"] == 3
    with pytest.raises(RuntimeError, match="at least two devices"):
        batch.ids.gather(1, torch.tensor([[0]]))


def test_masks_of_a_batch_are_known_on_the_host():
    batch = collate(PROMPTS, PROMPTS, pad_id=0)
    there = batch.to(torch.device(DEVICE))
    part = there.select(devices.upload(torch.tensor([2, 0]), there.ids.device))
    with phase("known") as counts:
        assert torch.equal(devices.on_host(part.response_mask), batch.response_mask[[2, 0]])
        assert devices.on_host(there.attention_mask) is batch.attention_mask
    assert not counts.synchronisations
    part.response_mask.fill_(False)
    assert not devices.on_host(part.response_mask).any(), "a mask that has changed is read anew"
    assert isinstance(part, Batch)


def test_a_tied_matrix_has_the_gradient_of_the_cpu():
    """Where the host does not ask the device how many rows were read, they are added in the same order."""
    gradients = []
    for device in ("cpu", DEVICE):
        weight = nn.Parameter(torch.linspace(-1, 1, 40).view(10, 4).to(device))
        ids = torch.tensor([[3, 1, 3], [7, 7, 0]], device=device)
        rows, matrix = weights._TiedRows.apply(weight, ids)
        (rows.cumsum(1).square().sum() + (rows @ matrix.T).sin().sum()).backward()
        gradients.append(weight.grad.cpu())
    assert torch.equal(*gradients)


def test_repeated_ngrams_are_found_without_waiting():
    for ids in ([[3] * 6, [1, 2, 1, 2, 1, 2]], [[3]]):
        on_host, there = torch.tensor(ids), torch.tensor(ids, device=DEVICE)
        with phase("n-grams") as counts:
            found = core.repeated_ngrams(there, there > 1)
        assert not counts.synchronisations
        assert torch.equal(found.cpu(), core.repeated_ngrams(on_host, on_host > 1))


# Whole runs


def test_equal_rows():
    """Negative control of the comparison itself."""
    row = Row(weights={"a": torch.ones(2), "b": torch.zeros(2)}, metrics=[{"loss": 1.0}])
    assert equal(row, replace(row, weights={name: x.clone() for name, x in row.weights.items()}))
    for other in (
        {"weights": {"a": torch.ones(2)}},
        {"weights": row.weights | {"c": torch.ones(2)}},
        {"weights": row.weights | {"b": torch.ones(2)}},
        {"metrics": [{"loss": 2.0}]},
        {"metrics": []},
    ):
        assert not equal(row, replace(row, **other))
        assert not equal(replace(row, **other), row)
    for missing in ({"weights": {}}, {"metrics": []}):
        assert not equal(replace(row, **missing), replace(row, **missing))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("sft", "ppo") else pytest.mark.exhaustive) for name in CASES]
)
def test_a_trainer_has_the_numbers_of_the_cpu_and_keeps_its_budgets(name, tmp_path):
    without_kernels_of_the_cpu()
    torch.set_num_threads(1)
    prepare(tmp_path, with_reward="model:reward" in str(CASES[name]))
    on_cpu, on_device = both(name, tmp_path)
    print(HEAD, line_of(name, on_cpu, on_device), sep="\n")
    assert equal(on_cpu, on_device)
    assert on_device.waits("decode") <= MOST_PER_BATCH * on_device.batches + on_device.tokens // CHECK_EVERY
    if name not in HOST_MOMENTS:
        steps = on_device.counts.get("minibatch", on_device.counts["update"])
        most = MOST_PER_MINIBATCH + ("rollouts" in CASES[name][1])
        assert steps.synchronisations.total() <= most * on_device.minibatches
        evaluations = STEPS + 1  # at most: before the first step and after each
        assert on_device.waits("metrics") <= 2 * STEPS + evaluations
    assert not any("index" in reason for one in on_device.counts.values() for reason in one.synchronisations)
    found = re.search(rf"^\| {re.escape(name)} \|.*$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found is not None
    assert found.group() == line_of(name, on_cpu, on_device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["sft", "ppo, separate critic", "online-dpo"])
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(name, tmp_path, monkeypatch):
    """Random state, moments and weights come back to the device."""
    prepare(tmp_path)
    whole = run(name, DEVICE, tmp_path)
    kind, options = CASES[name]
    monkeypatch.setitem(CASES, "cut", (kind, options | {"save_every": 1}))
    faults.plan("step.learned:raise@2")
    with pytest.raises(RuntimeError, match="a fault point says so"):
        run("cut", DEVICE, tmp_path)
    faults.plan("")
    assert equal(run("cut", DEVICE, tmp_path), whole)


def test_a_fresh_head_on_the_device_has_the_weights_of_one_on_the_cpu(tiny_model):
    """As of a model with 4-bit weights, which is loaded on its device."""
    heads = []
    for device in ("cpu", DEVICE):
        classifier = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).to(device)
        load._init_head(classifier, 3)
        heads.append(classifier.score.weight.detach().cpu())
    assert torch.equal(*heads)


@pytest.mark.exhaustive
def test_chat_says_what_it_says_on_the_cpu(tiny_model):
    without_kernels_of_the_cpu()
    said = []
    for device in ("cpu", DEVICE):
        config = ChatConfig(model=tiny_model, device=device, max_new_tokens=10, seed=2)
        talk = Conversation(policy_on(device, tiny_model), Renderer(load_tokenizer(tiny_model)), config)
        said.append(["".join(talk.answer(line)) for line in ("你好", "再见")])
    assert said[0] == said[1]
    assert all(said[0])


def test_the_example_of_the_page():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(example, {"__name__": "example"})
    loss, counted, *_ = out.getvalue().splitlines()
    assert re.fullmatch(r"loss \d+\.\d{3}", loss)
    assert f"# {counted}\n" in example


@pytest.mark.exhaustive
def test_a_run_by_its_command(heedful, tiny_model, written, tmp_path):
    """``--device`` takes any device that torch knows; one that is not there is refused."""
    texts = written("texts.jsonl", [{"prompt": f"问{i}", "completion": "好"} for i in range(4)])
    flags = {"model": tiny_model, "data": texts, "max_steps": 1, "batch_size": 4, "eval_fraction": 0}
    with phase("run") as counts:
        assert heedful("sft", device=DEVICE, output=tmp_path / "run", **flags).status == 0
    assert counts.operators > 100
    assert heedful("sft", device="vulkan", output=tmp_path / "other", **flags).status == 2
