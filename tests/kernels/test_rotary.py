"""Rotary embeddings that read memory less often: the numbers and gradients of the formula, and which layers they replace."""

import copy
import math
from types import FunctionType

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as of_neighbours
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, rotate_half

from heedful.kernels import rotary
from heedful.kernels.rotary import rotate, use_lean_rotations
from heedful.models.load import load_policy, load_reward_model, load_value_model
from heedful.models.tokenizer import load_tokenizer

CPU = torch.device("cpu")
QUARTER = torch.tensor([[math.pi / 2, math.pi / 2]], dtype=torch.float64)
"""Angles of one pair of numbers: a quarter of a turn."""


def plain(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def test_golden_a_quarter_of_a_turn():
    """(3, 4) becomes (-4, 3)."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(rotate(x, QUARTER.cos(), QUARTER.sin()), torch.tensor([[-4.0, 3.0]]).double())


def test_golden_halves_turn_with_each_other_not_neighbours():
    """Of (1, 2, 3, 4), 1 turns with 3 and 2 with 4."""
    x, angles = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).double(), QUARTER.repeat(1, 2)
    expected = torch.tensor([[-3.0, -4.0, 1.0, 2.0]]).double()
    torch.testing.assert_close(rotate(x, angles.cos(), angles.sin()), expected)


def test_golden_gradients_turn_back():
    """y = (-x2, x1), so the upstream (5, 7) is (7, -5) of x."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    (rotate(x, QUARTER.cos(), QUARTER.sin()) @ torch.tensor([5.0, 7.0]).double()).backward()
    torch.testing.assert_close(x.grad, torch.tensor([[7.0, -5.0]]).double())


def test_invariance_products_depend_on_the_distance_only():
    """q at position m and k at position n multiply to a number of m - n (Su et al. 2021, equation 16)."""
    q, k, theta = torch.randn(8).double(), torch.randn(8).double(), torch.rand(4).double().repeat(2)

    def product(m, n):
        return rotate(q, (m * theta).cos(), (m * theta).sin()) @ rotate(k, (n * theta).cos(), (n * theta).sin())

    torch.testing.assert_close(product(7, 3), product(11, 7))
    assert not torch.isclose(product(7, 3), product(7, 4))


@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 3, 4, 6)])
def test_gradients_are_those_of_the_formula(shape):
    """Also of angles whose halves differ, and of tensors that are not contiguous."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, *shape[-2:], dtype=torch.float64)
    if x.numel():
        assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x)
    upstream = torch.randn(shape, dtype=torch.float64).transpose(0, -1).contiguous().transpose(0, -1)
    own = torch.autograd.grad(rotate(x, cos, sin), x, upstream)
    torch.testing.assert_close(own, torch.autograd.grad(plain(x, cos, sin), x, upstream))


def test_numbers_do_not_depend_on_whether_something_learns():
    """The ratio before the first update is 1: the pass without gradients has the numbers of the one with them."""
    x, cos, sin = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8), torch.randn(5, 8)
    with torch.no_grad():
        read = rotate(x, cos, sin)
    assert torch.equal(read, rotate(x, cos, sin).detach())


def test_its_numbers_are_those_of_transformers_bit_for_bit():
    q, k, cos, sin = torch.randn(2, 4, 9, 64), torch.randn(2, 2, 9, 64), torch.randn(1, 9, 64), torch.randn(1, 9, 64)
    for found, expected in zip(
        (rotate(x, cos, sin) for x in (q, k)), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        assert torch.equal(found, expected)


def test_it_keeps_only_the_angles():
    kept = []
    x, cos, sin = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8), torch.randn(5, 8)
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda tensor: tensor):
        rotate(x, cos, sin)
    assert set(kept) == {cos.data_ptr(), sin.data_ptr()}


def attention_layer(tiny, kind=LlamaAttention):
    return kind(AutoConfig.from_pretrained(tiny("llama")), layer_idx=0)


def inputs(layer, dtype=torch.float32):
    x = torch.randn(2, 5, layer.config.hidden_size, dtype=dtype)
    angles = torch.rand(1, 5, layer.head_dim // 2, dtype=dtype).repeat(1, 1, 2)
    mask = torch.zeros(1, 1, 5, 5, dtype=dtype)
    return x, (angles.cos(), angles.sin()), mask


@pytest.fixture
def layer(tiny):
    made = attention_layer(tiny)
    made.config._attn_implementation = "eager"
    return made


def test_layers_of_the_formula_are_replaced_with_the_same_numbers_gradients_and_files(layer):
    before, x = copy.deepcopy(layer), inputs(layer)
    use_lean_rotations(layer, CPU)
    assert type(layer) is not LlamaAttention
    assert isinstance(layer, LlamaAttention)
    assert list(layer.state_dict()) == list(before.state_dict())
    ours, theirs = (one(*x)[0] for one in (layer, before))
    torch.testing.assert_close(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for own, other in zip(layer.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    use_lean_rotations(layer, CPU)
    assert torch.equal(copy.deepcopy(layer)(*x)[0], ours)


def test_it_is_our_function_that_rotates(layer, monkeypatch):
    calls, x = [], inputs(layer)
    monkeypatch.setattr(rotary, "rotate", lambda x, cos, sin: calls.append(x.shape) or plain(x, cos, sin))
    before = copy.deepcopy(layer)
    use_lean_rotations(layer, CPU)
    layer(*x)
    assert len(calls) == 2
    before(*x)
    assert len(calls) == 2, "layers of other models of this process stay as they are"
    assert LlamaAttention.forward.__globals__["apply_rotary_pos_emb"] is apply_rotary_pos_emb


def test_other_precisions_are_computed_as_before(layer, monkeypatch):
    """What is rounded when is part of the numbers of a half precision."""
    layer, x = layer.bfloat16(), inputs(layer, torch.bfloat16)
    before = layer(*x)[0]
    monkeypatch.setattr(rotary, "rotate", None)
    assert torch.equal(use_lean_rotations(layer, CPU)(*x)[0], before)


class OwnAttention(LlamaAttention):
    """Its forward is that of another class."""


class ClosedAttention(LlamaAttention):
    def forward(self, *arguments, **options):
        return super().forward(*arguments, **options)  # super() is a closure


@pytest.mark.parametrize("kind", [GlmAttention, ClosedAttention])
def test_other_layers_stay(tiny, kind):
    assert of_neighbours is GlmAttention.forward.__globals__["apply_rotary_pos_emb"]
    assert type(use_lean_rotations(attention_layer(tiny, kind), CPU)) is kind


def test_a_class_that_inherits_the_formula_is_replaced(tiny):
    assert issubclass(type(use_lean_rotations(attention_layer(tiny, OwnAttention), CPU)), OwnAttention)


@pytest.mark.parametrize("function", [lambda: None, lambda q, k, cos, sin: (q, k), lambda q, k, cos, sin: q])
def test_functions_of_the_name_that_compute_something_else_are_not_replaced(function):
    assert not rotary._is_plain(function)


def test_layers_on_other_devices_stay(tiny):
    assert type(use_lean_rotations(attention_layer(tiny), torch.device("cuda"))) is LlamaAttention


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_policies_critics_and_reward_models_have_them(tiny, architecture):
    policy = load_policy(tiny(architecture), device=CPU, compute_dtype=torch.float32)
    critic = load_value_model(tiny(architecture), device=CPU, compute_dtype=torch.float32)
    tokenizer = load_tokenizer(tiny(architecture))
    reward = load_reward_model(tiny(architecture), tokenizer, device=CPU, compute_dtype=torch.float32, seed=3)
    for model in (policy, critic, reward):
        layers = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
        assert len(layers) == 2
        assert {type(one).__name__[:4] for one in layers} == {"Lean"}
        assert all(isinstance(type(one).forward, FunctionType) for one in layers)


def test_compiled_code_makes_its_own(layer):
    seen, x = [], inputs(layer)
    use_lean_rotations(layer, CPU)

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.testing.assert_close(torch.compile(layer, backend=backend)(*x)[0], layer(*x)[0])
    assert "neg" in " ".join(seen)
    assert "sub_" not in " ".join(seen)
