"""The experts of a mixture are most of its weights, in parameters of three dimensions: they get adapters too."""

import warnings

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM as Auto
from transformers import GraniteMoeConfig, JambaConfig, MixtralConfig, Qwen3MoeConfig

from cases import often
from heedful import ConfigError, GRPOConfig, SFTConfig
from heedful.kernels.packing import hidden_states
from heedful.kernels.weights import same_weights, store_matrices
from heedful.models import add_adapters, byte_tokenizer, load_causal_lm, load_policy, load_trunk
from heedful.models.adapters import expert_parameters, save_model
from heedful.models.load import FourBit, say_unquantized
from heedful.models.shape import load_shape
from heedful.models.source import resolve
from heedful.planning.memory import Lengths, plan_of
from heedful.training import setup
from heedful.training.setup import float32_experts

SHAPE = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTURES = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=24, head_dim=8),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, head_dim=8),
    "granitemoe": GraniteMoeConfig(**SHAPE, num_local_experts=4),  # a module for each parameter
}
IDS = byte_tokenizer()("今天天气怎么样？", return_tensors="pt").input_ids


BASE = {"model": "m", "data": "d", "output": "o"}
CPU = torch.device("cpu")


def held(parameters):
    """Bytes of parameters."""
    return sum(p.nbytes for p in parameters)


def options(**changes):
    return SFTConfig(**BASE | {"lora_rank": 2} | changes)


@pytest.fixture(scope="module", params=often(MIXTURES, ("qwen3_moe", "granitemoe")))
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("混合") / "base"
    torch.manual_seed(2)
    lm = Auto.from_config(MIXTURES[request.param])
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(5) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    lm.save_pretrained(folder)
    return folder


one_mixture = pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)


def logits(lm):
    with torch.no_grad():
        return lm.eval()(input_ids=IDS).logits


def adapted(folder, **changes):
    """A model with adapters that change something."""
    lm = load_causal_lm(str(folder))
    add_adapters(lm, options(**changes), base=str(folder), seed=3)
    torch.manual_seed(4)
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return lm


def test_most_weights_are_experts_and_all_are_adapted(folder):
    lm = load_causal_lm(str(folder))
    before, total = logits(lm), sum(p.numel() for p in lm.base_model.layers.parameters())
    experts = expert_parameters(lm)
    assert sum(lm.get_parameter(name).numel() for name in experts) > 0.6 * total
    reference = same_weights(lm)
    add_adapters(lm, options(), base=str(folder), seed=3)
    # Fresh adapters change nothing but the order of sums: W + 0 is a copy, with a layout of its own.
    torch.testing.assert_close(logits(lm), before, rtol=0.0, atol=1e-6)
    trained = [name for name, p in lm.named_parameters() if p.requires_grad]
    assert all(".lora_" in name for name in trained)
    linear = [m for m in load_trunk(str(folder)).modules() if isinstance(m, torch.nn.Linear)]
    assert len(trained) == 2 * (len(linear) + len(experts))
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.1)
    assert (logits(lm) - before).abs().max() > 0.1
    assert torch.equal(logits(reference), before), "the reference shares the weights, not the adapters"


@pytest.mark.parametrize(
    ("folder", "targets", "adapts"),
    [("qwen3_moe", "all-linear", True), ("granitemoe", "all-linear", True), ("qwen3_moe", "q_proj,v_proj", False)],
    indirect=["folder"],
)
def test_experts_with_adapters_stay_in_float32_as_planned(folder, targets, adapts):
    """Byte for byte, on a GPU: PEFT adds adapters to an expert's matrix in its dtype, where small steps would be lost."""
    config = options(lora_targets=targets)
    policy = load_policy(
        str(folder), device=CPU, compute_dtype=torch.bfloat16, stored=torch.bfloat16,
        float32_experts=float32_experts(config),
    )  # fmt: skip
    experts = {policy.lm.get_parameter(name) for name in expert_parameters(policy.lm)}
    assert {p.dtype for p in experts} == {torch.float32 if adapts else torch.bfloat16}
    add_adapters(policy.lm, config, base=str(folder), seed=3)
    step = plan_of(config, lambda _: load_shape(str(folder)), Lengths(16), device="cuda", half=True).phases["step"]
    assert step["policy, frozen"] == held(p for p in policy.lm.parameters() if not p.requires_grad)
    learned = held(p for p in policy.lm.parameters() if p.requires_grad)
    assert (learned == step["policy, trained"]) == adapts, "of linear layers all targets are planned"
    rows = policy(IDS.repeat(2, 1), torch.ones(2, IDS.shape[1], dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool))
    rows.logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.lm.parameters() if p.requires_grad)


