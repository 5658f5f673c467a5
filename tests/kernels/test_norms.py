"""RMS norms that read memory less often: the numbers and gradients of the formula, and which norms they replace."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heedful.kernels.norms import SMALLEST_ROW, rms_norm, use_lean_norms
from heedful.models.load import load_policy

CPU = torch.device("cpu")


def plain(x, weight, eps):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def test_golden():
    """Of (1, 7) the mean square is 25, of which the root is 5."""
    x = torch.tensor([1.0, 7.0], dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, torch.tensor([10.0, 5.0]).double(), 0.0), torch.tensor([2.0, 7.0]).double())


def test_golden_gradients():
    """Of (1, 7), weights (10, 5) and upstream (1, 0): dy_1 = 10 r dx_1 + 10 x_1 dr with r = 1/5 and
    dr = -r^3 (x_1 dx_1 + x_2 dx_2) / 2, so dx_1 = 2 - 10 / 250 = 1.96 and dx_2 = -70 / 250 = -0.28."""
    x = torch.tensor([[1.0, 7.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([10.0, 5.0], dtype=torch.float64, requires_grad=True)
    rms_norm(x, weight, 0.0)[0, 0].backward()
    torch.testing.assert_close(x.grad, torch.tensor([[1.96, -0.28]]).double())
    torch.testing.assert_close(weight.grad, torch.tensor([0.2, 0.0]).double())


def test_golden_epsilon_is_below_the_root():
    """A row of zeros is 0 times 1/sqrt(eps); a row of sqrt(3) with eps 1 is divided by 2."""
    weight = torch.ones(4, dtype=torch.float64)
    assert not rms_norm(torch.zeros(1, 4).double(), weight, 1e-6).any()
    rows = torch.full((1, 4), math.sqrt(3), dtype=torch.float64)
    torch.testing.assert_close(rms_norm(rows, weight, 1.0), rows / 2)


@pytest.mark.parametrize("shape", [(5,), (0, 5), (3, 5), (2, 3, 4, 5), (0, 130), (3, 130), (2, 2, 130)])
@pytest.mark.parametrize(("learns_x", "learns_weight"), [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_the_formula(shape, learns_x, learns_weight):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=learns_x)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=learns_weight)
    if x.numel():
        assert torch.autograd.gradcheck(lambda *of: rms_norm(*of, 1e-3), (x, weight))
    upstream = torch.randn(shape, dtype=torch.float64).transpose(0, -1).contiguous().transpose(0, -1)
    inputs = [one for one in (x, weight) if one.requires_grad]
    own = torch.autograd.grad(rms_norm(x, weight, 1e-3), inputs, upstream)
    torch.testing.assert_close(own, torch.autograd.grad(plain(x, weight, 1e-3), inputs, upstream))


@pytest.mark.parametrize("size", [SMALLEST_ROW - 1, SMALLEST_ROW])
def test_wide_rows_learn_by_the_kernel_of_a_layer_norm(size):
    """It centres what it normalises, which an RMS norm does not: here the mean of w g is far from 0."""
    x = (torch.randn(6, size, dtype=torch.float64) + 3).requires_grad_()
    weight, upstream = torch.rand(size, dtype=torch.float64).requires_grad_(), torch.rand(6, size, dtype=torch.float64)
    with torch.profiler.profile() as profile:
        own = torch.autograd.grad(rms_norm(x, weight, 1e-3), (x, weight), upstream)
    names = {event.name for event in profile.events()}
    assert ("aten::native_layer_norm_backward" in names) == (size >= SMALLEST_ROW)
    torch.testing.assert_close(own, torch.autograd.grad(plain(x, weight, 1e-3), (x, weight), upstream))


def test_numbers_do_not_depend_on_whether_something_learns():
    """The ratio before the first update is 1: the pass without gradients has the numbers of the one with them."""
    x, weight = torch.randn(3, 7), torch.randn(7, requires_grad=True)
    with torch.no_grad():
        read = rms_norm(x, weight, 1e-6)
    assert torch.equal(read, rms_norm(x, weight, 1e-6).detach())


@pytest.mark.parametrize("shape", [(7, 33), (130, 256), (2, 9, 4, 64)])
def test_its_numbers_are_those_of_transformers_bit_for_bit(shape):
    layer, x = norm(LlamaRMSNorm, shape[-1]), torch.randn(shape)
    assert torch.equal(rms_norm(x, layer.weight, layer.variance_epsilon), layer(x))


def test_it_keeps_its_input_once():
    """Autograd keeps the input and the input over its root."""

    def kept(function):
        numbers = []
        x, weight = torch.randn(16, 64, requires_grad=True), torch.randn(64, requires_grad=True)
        with saved_tensors_hooks(lambda tensor: numbers.append(tensor.data_ptr()) or tensor, lambda tensor: tensor):
            function(x, weight, 1e-6)
        return len({*numbers} - {weight.data_ptr()})

    assert kept(rms_norm) == 2  # and the roots, one number per row
    assert kept(plain) == 3


def norm(kind, size=8):
    made = kind(size, eps=1e-5)
    with torch.no_grad():
        made.weight.normal_()
    return made


def test_norms_of_the_formula_are_replaced_with_the_same_numbers_and_files():
    layer = norm(LlamaRMSNorm)
    before, x = copy.deepcopy(layer), torch.randn(2, 3, 8, requires_grad=True)
    use_lean_norms(layer, CPU)
    assert type(layer) is not LlamaRMSNorm
    assert isinstance(layer, LlamaRMSNorm)
    assert list(layer.state_dict()) == list(before.state_dict())
    torch.testing.assert_close(layer(x), before(x))
    assert "RMSNorm" in layer(x).grad_fn.name()
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    use_lean_norms(layer, CPU)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


class TwiceRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class Norm(LlamaRMSNorm):
    """The formula under another name: nobody promised that it is a norm."""


class BiasedRMSNorm(LlamaRMSNorm):
    def __init__(self, size, eps):
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))


@pytest.mark.parametrize("kind", [GemmaRMSNorm, TwiceRMSNorm, Norm, BiasedRMSNorm])
def test_other_norms_stay(kind):
    assert type(use_lean_norms(norm(kind), CPU)) is kind


def test_norms_on_other_devices_stay():
    assert type(use_lean_norms(norm(LlamaRMSNorm), torch.device("cuda"))) is LlamaRMSNorm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_computed_as_before(dtype):
    """What is rounded when is part of the numbers of a half precision."""
    layer, x = norm(LlamaRMSNorm), torch.randn(2, 8, dtype=dtype)
    assert torch.equal(use_lean_norms(copy.deepcopy(layer), CPU)(x), layer(x))
    half = layer.to(dtype)
    assert torch.equal(use_lean_norms(copy.deepcopy(half), CPU)(x.float()), half(x.float()))


def test_autocast_rounds_none_of_it():
    layer = use_lean_norms(norm(LlamaRMSNorm), CPU)
    x = torch.randn(4, 8, requires_grad=True)

    def gradients():
        layer.weight.grad = x.grad = None
        layer(x).square().sum().backward()
        return x.grad, layer.weight.grad

    expected = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_policies_have_them(tiny, architecture):
    policy = load_policy(tiny(architecture), device=CPU, compute_dtype=torch.float32)
    norms = [module for module in policy.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(norms) == 2 * (4 if architecture == "qwen3" else 2) + 1
    assert {type(one).__name__[:4] for one in norms} == {"Lean"}


def test_compiled_code_makes_its_own():
    layer = use_lean_norms(norm(LlamaRMSNorm), CPU)
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    x = torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))
    assert any("rsqrt" in target for target in seen)
    assert not any("square" in target for target in seen)
