"""The weights that a server is given: plain ones, with adapters merged, in the server's precision."""

import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from transformers import PreTrainedModel

from heedful.distributed import ranks
from heedful.distributed.sharding import held, is_sharded
from heedful.engines.vllm.extension.heedful_vllm import added, checksum
from heedful.errors import SamplerError
from heedful.models.policy import Policy


@dataclass(frozen=True)
class Weights:
    """One version of the weights, for servers to load."""

    version: str
    """Its name, other for each version of each run."""
    checksum: str
    """Of all weights, in the precision of the servers."""
    folder: Path | None
    """Where they are; None if they were sent."""


@torch.no_grad()
def fingerprint(policy: Policy) -> str:
    """Checksums of a policy's parameters as they are, which tell whether they have changed. All ranks call it.

    Of one that is divided among ranks each adds up its own parts, and all get the same answer. Of another, rank 0 does,
    and the others get nothing.
    """
    if not is_sharded(policy):
        return checksum(policy.lm.parameters()) if ranks.is_first() else ""
    return " ".join(ranks.gather(checksum(held(parameter) for parameter in policy.lm.parameters())))


@torch.no_grad()
def plain_weights(lm: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights under their names in the model without adapters, which are merged: ``W + alpha / rank * B A``.

    Tied weights are there once. What is floating point is rounded to ``dtype``. Each is made when it is asked for.
    """
    adapted = {
        f"{name}.base_layer.weight": module for name, module in lm.named_modules() if isinstance(module, LoraLayer)
    }
    seen: set[int] = set()
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        value: Tensor = tensor.detach()
        if name in adapted:
            module = adapted[name]
            value = value + sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
        yield name.replace(".base_layer.", "."), value.to(dtype) if value.is_floating_point() else value


def check_adapters(lm: PreTrainedModel) -> None:
    """Refuse adapters that cannot be merged one matrix at a time. Raises SamplerError."""
    if any(isinstance(module, ParamWrapper) for module in lm.modules()):
        raise SamplerError(
            "--sampler does not go with LoRA on the experts of a mixture; leave out --sampler, or train other layers "
            "(--lora-targets)"
        )


def write_weights(lm: PreTrainedModel, dtype: torch.dtype, folder: Path) -> str:
    """Write a model's plain weights in Hugging Face format; the folder is whole or not there. Returns their checksum.

    They are rounded and added up where they are, and wait in the CPU's memory.
    """
    partial = folder.with_name(f".{folder.name}.heedful-partial")
    shutil.rmtree(partial, ignore_errors=True)
    weights, parts = {}, []
    for name, tensor in plain_weights(lm, dtype):
        parts.append(checksum([tensor]))
        weights[name] = tensor.cpu()
    shell = copy.copy(lm)  # without the adapters, of which save_pretrained must not know
    shell.__dict__.pop("peft_config", None)
    shell.save_pretrained(partial, state_dict=weights)
    partial.replace(folder)
    return added(parts)
