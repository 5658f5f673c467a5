"""LoRA adapters on disk, in PEFT's format: find their base, put them on it, merge them, write them.

Wherever heedful takes a model, a folder of adapters means its base model with the adapters merged into it. The base may
be such a folder itself.
"""

import copy
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, LoraModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.errors import CheckpointError
from heedful.hub import local_model

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"
"""The name that PEFT gives to the one set of adapters on a model."""
PREFIX = "base_model.model."
"""What PEFT puts before a parameter's name."""


def is_adapter(name: str | Path) -> bool:
    """Whether ``name`` is a folder of adapters."""
    return (Path(name) / ADAPTER_CONFIG).is_file()


def adapter_chain(name: str) -> tuple[str, list[Path]]:
    """The plain model at the bottom of ``name``, and the adapter folders to merge into it, in the order of merging.

    Args:
        name: a folder, or a name on the Hub. For a plain model the list is empty. A base on ModelScope is downloaded if
            needed, and its local folder is given.

    Raises CheckpointError for adapters that are not LoRA, are incomplete, or lead back to themselves.
    """
    folders: list[Path] = []
    while is_adapter(name):
        folder = Path(name)
        if any(folder.samefile(other) for other in folders):
            raise CheckpointError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path leads back to these adapters")
        folders.insert(0, folder)
        name = local_model(_base(folder))
    return name, folders


def _base(folder: Path) -> str:
    """Name of the model that adapters were trained on. Raises CheckpointError."""
    settings = read_adapter_config(folder)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{folder} holds adapters of the kind {kind}; heedful reads only LORA, whose weights can be merged into the "
            "model (those of prompt tuning, prefix tuning and p-tuning cannot)"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has an {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}, so the adapters are missing")
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is {base!r}; it must name the model of the adapters"
        )
    return base


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The settings of an adapter folder. Raises CheckpointError if they cannot be read."""
    path = folder / ADAPTER_CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(settings).__name__}")
    return settings


def whole_weights(folders: Iterable[Path]) -> set[str]:
    """Names of parameters that adapter folders store in full, such as a reward model's head."""
    names: set[str] = set()
    for folder in folders:
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            names |= {_plain_name(name) for name in file.keys() if ".lora_" not in name}  # noqa: SIM118  no dictionary
    return names


def attach_adapter(model: PreTrainedModel, folder: Path) -> LoraModel:
    """Put saved adapters on a model, in place, and replace the weights that were saved in full.

    Args:
        model: a model of the adapters' architecture. Adapters of a language model also fit its trunk, and a classifier
            on the same trunk; on a bare trunk, what belongs to heads is left out.
        folder: the adapter folder.

    Returns PEFT's handle, whose ``merge_and_unload`` merges the adapters. Raises CheckpointError if they do not fit.
    """
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        config = LoraConfig.from_pretrained(folder)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: the adapters cannot be read: {error}") from error
    fitted = _fitted(model, tensors, folder)
    adapters = {name: tensor for name, tensor in fitted.items() if ".lora_" in name}
    _replace_whole(model, {name: tensor for name, tensor in fitted.items() if name not in adapters}, folder)
    adapted = {name.partition(".lora_")[0] for name in adapters}
    config.target_parameters = _experts(model, config.target_parameters or ())
    of_experts = {name.rpartition(".")[0] for name in config.target_parameters or ()}
    config.target_modules = {name for name in adapted if name.partition(".base_layer")[0] not in of_experts} or None
    config.modules_to_save = None  # those are replaced above
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # PEFT warns of settings that it wrote itself
        try:
            tuner = LoraModel(model, config, ADAPTER)
            outcome = set_peft_model_state_dict(model, adapters, ADAPTER)
        except (RuntimeError, ValueError, KeyError) as error:
            first_line = str(error).strip().splitlines()[-1].strip()
            raise CheckpointError(f"{folder}: the adapters do not fit their base: {first_line}") from error
    unread = [*outcome.unexpected_keys, *(name for name in outcome.missing_keys if ".lora_" in name)]
    if unread:
        raise CheckpointError(f"{folder}: {len(unread)} adapter weights do not fit their base, first {unread[0]}")
    return tuner


