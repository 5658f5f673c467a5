"""The copy that samples: the weights of the model in training, its matrices in half precision where that computes."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from architectures import one_decoder
from heedful import SFTConfig
from heedful.kernels.cpu.products import PackedLinear, pack_linears
from heedful.kernels.weights import inference_copy
from heedful.models import add_adapters, byte_tokenizer, load_policy

CPU = torch.device("cpu")
HALF = [torch.bfloat16, torch.float16]
IDS = byte_tokenizer()("今天天气怎么样？", return_tensors="pt").input_ids


def load(folder, compute_dtype=torch.float32):
    return load_policy(str(folder), device=CPU, compute_dtype=compute_dtype)


def matrices(model):
    """Names of the parameters that linear layers multiply by."""
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}


def logits(lm, compute_dtype=torch.float32):
    with torch.no_grad(), torch.autocast("cpu", dtype=compute_dtype, enabled=compute_dtype in HALF):
        return lm(input_ids=IDS).logits


def every_parameter(model):
    """With both names of what is tied."""
    return dict(model.named_parameters(remove_duplicate=False))


@one_decoder
def test_in_full_precision_every_weight_is_shared(decoder):
    lm = load(decoder).lm
    inference = inference_copy(lm, torch.float32)
    assert inference is not lm
    ours, theirs = every_parameter(inference), every_parameter(lm)
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)
    buffers = dict(lm.named_buffers())
    assert all(buffer is buffers[name] for name, buffer in inference.named_buffers())


@pytest.mark.parametrize(
    ("decoder", "dtype"), [("gpt2", torch.bfloat16), ("qwen3", torch.float16)], indirect=["decoder"]
)
def test_in_half_precision_all_but_the_matrices_is_shared(decoder, dtype):
    """Two layers of four or seven matrices, and the output head."""
    lm = load(decoder).lm
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    ours, theirs = every_parameter(inference_copy(lm, dtype)), every_parameter(lm)
    copied = {name for name in ours if ours[name] is not theirs[name]}
    assert copied == matrices(lm)
    assert len(copied) == (2 * 4 + 1 if lm.config.model_type == "gpt2" else 2 * 7 + 1)
    for name in copied:
        assert torch.equal(ours[name], theirs[name].detach().to(dtype)), name
        assert not ours[name].requires_grad
    for name, parameter in lm.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad
        assert torch.equal(parameter, before[name])


def test_it_is_in_evaluation_mode_and_the_model_keeps_its_own(checkpoints):
    lm = load(checkpoints["gpt2"]).lm.train()
    inference = inference_copy(lm, torch.bfloat16)
    assert not any(module.training for module in inference.modules())
    assert all(module.training for module in lm.modules())


@one_decoder
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_it_has_the_weights_of_the_moment(decoder, compute_dtype):
    """An optimizer step before the copy is in it; one after it, in what is shared alone."""
    lm = load(decoder).lm
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.1)
    stale = inference_copy(lm, compute_dtype)
    start = logits(stale, compute_dtype)
    lm(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    expected = logits(lm, compute_dtype)
    assert not torch.equal(expected, start)
    assert torch.equal(logits(inference_copy(lm, compute_dtype), compute_dtype), expected)
    assert torch.equal(logits(stale, compute_dtype), expected) == (compute_dtype == torch.float32)


@one_decoder
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_on_it(decoder, compute_dtype):
    lm = load(decoder).lm
    base = logits(lm, compute_dtype)
    add_adapters(lm, SFTConfig(model="m", data="d", output="o", lora_rank=4), base=str(decoder), seed=3)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    expected = logits(lm, compute_dtype)
    inference = inference_copy(lm, compute_dtype)
    assert torch.equal(logits(inference, compute_dtype), expected)
    assert (expected.float() - base.float()).abs().max() > 0.1
    adapters = {name: p for name, p in inference.named_parameters() if "lora_" in name}
    assert len(adapters) >= 2 * 2 * 4
    wanted = torch.float32 if compute_dtype == torch.float32 else compute_dtype
    assert all(p.dtype == wanted for p in adapters.values())


def test_weights_that_are_in_half_precision_already_are_shared(checkpoints):
    """A reference loaded in bfloat16: nothing is left to copy."""
    lm = AutoModelForCausalLM.from_pretrained(checkpoints["gpt2"], dtype=torch.bfloat16)
    ours, theirs = every_parameter(inference_copy(lm, torch.bfloat16)), every_parameter(lm)
    assert all(ours[name] is theirs[name] for name in ours)


def can_reorder(linear):
    try:
        torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().bfloat16(), None)
    except (AttributeError, RuntimeError):  # torch without oneDNN; "needs the cpu support"
        return False
    return True


def test_matrices_are_packed_where_the_processor_has_the_instructions():
    """oneDNN packs bfloat16 with AVX-512, on others it raises."""
    linear = nn.Linear(8, 8)
    assert PackedLinear.is_possible(linear.bfloat16()) == can_reorder(linear)
    assert not PackedLinear.is_possible(nn.Linear(8, 8))


@one_decoder
@pytest.mark.parametrize("with_adapters", [False, True])
def test_packed_matrices_give_the_same_logits_and_leave_adapters_alone(decoder, with_adapters):
    """To a rounding of bfloat16; PEFT's layers read the matrices that they lie on, so those stay."""
    lm = load(decoder).lm
    if with_adapters:
        add_adapters(lm, SFTConfig(model="m", data="d", output="o", lora_rank=4), base=str(decoder), seed=3)
    expected = logits(inference_copy(lm, torch.bfloat16), torch.bfloat16)
    packed = pack_linears(inference_copy(lm, torch.bfloat16))
    expects_packed = can_reorder(nn.Linear(8, 8)) and not with_adapters
    assert any(isinstance(module, PackedLinear) for module in packed.modules()) == expects_packed
    torch.testing.assert_close(logits(packed, torch.bfloat16), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.skipif(not can_reorder(nn.Linear(8, 8)), reason="oneDNN packs bfloat16 with AVX-512")
@pytest.mark.parametrize("bias", [False, True])
def test_the_matrix_of_a_packed_layer_can_be_read(bias):
    """Some models multiply by ``layer.weight`` themselves. It is then held once, and the layer's results stay the same."""
    linear = nn.Linear(40, 24, bias=bias).bfloat16()
    packed, x = PackedLinear(linear), torch.randn(5, 40)
    expected = packed(x)
    assert (packed.in_features, packed.out_features) == (40, 24)
    assert torch.equal(packed.weight, linear.weight)
    assert packed.weight is packed.weight
    assert packed.packed is None
    torch.testing.assert_close(packed(x), expected, rtol=2**-7, atol=2**-7)