def test_stored_experts_multiply_in_the_precision_of_all_products(folder):
    """They give what autocast makes of float32 experts where it casts them (transformers' ``eager``), up to rounding."""
    lm = Auto.from_pretrained(folder).bfloat16().float()
    name = next(name for name in expert_parameters(lm)).rpartition(".")[0]
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(40, 32, generator=generator)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in states])
    weights = torch.rand(40, 2, generator=generator)

    def output(way):
        lm.set_experts_implementation(way)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return lm.get_submodule(name)(states, chosen, weights)

    cast, exact = output("eager"), output("grouped_mm")
    store_matrices(lm, torch.bfloat16, experts=expert_parameters(lm))
    stored = output("grouped_mm")
    assert all(lm.get_parameter(name).dtype == torch.bfloat16 for name in expert_parameters(lm))
    assert not torch.equal(stored, exact)
    scale = float(cast.abs().max())
    torch.testing.assert_close(stored / scale, cast / scale, rtol=0.0, atol=2**-8)  # the last place of bfloat16


@one_mixture
def test_four_bits_say_that_experts_have_none(folder):
    lm = Auto.from_pretrained(folder)
    four = FourBit(CPU, torch.bfloat16)
    count = sum(lm.get_parameter(name).numel() for name in expert_parameters(lm))
    with pytest.warns(UserWarning, match=rf"m is a mixture whose experts \({count:,} weights\) .* not quantised"):
        say_unquantized(lm, "m", four)
    with warnings.catch_warnings(action="error"):
        say_unquantized(lm, "m", None)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [pytest.param("float32", torch.float32, marks=pytest.mark.exhaustive), ("bfloat16", torch.bfloat16)],
)
@one_mixture
def test_a_reference_has_experts_as_its_policy_has(folder, monkeypatch, tmp_path, weights, expected):
    """So that the KL is 0 before the first update; a reward model's are stored as the products read them."""
    monkeypatch.setattr(setup, "frozen_dtype", lambda _device, compute_dtype: compute_dtype)
    Auto.from_pretrained(folder).bfloat16().save_pretrained(tmp_path)  # as most are, so no embedding is rounded
    folder = tmp_path
    config = GRPOConfig(**BASE, rewards=("model:r",), dtype="bfloat16", weights_dtype=weights)
    policy = setup.load_trained(config, resolve(str(folder)), CPU, torch.bfloat16)
    reference = setup.load_reference(config, resolve(str(folder)), policy)
    for model in (policy, reference):
        assert {model.lm.get_parameter(name).dtype for name in expert_parameters(model.lm)} == {expected}
    mask = torch.ones_like(IDS, dtype=torch.bool)
    assert torch.equal(policy(IDS, mask, mask[:, 1:]).logprobs, reference(IDS, mask, mask[:, 1:]).logprobs)
    step = plan_of(config, lambda _: load_shape(str(folder)), Lengths(16, 8), device="cuda", half=True).phases["step"]
    assert step["reference"] == held(reference.lm.parameters())
    assert step["policy, trained"] == held(policy.lm.parameters())
    stored = load_policy(str(folder), device=CPU, compute_dtype=torch.bfloat16, stored=torch.bfloat16)
    head = stored.lm.get_output_embeddings().weight
    assert step["reward models"] == held(p for p in stored.lm.parameters() if p is not head)


def test_saved_adapters_come_back_here_and_in_peft(folder, tmp_path):
    """Merged into the model and into its bare trunk."""
    lm = adapted(folder)
    expected = logits(lm)
    save_model(lm, tmp_path / "adapters")
    merged = load_causal_lm(str(tmp_path / "adapters"))
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert merged.state_dict().keys() == load_causal_lm(str(folder)).state_dict().keys()
    trunk = load_trunk(str(tmp_path / "adapters")).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            hidden_states(trunk, IDS), hidden_states(merged.eval().base_model, IDS), rtol=1e-4, atol=1e-4
        )
    with warnings.catch_warnings(action="ignore"):
        torch.testing.assert_close(
            logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")), expected, rtol=1e-4, atol=1e-4
        )


@one_mixture
def test_named_targets(folder, tmp_path):
    """Of one of a module's two parameters too."""
    lm = adapted(folder, lora_targets="q_proj,experts.down_proj")
    assert any("experts.lora_A" in name for name, _ in lm.named_parameters())
    save_model(lm, tmp_path / "adapters")
    torch.testing.assert_close(logits(load_causal_lm(str(tmp_path / "adapters"))), logits(lm), rtol=1e-4, atol=1e-4)


@one_mixture
def test_dropout_in_front_of_experts_is_refused(folder):
    with pytest.raises(
        ConfigError, match=r"--lora-dropout 0.1 is not supported for .*experts.*--lora-targets .*q_proj"
    ):
        add_adapters(load_causal_lm(str(folder)), options(), base=str(folder), seed=3, dropout=0.1)


def test_a_convolution_is_no_expert():
    lm = Auto.from_config(
        JambaConfig(**SHAPE, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8)
    )
    assert any(p.ndim == 3 for name, p in lm.named_parameters() if "conv1d" in name)
    assert all("experts" in name for name in expert_parameters(lm))