def merge_adapters(model: PreTrainedModel, folders: Iterable[Path]) -> PreTrainedModel:
    """Merge saved adapters into a model, one folder after the other: ``W + alpha / rank * B A``.

    Raises CheckpointError if they do not fit.
    """
    for folder in folders:
        model = attach_adapter(model, folder).merge_and_unload()
        model.requires_grad_(True)
    return model


def _fitted(model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Tensors of an adapter file by their names in ``model``, in which the trunk may be one level higher or lower."""
    trunk = f"{model.base_model_prefix}."
    names = {name: _plain_name(name) for name in tensors if ".original_module." not in name}
    if model.base_model is model and any(name.startswith(trunk) for name in names.values()):
        names = {name: plain for name, plain in names.items() if plain.startswith(trunk)}
    there = {name for name, _ in model.named_modules()} | {name for name, _ in _parameters(model)}
    fitted = {}
    for name, plain in names.items():
        for candidate in (plain, plain.removeprefix(trunk), trunk + plain):
            if candidate.partition(".lora_")[0].replace(".base_layer", "") in there:
                fitted[candidate] = tensors[name]
                break
        else:
            raise CheckpointError(
                f"{folder}: the adapters hold weights for {plain.partition('.lora_')[0]}, which {type(model).__name__} does "
                "not have; they belong to another kind of model"
            )
    return fitted


def _plain_name(name: str) -> str:
    """A tensor's name without the parts that PEFT's wrappers add.

    Adapters of two parameters of one module differ only in them, so theirs stay.
    """
    if ".lora_" in name:
        return name.removeprefix(PREFIX)
    return name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")


def _experts(model: PreTrainedModel, names: Iterable[str]) -> list[str] | None:
    """Parameters of experts by their names in ``model``, as in `_fitted`; a name may also be the end of several."""
    trunk, there = f"{model.base_model_prefix}.", [name for name, _ in _parameters(model)]
    found = [
        full for name in names for full in there
        if full in {name, name.removeprefix(trunk), trunk + name} or full.endswith(f".{name}")
    ]  # fmt: skip
    return found or None


def _replace_whole(model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copy weights that were trained in full.

    The embeddings grow first if the adapters have more rows of them.
    """
    embeddings = model.get_input_embeddings().weight
    rows = [len(tensor) for name, tensor in tensors.items() if model.get_parameter(name) is embeddings]
    if rows and rows[0] > len(embeddings):
        model.resize_token_embeddings(rows[0], mean_resizing=False)
    parameters = dict(_parameters(model))
    for name, tensor in tensors.items():
        if parameters[name].shape != tensor.shape:
            shapes = f"{list(tensor.shape)}, the model {list(parameters[name].shape)}"
            raise CheckpointError(f"{folder}: {name} has the shape {shapes}; the adapters belong to another model")
        with torch.no_grad():
            parameters[name].copy_(tensor)
    for name, tensor in tensors.items():
        if not torch.equal(parameters[name], tensor.to(parameters[name].dtype)):
            raise CheckpointError(
                f"{folder}: {name} differs from the weights that the model ties it to; load and merge these adapters with "
                "PEFT, and use the result"
            )


def _parameters(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under every name they have: a tied output head appears as well as the embeddings."""
    return model.named_parameters(remove_duplicate=False)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model carries adapters, so that saving it means saving them."""
    return bool(getattr(model, "peft_config", None))


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model in Hugging Face format; of a model with adapters, write only the adapters, in PEFT's format.

    Whatever else was trained, such as a reward model's head, is stored in full with the adapters, where PEFT looks for
    it.
    """
    if not has_adapters(model):
        model.save_pretrained(folder)
        return
    tensors = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors |= {name: p for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        folder / ADAPTER_WEIGHTS,
        metadata={"format": "pt"},
    )
    config = copy.copy(model.peft_config[ADAPTER])
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules or ()) or None  # the order of a set differs from run to run
    config.save_pretrained(folder)
