"""The memory of a device: what a plan foretells, and what is refused."""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from heedful.apps.device_checks.result import CheckError, LeftOutError, Measurement, Workbench, expect
from heedful.configs.offline import SFTConfig
from heedful.devices import device_module, free_memory, peak_memory, total_memory
from heedful.errors import ConfigError
from heedful.kernels.attention import use_attention
from heedful.models.policy import Policy
from heedful.models.shape import shape_of
from heedful.planning.memory import CUDA_CONTEXT, Lengths, plan_of
from heedful.planning.shapes import Shape
from heedful.training.memory_preflight import check_memory
from heedful.training.optimization import make_optimizer

MEASURED_MODEL = Qwen3Config(
    vocab_size=4096, hidden_size=768, intermediate_size=2304, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=6, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
"""110 million weights."""


def _shape(_model: str) -> Shape:
    with torch.device("meta"):
        return shape_of(MEASURED_MODEL)


def planned_memory(bench: Workbench, dtype: str) -> Measurement:
    """Weights, moments, gradients and activations of a small model; the context of the device is not counted."""
    if peak_memory(bench.device) is None:
        raise LeftOutError(f"{bench.device.type} does not tell how much memory its tensors took")
    policy = Policy(
        use_attention(AutoModelForCausalLM.from_config(MEASURED_MODEL)), compute_dtype=getattr(torch, dtype)
    )
    policy.to(bench.device)
    settings = SFTConfig(model="m", data="d", output=bench.folder, batch_size=8, micro_batch_size=4, dtype="bfloat16")
    optimizer = make_optimizer([(policy, 1e-4)], settings)
    ids = torch.randint(10, 4000, (4, 512)).to(bench.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    device_module(bench.device).reset_peak_memory_stats()
    for _ in range(2):
        for _ in range(2):
            policy(ids, mask, mask[:, 1:]).logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    taken = peak_memory(bench.device)
    assert taken is not None
    planned = plan_of(settings, _shape, Lengths(512), device="cuda", half=True).peak - CUDA_CONTEXT
    return Measurement(abs(planned / taken - 1), 0.1, f"of {taken / 1e9:.2f} GB, off the plan")


def far_too_large(bench: Workbench) -> Measurement:
    """A run that the device has no memory for is refused before it begins, unless the check is off."""
    free, whole = free_memory(bench.device), total_memory(bench.device)
    if free is None or whole is None:
        raise LeftOutError(f"{bench.device.type} does not tell how much memory is free")
    expect(0 < free <= whole, f"{free} of {whole} bytes are free")
    config = SFTConfig(model=bench.model(), data="d", output=bench.folder, micro_batch_size=8)
    lengths = Lengths(10**9)
    try:
        check_memory(config, lengths, bench.device, torch.bfloat16)
    except ConfigError as error:
        expect("--no-memory-check" in str(error), f"refused for something else: {error}")
    else:
        raise CheckError("texts of 1,000,000,000 tokens were not refused")
    return Measurement(0, 0, f"refusals without a cause; {free / 1e9:.1f} of {whole / 1e9:.1f} GB are free")
