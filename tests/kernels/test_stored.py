"""Matrices stored in half precision."""

import pytest
import torch

from architectures import one_decoder
from heedful.configs.options import LoRAOptions, SamplingOptions
from heedful.engines.cuda_graph import GraphDecoder, graph_decoder
from heedful.engines.generate import generate
from heedful.kernels.weights import TiedMatrix, in_float32, inference_copy, store_matrices
from heedful.models import Policy, add_adapters, load_causal_lm, load_policy

CPU = torch.device("cpu")


def batch():
    ids = torch.randint(20, 200, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    return ids, mask, mask[:, 4:]


def in_bfloat16(folder):
    """A policy whose weights bfloat16 holds, as those of most checkpoints on the Hub."""
    lm = load_causal_lm(folder)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.copy_(parameter.bfloat16())
    return lm


def passes(policy):
    policy.zero_grad()
    outputs = policy(*batch(), with_entropy=True)
    outputs.logprobs.sum().backward()
    return outputs, {name: parameter.grad for name, parameter in policy.lm.named_parameters()}


@one_decoder
def test_a_checkpoint_in_bfloat16_has_the_numbers_of_float32_weights(decoder):
    """Forwards bit for bit; gradients are those rounded to bfloat16, one of 256 parts, and summed there."""
    stored, policy = (Policy(in_bfloat16(decoder), compute_dtype=torch.bfloat16) for _ in range(2))
    store_matrices(stored.lm, torch.bfloat16)
    ours, our_gradients = passes(stored)
    theirs, gradients = passes(policy)
    assert torch.equal(ours.logprobs, theirs.logprobs)
    assert torch.equal(ours.entropy, theirs.entropy)
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            our_gradients[name].float() / scale, gradient / scale, rtol=2e-2, atol=2e-2, msg=name
        )


def test_matrices_are_stored_and_the_rest_stays(decoder):
    lm = load_causal_lm(decoder)
    was_tied = lm.get_input_embeddings().weight is lm.get_output_embeddings().weight
    store_matrices(lm, torch.bfloat16)
    assert (lm.get_input_embeddings().weight is lm.get_output_embeddings().weight) == was_tied
    linear = {f"{name}.weight" for name, m in lm.named_modules() if "Linear" in type(m).__name__ or "Conv1D" in str(m)}
    for name, parameter in lm.named_parameters():
        is_half = name in linear or parameter is lm.get_input_embeddings().weight
        assert parameter.dtype == (torch.bfloat16 if is_half else torch.float32), name
        assert parameter.requires_grad


@one_decoder
def test_adapters_on_stored_matrices_are_in_float32(decoder):
    policy = load_policy(decoder, device=CPU, compute_dtype=torch.bfloat16, with_value_head=True, stored=torch.bfloat16)
    add_adapters(policy.lm, LoRAOptions(lora_rank=4), base=decoder, seed=0)
    learned = {name: p.dtype for name, p in policy.named_parameters() if p.requires_grad}
    assert learned
    assert set(learned.values()) == {torch.float32}
    frozen = [p for p in policy.parameters() if not p.requires_grad and p.dim() == 2]
    assert sum(p.dtype == torch.bfloat16 for p in frozen) > 4


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_a_tied_matrix_still_has_one_gradient(checkpoints, architecture):
    """Numbers as of two gradients, and rows in float32, although the embedding has two hooks."""
    policy = Policy(load_causal_lm(str(checkpoints[architecture])), compute_dtype=torch.bfloat16)
    lm = policy.lm
    store_matrices(lm, torch.bfloat16)
    assert list(lm.get_input_embeddings()._forward_hooks.values()) == [in_float32]
    seen = []
    with TiedMatrix(lm) as tied, torch.autocast("cpu", torch.bfloat16):
        lm.base_model(batch()[0])
        assert tied.weight is not lm.get_output_embeddings().weight, "two gradients"
    hook = lm.base_model.register_forward_hook(lambda _m, _i, output: seen.append(output.last_hidden_state.dtype))
    _, gradients = passes(policy)
    hook.remove()
    assert seen == [torch.float32]
    lm.get_input_embeddings().register_forward_hook(lambda _m, _i, rows: rows)  # an unknown hook: two gradients
    _, apart = passes(policy)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.float(), apart[name].float(), rtol=2**-6, atol=1e-3, msg=name)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_stored_matrices_sample_as_float32_weights_do(checkpoints, architecture):
    """Token for token, and by the decoder that CUDA graphs record, which runs without them here."""
    stored, policy = (
        Policy(in_bfloat16(str(checkpoints[architecture])), compute_dtype=torch.bfloat16).eval() for _ in range(2)
    )
    store_matrices(stored.lm, torch.bfloat16)
    options = SamplingOptions(max_new_tokens=12, temperature=0.0)
    prompts = [[10, 11, 12], [40], [77, 78, 79, 80, 81]]
    responses = [
        generate(p, prompts, options, stop_ids=(1,), pad_id=0, generator=torch.Generator()).own_ids()
        for p in (stored, policy)
    ]
    assert responses[0] == responses[1]
    copied = inference_copy(stored.lm, torch.bfloat16)
    assert copied.get_output_embeddings().weight is stored.lm.get_output_embeddings().weight, "no copy is needed"
    assert isinstance(graph_decoder(copied, torch.bfloat16), GraphDecoder)
