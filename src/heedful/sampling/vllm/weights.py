"""The weights that a server is given: plain ones, with adapters merged, in the server's precision."""

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from transformers import PreTrainedModel

from heedful.errors import SamplerError
from heedful.sampling.vllm.extension.heedful_vllm import checksum


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
def fingerprint(lm: PreTrainedModel) -> str:
    """A checksum of a model's parameters as they are, which tells whether they have changed."""
    return checksum(lm.parameters())


@torch.no_grad()
def plain_weights(lm: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights under their names in the model without adapters, which are merged: ``W + alpha / rank * B A``.

    Tied weights are there once. What is floating point is rounded to ``dtype``.
    """
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    merged = _merged(lm)
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        value = merged.get(name, tensor.detach())
        weights[name.replace(".base_layer.", ".")] = value.to(dtype) if value.is_floating_point() else value
    return weights


def check_adapters(lm: PreTrainedModel) -> None:
    """Refuse adapters that cannot be merged one matrix at a time. Raises SamplerError."""
    if any(isinstance(module, ParamWrapper) for module in lm.modules()):
        raise SamplerError(
            "--sampler does not go with LoRA on the experts of a mixture; leave out --sampler, or train other layers "
            "(--lora-targets)"
        )


def _merged(lm: PreTrainedModel) -> dict[str, Tensor]:
    """The matrices that adapters change, with the change."""
    merged = {}
    for name, module in lm.named_modules():
        if isinstance(module, LoraLayer):
            weight: Tensor = module.get_base_layer().weight
            change = sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
            merged[f"{name}.base_layer.weight"] = weight.detach() + change
    return merged


def write_weights(lm: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> str:
    """Write weights as a model in Hugging Face format; the folder is whole or not there. Returns their checksum."""
    partial = folder.with_name(f".{folder.name}.heedful-partial")
    shutil.rmtree(partial, ignore_errors=True)
    shell = copy.copy(lm)  # without the adapters, of which save_pretrained must not know
    shell.__dict__.pop("peft_config", None)
    shell.save_pretrained(partial, state_dict=dict(weights))
    partial.replace(folder)
    return checksum(weights.values())
