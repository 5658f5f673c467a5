"""--compile: the same numbers by compiled layers, once compiled for all lengths; who cannot compile is told so."""

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from heedful import ConfigError, SFTConfig, make_tiny_model
from heedful.kernels.weights import inference_copy
from heedful.models import byte_tokenizer, load_policy, save_policy
from heedful.training.setup import compile_layers, prepare, repeated_layers, resolve_machine

CPU = torch.device("cpu")

# torch's own: the one it hides, but not where warnings are errors, the other it gives while it is imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture
def folder(tmp_path):
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=32, num_layers=2, initializer_range=0.2)
    return tmp_path / "m"


def config(folder, **options):
    return SFTConfig(model=str(folder), data="x", output=folder.parent / "o", dtype="float32", **options)


def prepared(folder, **options):
    policy = load_policy(str(folder), device=CPU, compute_dtype=torch.float32)
    prepare(policy, config(folder, **options), base=str(folder))
    for (
        name,
        parameter,
    ) in policy.named_parameters():  # fresh adapters are 0 in one matrix, and its gradient hides the other
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return policy


def batch(rows, length, *, shorter=1):
    """One prompt is so many tokens shorter than the others."""
    ids = torch.randint(1, 250, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :shorter] = False
    return ids, mask, torch.ones(rows, length - shorter - 3, dtype=torch.bool)


def learned(policy, rows, length, **options):
    """Log-probs and gradients of one pass."""
    logprobs = policy(*batch(rows, length, **options)).logprobs
    (logprobs**2).mean().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return {"logprobs": logprobs.detach(), **gradients}


def assert_alike(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_compiled_layers_compute_the_same_once_compiled_for_every_length(folder, tmp_path):
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = prepared(folder), prepared(folder, compile=True)
    assert_alike(learned(compiled, 3, 20), learned(plain, 3, 20))
    codes = counters["stats"]["unique_graphs"]
    assert codes > 0
    for rows, length in [(3, 31), (5, 12)]:
        assert_alike(learned(compiled, rows, length), learned(plain, rows, length))
    assert counters["stats"]["unique_graphs"] == codes
    with torch.no_grad():
        inference_copy(compiled.lm, torch.float32)(input_ids=batch(2, 9)[0])
    assert counters["stats"]["unique_graphs"] == codes, "the copy ran compiled"
    codes = []
    for rows, length in [(3, 21), (4, 14)]:  # packed: one row, of which there is a code of its own
        assert_alike(learned(compiled, rows, length, shorter=8), learned(plain, rows, length, shorter=8))
        codes.append(counters["stats"]["unique_graphs"])
    assert codes[1] == codes[0]
    save_policy(compiled, byte_tokenizer(), tmp_path / "saved", stop_ids=[0])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert_alike(dict(loaded), dict(plain.lm.state_dict()))


@pytest.mark.exhaustive
def test_compiled_layers_under_adapters_compute_the_same(folder):
    torch._dynamo.reset()
    options = {"lora_rank": 2, "lora_targets": "q_proj,down_proj"}
    plain, compiled = prepared(folder, **options), prepared(folder, **options, compile=True)
    counters.clear()
    assert_alike(learned(compiled, 3, 20), learned(plain, 3, 20))
    assert counters["stats"]["unique_graphs"] > 0


def test_without_a_compiler_the_message_says_what_is_missing(folder, monkeypatch):
    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    torch._dynamo.reset()
    with pytest.raises(
        ConfigError, match=r"--compile: .*no-such-compiler.* needs a C\+\+ compiler .*leave out --compile"
    ):
        resolve_machine(config(folder, compile=True))


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--quantize 4bit", {"quantize": "4bit", "lora_rank": 2}),
        ("--gradient-checkpointing", {"gradient_checkpointing": True}),
    ],
)
def test_what_cannot_be_compiled_is_refused(folder, flag, options):
    with pytest.raises(ConfigError, match=f"--compile does not go with {flag}"):
        config(folder, compile=True, **options)


def test_a_model_without_repeated_layers_is_refused(folder):
    lm = load_policy(str(folder), device=CPU, compute_dtype=torch.float32).lm
    assert repeated_layers(lm) is lm.model.layers
    lm.model.layers = torch.nn.Sequential(*lm.model.layers)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no list of repeated layers"):
        compile_layers(lm)
