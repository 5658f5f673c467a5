"""Gated MLPs that write over what nothing needs: the same bits, and where they keep everything."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from heedful.kernels.gated_mlp import use_lean_mlps
from heedful.models.load import load_policy, load_reward_model, load_value_model
from heedful.models.tokenizer import load_tokenizer

CPU = torch.device("cpu")


def mlp(kind=LlamaMLP, activation="silu", **options):
    return kind(
        LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=4, hidden_act=activation, **options)
    )


def storages(layer, x):
    """Where the gate's product was, and where the input of the last product is."""
    seen = {}
    layer.gate_proj.register_forward_hook(lambda _, __, output: seen.update(gate=output.data_ptr()))
    layer.down_proj.register_forward_pre_hook(lambda _, inputs: seen.update(last=inputs[0].data_ptr()))
    layer(x)
    return seen["gate"], seen["last"]


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_transformers_bit_for_bit(activation, has_bias, dtype):
    plain = mlp(activation=activation, mlp_bias=has_bias).to(dtype)
    lean, x = use_lean_mlps(copy.deepcopy(plain), CPU), torch.randn(2, 9, 16, dtype=dtype)
    assert type(lean) is not LlamaMLP
    assert isinstance(lean, LlamaMLP)
    assert list(lean.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(lean(x), plain(x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lean(x), plain(x))
    results = []
    for layer in (lean, plain):
        output = layer(x)
        output.square().sum().backward()
        results.append([output.detach(), *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_without_gradients_products_are_written_over_and_with_them_kept():
    layer, x = use_lean_mlps(mlp(), CPU), torch.randn(3, 16)
    with torch.no_grad():
        gate, last = storages(layer, x)
    assert gate == last
    gate, last = storages(layer, x)
    assert gate != last


def test_the_activation_is_that_of_the_layer_not_of_the_class():
    first, second = use_lean_mlps(mlp(), CPU), use_lean_mlps(mlp(activation="gelu"), CPU)
    assert type(first) is type(second)
    x = torch.randn(3, 16)
    with torch.no_grad():
        for layer, activation in ((first, nn.functional.silu), (second, nn.functional.gelu)):
            assert torch.equal(layer(x), layer.down_proj(activation(layer.gate_proj(x)) * layer.up_proj(x)))


class TwiceMLP(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


class NormedMLP(LlamaMLP):
    """As BitNet's: a norm of its own, which happens to do nothing yet."""

    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.Identity()


class GatedBlock(LlamaMLP):
    """The formula under another name: nobody promised that it is an MLP."""


class TiedMLP(LlamaMLP):
    """Its gate gives out what it holds."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = nn.Identity()


@pytest.mark.parametrize("kind", [TwiceMLP, NormedMLP, GatedBlock, TiedMLP])
def test_other_mlps_stay(kind):
    assert type(use_lean_mlps(mlp(kind), CPU)) is kind


def test_mlps_on_other_devices_stay():
    assert type(use_lean_mlps(mlp(), torch.device("cuda"))) is LlamaMLP


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_policies_critics_and_reward_models_have_them(tiny, architecture):
    policy = load_policy(tiny(architecture), device=CPU, compute_dtype=torch.float32)
    critic = load_value_model(tiny(architecture), device=CPU, compute_dtype=torch.float32)
    tokenizer = load_tokenizer(tiny(architecture))
    reward = load_reward_model(tiny(architecture), tokenizer, device=CPU, compute_dtype=torch.float32, seed=3)
    for model in (policy, critic, reward):
        layers = [module for module in model.modules() if type(module).__name__.endswith("MLP")]
        assert [type(one).__name__[:4] for one in layers] == ["Lean", "Lean"]


def test_compiled_code_makes_its_own():
    layer, seen = use_lean_mlps(mlp(), CPU), []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    x = torch.randn(4, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))
    assert not any("mul_" in target for target in seen)
