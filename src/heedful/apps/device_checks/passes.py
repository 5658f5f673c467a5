"""Forward and backward passes, optimizer steps and random numbers of a device."""

import torch
from torch import Tensor, nn

from heedful.apps.device_checks.result import LONG, LeftOutError, Measurement, Workbench, expect, furthest
from heedful.configs.online import GRPOConfig
from heedful.data.batches import Batch
from heedful.engines.teacher_forced import token_outputs
from heedful.kernels.device import DtypeName, autocast, frozen_dtype
from heedful.kernels.packing import can_pack, is_worth_packing
from heedful.models.load import load_policy
from heedful.models.policy import Policy
from heedful.models.source import resolve
from heedful.training.compact_adamw import CompactAdamW
from heedful.training.setup import load_reference, load_trained, prepare
from heedful.training.state import random_state, set_random_state
from heedful.types import MicroBatch

CLOSE = {"float32": (1e-4, 1e-4), "bfloat16": (0.1, 0.05), "float16": (0.1, 0.05)}
"""Relative and absolute difference that rounding explains: sums in another order, products of 8 bits."""


def _learned(policy: Policy, *parts: Batch) -> list[Tensor]:
    """Log-probs of the responses, and the gradients of their sum."""
    given = [policy(part.ids, part.attention_mask, part.response_mask).logprobs[part.response_mask] for part in parts]
    torch.cat(given).sum().backward()
    return [torch.cat(given), *(parameter.grad for parameter in policy.lm.parameters() if parameter.grad is not None)]


def passes(bench: Workbench, dtype: DtypeName) -> Measurement:
    """A pass and its gradients on the device against the CPU's in float32."""
    relative, absolute = CLOSE[dtype]
    batch = bench.batch()
    ours, theirs = bench.policy(dtype), bench.policy(device="cpu")
    pairs = zip(_learned(ours, batch), _learned(theirs, batch.to(torch.device("cpu"))), strict=True)
    return Measurement(
        furthest(pairs, relative=relative), absolute, "log-probs and gradients, from the CPU's in float32"
    )


def packed_rows(bench: Workbench, dtype: DtypeName) -> Measurement:
    """Texts packed into one row against the same texts one by one. In half precision CUDA has a kernel for it."""
    relative, absolute = CLOSE[dtype]
    batch, policies = bench.batch(LONG), [bench.policy(dtype, hidden_size=64) for _ in range(2)]
    with autocast(bench.device, policies[0].compute_dtype):
        expect(can_pack(policies[0].lm.base_model), "texts cannot be packed")
    expect(is_worth_packing(batch.attention_mask.sum(dim=1).tolist()), "these texts are not packed")
    apart = [bench.batch(LONG, slice(row, row + 1)) for row in range(2)]
    pairs = zip(_learned(policies[0], batch), _learned(policies[1], *apart), strict=True)
    return Measurement(furthest(pairs, relative=relative), absolute, "log-probs and gradients, from texts one by one")


def reference_on_the_cpu(bench: Workbench) -> Measurement:
    """A reference in main memory answers on the policy's device, and with its numbers."""
    config = GRPOConfig(model=bench.model(), data="d", output=bench.folder, reference_device="cpu", dtype="float32")
    policy, batch = bench.policy(), bench.batch()
    reference = load_reference(config, resolve(config.model), policy)
    expect(reference.device.type == "cpu", "the reference is not on the CPU")
    ours, theirs = (token_outputs(m, batch, temperature=1.0, micro_batch=MicroBatch(1)) for m in (policy, reference))
    expect(theirs.logprobs.device == theirs.entropy.device == batch.ids.device, "it answers on another device")
    return Measurement(furthest([(ours.logprobs, theirs.logprobs)]), 1e-4, "log-probs, from the policy's")


def frozen_weights(bench: Workbench, dtype: DtypeName) -> Measurement:
    """Frozen matrices are stored in half precision: under adapters, and of a reference. What learns is in float32."""
    half = getattr(torch, dtype)
    if frozen_dtype(bench.device, half) != half:
        raise LeftOutError("on a CPU frozen weights are stored in float32")
    name = resolve(bench.model(hidden_size=64))
    config = GRPOConfig(model=str(name.folder), data="d", output=bench.folder, lora_rank=4, dtype=dtype)
    policy = load_trained(config, name, bench.device, half)
    prepare(policy, config, base=config.model)
    stored = {p.dtype for p in policy.parameters() if p.dim() == 2 and not p.requires_grad}
    expect(stored == {half}, f"frozen matrices are stored in {stored}")
    trained = {p.dtype for p in policy.parameters() if p.requires_grad}
    expect(trained == {torch.float32}, f"what learns is stored in {trained}")
    whole = load_policy(name, device=bench.device, compute_dtype=half)
    plain = GRPOConfig(model=config.model, data="d", output=bench.folder, dtype=dtype)
    reference = load_reference(plain, name, whole)
    stored = {reference.lm.get_input_embeddings().weight.dtype}
    expect(stored == {half}, f"the reference is stored in {stored}")
    batch = bench.batch()
    ours, theirs = (token_outputs(m, batch, temperature=1.0, micro_batch=MicroBatch(2)) for m in (whole, reference))
    return Measurement(furthest([(ours.logprobs, theirs.logprobs)]), 0.05, "reference's log-probs, from the policy's")


def moments_in_main_memory(bench: Workbench) -> Measurement:
    """Steps with moments in main memory against torch's fused AdamW on the device."""
    here = [nn.Parameter(torch.randn(300, 40).to(bench.device)) for _ in range(2)]
    there = [nn.Parameter(p.detach().clone()) for p in here]
    groups = [{"params": there, "lr": 1e-2, "weight_decay": 0.1}]
    ours = CompactAdamW(groups, betas=(0.9, 0.999), eps=1e-8, device=torch.device("cpu"))
    theirs = torch.optim.AdamW(here, lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(3):
        for p, q in zip(here, there, strict=True):
            p.grad = torch.randn(p.shape).to(bench.device)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    places = {ours.state[p]["exp_avg"].device.type for p in there}
    expect(places == {"cpu"}, f"moments are on {places}")
    return Measurement(furthest(zip(there, here, strict=True), relative=1e-5), 1e-6, "weights, from fused AdamW's")


def random_numbers(bench: Workbench) -> Measurement:
    """The device's random numbers after its state was saved and restored, as on resuming."""
    own = torch.Generator()
    torch.rand(3, device=bench.device)
    saved = random_state(own)
    first = torch.rand(1000, device=bench.device).cpu()
    set_random_state(own, saved)
    again = torch.rand(1000, device=bench.device).cpu()
    return Measurement(int((first != again).sum()), 0, "of 1,000 random numbers, not repeated by a restored state")
