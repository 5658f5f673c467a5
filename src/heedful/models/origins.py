"""Scalar heads that other libraries saved with a language model or its adapters.

    value = (w . h - mean) / std + b        h: the trunk's last hidden state

| origin | recognised by | has |
|---|---|---|
| TRL's value head models | tensors ``v_head.*`` among the weights, or in pytorch_model.bin beside adapters | w, b |
| LLaMA-Factory, stages rm and ppo | value_head.safetensors or value_head.bin in the folder | w, b |
| OpenRLHF | ``architectures`` in config.json, or ``auto_mapping`` in adapter_config.json | w; mean, std if normalize_reward |

A reward model's score is the value at the last token of its text, a critic's value that of the state before a token.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from heedful.errors import CheckpointError
from heedful.files import read_object
from heedful.models.adapters import adapted_layers, read_adapter_config, whole_weights
from heedful.models.heads import refuse_not_finite
from heedful.models.save import VALUE_HEAD, save_tensors
from heedful.models.source import Source, explained, load_config, resolve

TRL_HEAD = "v_head."
"""Prefix of TRL's tensors. LLaMA-Factory trains TRL's module, and moves them to a file of their own."""
SUMMARY = ("v_head.summary.weight", "v_head.summary.bias")
LLAMAFACTORY_FILES = ("value_head.safetensors", "value_head.bin")
OPENRLHF = {
    "RewardModel": "reward model",
    "CriticModel": "critic",
    "LLMForSequenceRegression": "reward model or critic",  # before 0.3 both had this name
}
"""OpenRLHF's classes, and what they are."""
OPENRLHF_HEADS = ("score", "value_head")
"""OpenRLHF's names of the head, now and before 0.5.4, for a configuration without ``value_head_prefix``."""


@dataclass(frozen=True)
class OriginHead:
    """The scalar head of another library: ``value = weight . h + bias``."""

    origin: Literal["TRL", "LLaMA-Factory", "OpenRLHF"]
    place: str
    """The file or folder that has it."""
    weight: Tensor
    """``[1, hidden]``, float32."""
    bias: float
    can_score: bool = True
    """Whether it may be a reward model's. TRL's is always a critic's."""

    def copy_to(self, head: nn.Linear) -> None:
        """Set a head's weight, and its bias if it has one. Raises CheckpointError if they do not fit."""
        shapes = list(self.weight.shape), list(head.weight.shape)
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{self.place}: the value head has shape {shapes[0]}, but the model needs {shapes[1]}; it belongs to another "
                "model"
            )
        with torch.no_grad():
            head.weight.copy_(self.weight)
            if head.bias is not None:
                head.bias.fill_(self.bias)
        refuse_not_finite(head, self.place)


def origin_head(model: str | Source) -> OriginHead | None:
    """The head that another library saved with this model; None if there is none.

    The folder itself has it: like its library, this ignores heads of TRL and LLaMA-Factory with the base of adapters. Of a
    model on the Hub, only its configuration and weights are read, not LLaMA-Factory's file.

    Raises CheckpointError for a head whose origin or form is unknown, for two heads, or if it cannot be read.
    """
    source = resolve(model)
    with explained(source.folder, "value head"):
        heads = [
            head for head in (_llamafactory(source), trl_head(source.folder), _openrlhf(source)) if head is not None
        ]
    if len(heads) > 1:
        found = " and ".join(f"{head.origin}'s in {head.place}" for head in heads)
        raise CheckpointError(
            f"{source.folder} has {len(heads)} value heads, {found}; remove the one that is not to be used"
        )
    return heads[0] if heads else None


def refuse_openrlhf(source: Source) -> None:
    """Raises CheckpointError for a reward model or critic of OpenRLHF, which has no language model's head."""
    kind = openrlhf_kind(source)
    if kind is not None:
        raise CheckpointError(
            f"{source.folder} is a {OPENRLHF[kind]} of OpenRLHF ({kind}), which cannot generate; use a causal language "
            "model, such as the final/ of heedful sft. --rewards model:PATH reads a reward model, --value-model also a critic"
        )


def save_origin_head(source: Source, folder: Path) -> None:
    """Write the head of a model of TRL or LLaMA-Factory into the folder of the merged one, where it is read again.

    heedful has a critic's head in a folder of its own; LLaMA-Factory's file keeps its name.
    """
    head = origin_head(source)
    if head is None:
        return
    tensors = {"weight": head.weight, "bias": torch.tensor([head.bias])}
    if head.origin == "LLaMA-Factory":
        save_tensors(dict(zip(SUMMARY, tensors.values(), strict=True)), folder / LLAMAFACTORY_FILES[0])
    else:
        save_tensors(tensors, folder / VALUE_HEAD)


def _llamafactory(source: Source) -> OriginHead | None:
    """LLaMA-Factory's head, in a file of its own."""
    files = [path for name in LLAMAFACTORY_FILES if (path := Path(source.folder) / name).is_file()]
    if not files:
        return None
    # Its versions before 0.2 left the prefix out.
    tensors = {TRL_HEAD + name.removeprefix(TRL_HEAD): x for name, x in read_tensors(files[0]).items()}
    return _of_trl(tensors, "LLaMA-Factory", str(files[0]))


