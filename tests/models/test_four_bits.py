"""4-bit weights and 8-bit moments, with bitsandbytes' kernels for a CPU."""

import copy

import pytest
import torch

from heedful import SFTConfig, make_tiny_model
from heedful.kernels.weights import inference_copy
from heedful.models import load_policy
from heedful.models.load import FourBit
from heedful.training.optimization import make_optimizer

bitsandbytes = pytest.importorskip("bitsandbytes")
CPU = torch.device("cpu")
SFT = {"model": "m", "data": "d", "output": "o"}


@pytest.fixture
def policy(tmp_path):
    """A policy in 4 bits; its rows have whole blocks of 64 weights, as bitsandbytes wants it on a CPU."""
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=128, num_layers=1)
    where = {"device": CPU, "compute_dtype": torch.bfloat16, "stored": torch.bfloat16}
    return load_policy(str(tmp_path / "m"), four_bit=FourBit(CPU, torch.bfloat16), **where)


def four_bit_layers(policy):
    found = [module for module in policy.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert found
    return found


def logits(policy):
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return policy.lm(ids).logits


def test_matrices_are_made_in_the_dtype_of_the_products_with_the_same_numbers(policy):
    """They were made in float32 for each product, and then rounded."""
    layers = four_bit_layers(policy)
    assert {layer.weight.quant_state.dtype for layer in layers} == {torch.bfloat16}
    found = logits(policy)
    for layer in layers:
        layer.weight.quant_state.dtype = torch.float32
    assert torch.equal(found, logits(policy))
    others = {p.dtype for p in policy.parameters() if p.dim() == 2 and p.dtype != torch.uint8}
    assert others == {torch.bfloat16}, "embedding and head"


def test_layers_in_four_bits_are_left_alone_by_the_copy_that_samples(policy):
    layers = four_bit_layers(policy)
    copied = [m for m in inference_copy(policy.lm, torch.bfloat16).modules() if isinstance(m, type(layers[0]))]
    assert all(ours.weight is theirs.weight for ours, theirs in zip(copied, layers, strict=True))


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_moments_in_8_bits_step_as_those_in_float32_do(weights_dtype):
    """To the 8 bits of two moments after one step, of which all gradients are near 1: about a hundredth of a step. Weights in
    bfloat16 are rounded at random, so their mean is compared; they would not move if rounded to the nearest."""
    generator = torch.Generator().manual_seed(0)
    start = torch.ones(80, 64).to(getattr(torch, weights_dtype))
    gradient = 1 + 0.1 * torch.randn(80, 64, generator=generator)
    found = []
    for optimizer in ("adamw", "adamw-8bit"):
        weight = torch.nn.Parameter(start.clone())
        options = SFTConfig(**SFT, optimizer=optimizer, weights_dtype=weights_dtype, weight_decay=0.0)
        made = make_optimizer([(torch.nn.ParameterList([weight]), 1e-3)], options)
        for _ in range(3):
            weight.grad = gradient.to(weight.dtype)
            made.step()
        found.append(weight.detach().double())
    assert float((found[0] - 1).mean()) == pytest.approx(-3e-3, rel=0.1)
    assert float((found[1] - found[0]).mean()) == pytest.approx(0.0, abs=2e-4)


def test_moments_in_8_bits_of_bfloat16_weights_go_on_as_they_were():
    weight = torch.nn.Parameter(torch.randn(70, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    options = SFTConfig(**SFT, optimizer="adamw-8bit", weights_dtype="bfloat16")

    def step(weight, optimizer, seed):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.step()

    def optimizer_of(weight):
        return make_optimizer([(torch.nn.ParameterList([weight]), 1e-2)], options)

    optimizer = optimizer_of(weight)
    step(weight, optimizer, 1)
    held = {p.dtype for values in optimizer.state.values() for p in values.values() if p.numel() > 1000}
    assert held == {torch.uint8}
    again, other = torch.nn.Parameter(weight.detach().clone()), copy.deepcopy(optimizer.state_dict())
    resumed = optimizer_of(again)
    resumed.load_state_dict(other)
    for one, its in ((weight, optimizer), (again, resumed)):
        step(one, its, 2)
    assert torch.equal(weight, again)
