"""Weights for servers: plain, with adapters merged, in the server's precision."""

import copy
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heedful.distributed import ranks
from heedful.distributed.sharding import held, is_sharded, whole_parameters, whole_tensor
from heedful.engines.vllm.extension.heedful_vllm import added, checksum
from heedful.errors import SamplerError
from heedful.models.adapters import has_adapters
from heedful.models.policy import Policy

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


@dataclass(frozen=True)
class Weights:
    """One version of the weights, for servers to load."""

    version: str
    """Unique name of the version and run."""
    checksum: str
    """Checksum of all weights, in the servers' precision."""
    folder: Path | None
    """Folder of the weights; None if they were sent."""


@torch.no_grad()
def fingerprint(policy: Policy) -> str:
    """Checksums of a policy's current parameters, to detect changes. Collective.

    For a sharded policy each rank sums its shards, and all get the same result. Otherwise only rank 0 computes it, and
    the others get an empty string.
    """
    if not is_sharded(policy):
        return checksum(policy.lm.parameters()) if ranks.is_first() else ""
    return " ".join(ranks.gather(checksum(held(parameter) for parameter in policy.lm.parameters())))


@torch.no_grad()
def plain_weights(lm: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with adapters merged, ``W + alpha / rank * B A``, under the names of the model without
    adapters.

    Tied weights occur once. Floating-point weights are rounded to ``dtype``. Computed lazily, on the model's device; a
    sharded model's are gathered one by one, which is collective.
    """
    adapted = dict(_adapted(lm))
    seen: set[int] = set()
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        module = adapted.get(name)
        if module is None:
            value = whole_tensor(tensor.detach())
        else:
            with whole_parameters(module):
                deltas = sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
                value = module.get_base_layer().weight.detach() + deltas
        yield name.replace(".base_layer.", "."), value.to(dtype) if value.is_floating_point() else value


def _adapted(lm: PreTrainedModel) -> Iterator[tuple[str, "LoraLayer"]]:
    """Layers with adapters by the names of their matrices."""
    if has_adapters(lm):
        from peft.tuners.lora import LoraLayer

        for name, module in lm.named_modules():
            if isinstance(module, LoraLayer):
                yield f"{name}.base_layer.weight", module


def check_adapters(lm: PreTrainedModel) -> None:
    """Raises SamplerError for adapters that cannot be merged one matrix at a time."""
    if not has_adapters(lm):
        return
    from peft.tuners.lora.layer import ParamWrapper

    if any(isinstance(module, ParamWrapper) for module in lm.modules()):
        raise SamplerError(
            "--sampler does not support LoRA on experts of a mixture; leave out --sampler, or train other layers "
            "(--lora-targets)"
        )


class Collected(NamedTuple):
    """A model's plain weights in main memory."""

    weights: dict[str, Tensor]
    checksum: str


def collect(lm: PreTrainedModel, dtype: torch.dtype) -> Collected | None:
    """`plain_weights` and their checksum on rank 0; None on the others. Collective for a sharded model.

    Rounding and checksums run on the model's device, so main memory holds only what is written.
    """
    weights, parts = {}, []
    for name, tensor in plain_weights(lm, dtype):
        if ranks.is_first():
            parts.append(checksum([tensor]))
            weights[name] = tensor.cpu()
    return Collected(weights, added(parts)) if ranks.is_first() else None


def write_weights(lm: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model's plain weights in Hugging Face format, atomically."""
    partial = folder.with_name(f".{folder.name}.heedful-partial")
    shutil.rmtree(partial, ignore_errors=True)
    shell = copy.copy(lm)  # without adapters, so that save_pretrained ignores them
    shell.__dict__.pop("peft_config", None)
    shell.save_pretrained(partial, state_dict=dict(weights))
    partial.replace(folder)