def trl_head(place: str, **hub: Any) -> OriginHead | None:
    """TRL's head, among the weights of the model; with adapters, alone in a file of that name. None if there is none.

    Args:
        place: a folder, or a name on the Hub.
        hub: of ``transformers.utils.cached_file``: token, revision, cache_dir.

    Raises CheckpointError for a head of another form.
    """
    tensors = _stored(place, TRL_HEAD, **hub)
    return _of_trl(tensors, "TRL", place) if tensors else None


def _of_trl(tensors: dict[str, Tensor], origin: Literal["TRL", "LLaMA-Factory"], place: str) -> OriginHead:
    if set(tensors) != set(SUMMARY):
        raise CheckpointError(
            f"{place}: its value head has {', '.join(sorted(tensors)) or 'no tensors'}, but {origin}'s has "
            f"{' and '.join(SUMMARY)}, so it cannot be read; save the model without this head, or with one of that form"
        )
    weight, bias = (tensors[name].float() for name in SUMMARY)
    return OriginHead(origin, place, weight, float(bias), can_score=origin == "LLaMA-Factory")


def openrlhf_kind(source: Source) -> str | None:
    """The OpenRLHF class that a model, or the model that was given adapters, is of; None if it is not OpenRLHF's."""
    if source.adapters:
        settings = read_adapter_config(source.adapters[-1])
        if settings.get("task_type") is not None:  # OpenRLHF's have none
            return None
        kind = str((settings.get("auto_mapping") or {}).get("base_model_class"))
        if kind in OPENRLHF:
            return kind
    kind = next(iter(load_config(source).architectures or ()), "")
    return kind if kind in OPENRLHF else None


def _openrlhf(source: Source) -> OriginHead | None:
    kind = openrlhf_kind(source)
    if kind is None:
        return None
    config = load_config(source).to_dict()
    own = Path(source.folder) / "config.json"
    if source.adapters and own.is_file():  # OpenRLHF writes the configuration beside adapters too
        config = read_object(own, "bring it back")
    named = config.get("value_head_prefix")
    names = (named,) if named else OPENRLHF_HEADS
    whole = _stored(source.base, *(f"{name}." for name in names)) | whole_weights(source.adapters)
    found = {tensor: x for tensor, x in whole.items() if tensor.partition(".")[0] in names}
    adapted = adapted_layers(source.adapters) & set(names)
    if adapted:
        raise CheckpointError(
            f"{source.folder}: OpenRLHF's adapters adapt the head {adapted.pop()} too, but OpenRLHF saves no head with "
            "adapters: if it was drawn at random for this training, its scores are lost. If the base is a reward model, "
            "merge the adapters with OpenRLHF: python -m openrlhf.cli.lora_combiner --is_rm"
        )
    weights = [f"{name}.weight" for name in names]
    if len(found) != 1 or not set(found) <= set(weights):
        raise CheckpointError(
            f"{source.folder} says that it is OpenRLHF's ({kind}), whose only head is {' or '.join(weights)}, but its "
            f"weights have {' and '.join(sorted(found)) or 'none of them'}; set value_head_prefix in its config.json to the "
            "name of the head, or architectures to what the model is"
        )
    mean, std = _normalisation(config, source.folder)
    (weight,) = found.values()
    return OriginHead("OpenRLHF", source.folder, weight.float() / std, -mean / std, can_score=kind != "CriticModel")


def _normalisation(config: dict[str, Any], name: str) -> tuple[float, float]:
    """Mean and standard deviation by which OpenRLHF normalises a model's outputs."""
    if not config.get("normalize_reward"):
        return 0.0, 1.0
    mean, std = config.get("mean", 0.0), config.get("std", 1.0)
    if not all(type(x) in (int, float) and math.isfinite(x) for x in (mean, std)) or std <= 0:
        raise CheckpointError(
            f"{name}: its config.json has normalize_reward with mean {mean!r} and std {std!r}; they must be numbers, std "
            "above 0. Correct them, or set normalize_reward to false"
        )
    return float(mean), float(std)


def _stored(place: str, *beginnings: str, **hub: Any) -> dict[str, Tensor]:
    """The tensors of a model, in a folder or on the Hub, whose names begin like this. Reads no others."""
    for name in ("model.safetensors", "pytorch_model.bin"):  # of both, transformers and TRL read the first
        whole = stored_file(place, name, **hub)
        if whole is not None:
            return read_tensors(whole, *beginnings)
        index = stored_file(place, f"{name}.index.json", **hub)
        if index is not None:
            parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {file for tensor, file in parts.items() if tensor.startswith(beginnings)}
            shards = [shard for file in sorted(files) if (shard := stored_file(place, file, **hub)) is not None]
            return {tensor: x for shard in shards for tensor, x in read_tensors(shard, *beginnings).items()}
    return {}


def stored_file(place: str, name: str, **hub: Any) -> Path | None:
    """The path of a file in a folder or in a repository of the Hub; None if it is not there."""
    path = cached_file(place, name, _raise_exceptions_for_missing_entries=False, **hub)
    return None if path is None else Path(path)


def read_tensors(path: Path, *beginnings: str) -> dict[str, Tensor]:
    """The tensors of a file whose names begin like this; all by default."""
    beginnings = beginnings or ("",)
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if name.startswith(beginnings)}  # noqa: SIM118
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    return {name: tensor for name, tensor in tensors.items() if name.startswith(beginnings)}
