"""LoRA (Hu et al. 2021): a frozen model with low-rank adapters on its linear layers.

    y = W x + alpha / rank * B A x        A [rank, in] random, B [out, rank] zero at the start

B is zero, so fresh adapters have no effect. They are added in place: the model keeps its class, and trunk, head,
sampling and value head work as before.

The experts of a mixture are often a single parameter ``[experts, out, in]`` instead of linear layers. Each of its
matrices gets its own adapters.

PEFT is imported where adapters are made or read: with bitsandbytes beside it, it takes seconds.
"""

import copy
import difflib
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from heedful.configs.options import LoRAOptions
from heedful.display import counted
from heedful.errors import CheckpointError, ConfigError
from heedful.files import read_object
from heedful.hub import local_model
from heedful.kernels.cpu.products import is_plain_linear
from heedful.kernels.device import HALF
from heedful.kernels.weights import same_weights

if TYPE_CHECKING:
    from peft import LoraConfig, LoraModel


def add_adapters(model: PreTrainedModel, options: LoRAOptions, *, base: str, seed: int, dropout: float = 0.0) -> None:
    """Freeze a model and put fresh adapters on its linear layers and experts, in place. A classifier's head stays trainable.

    Args:
        model: the model to adapt.
        options: rank, alpha and target layers.
        base: the model's source, saved with the adapters; a local folder as an absolute path.
        seed: seed of the random matrices A.
        dropout: dropout of the adapters' inputs.

    Raises ConfigError if ``lora_targets`` matches no layer, or for ``dropout`` with adapters on experts.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear, experts = _linear_layers(model), expert_parameters(model)
    targets = _targets(options.lora_targets, [*linear, *experts])
    adapted = [name for name in targets if name in experts]
    if adapted and dropout:
        layers = ",".join(sorted({_last(name) for name in linear}))
        raise ConfigError(
            f"--lora-dropout {dropout:g} is not supported for a mixture's experts ({adapted[0]} and others): set "
            f"--lora-dropout 0, or target only linear layers: --lora-targets {layers}"
        )
    config = LoraConfig(
        task_type=_task(model),
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).exists() else base,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha or 2 * options.lora_rank,
        lora_dropout=dropout,
        target_modules=[name for name in targets if name in linear] or None,
        target_parameters=adapted or None,
        fan_in_fan_out=all(isinstance(module, Conv1D) for module in linear.values()),
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about fan_in_fan_out if a model has both kinds of layer
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    for parameter in model.parameters():  # PEFT makes adapters in the dtype of their base matrices
        if parameter.requires_grad and parameter.dtype in HALF:
            parameter.data = parameter.data.float()
    heads = [name for name, _ in model.named_parameters() if _is_head(model, name) and _task(model) == "SEQ_CLS"]
    for name in heads:
        model.get_parameter(name).requires_grad_(True)
    config.modules_to_save = sorted({_head_module(name) for name in heads}) or None


def can_merge(model: PreTrainedModel) -> bool:
    """Whether a model has adapters, all of them on plain linear layers: not on experts, and not on quantised matrices."""
    if not has_adapters(model):
        return False
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return bool(layers) and all(
        type(layer) is lora.Linear
        and not layer.lora_variant
        and (is_plain_linear(layer.base_layer) or isinstance(layer.base_layer, Conv1D))
        for layer in layers
    )


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each adapted layer, and its matrix with the adapters added, in float32."""
    from peft.tuners import lora

    for name, layer in model.named_modules():
        if isinstance(layer, lora.Linear):
            with torch.no_grad():
                weight = layer.base_layer.weight.float()
                yield name, sum((layer.get_delta_weight(active).float() for active in layer.active_adapters), weight)


def merged(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A second model without adapters, whose adapted layers have merged matrices of this dtype; it shares all others."""
    plain = same_weights(model)
    plain.__dict__.pop("peft_config", None)
    for name, weight in merged_weights(model):
        layer = plain.get_submodule(name).base_layer
        layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        plain.set_submodule(name, layer)
    return plain


def _task(model: PreTrainedModel) -> str:
    """PEFT's task type of a model."""
    if model.base_model is model:
        return "FEATURE_EXTRACTION"
    return "SEQ_CLS" if model.get_output_embeddings() is None else "CAUSAL_LM"


def _is_head(model: PreTrainedModel, name: str) -> bool:
    """Whether a layer is above the trunk. A pooler always belongs to the head."""
    in_trunk = model.base_model is model or name.startswith(f"{model.base_model_prefix}.")
    return not in_trunk or "pooler" in name.split(".")


def _head_module(name: str) -> str:
    """The module that PEFT saves in full: the pooler, or the outermost module of the head."""
    parts = name.split(".")
    return "pooler" if "pooler" in parts else parts[0]


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not _is_head(model, name)
    }


def expert_parameters(model: PreTrainedModel) -> list[str]:
    """Names of parameters with the matrices of all experts of a layer, ``[experts, out, in]``."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if not isinstance(module, nn.Conv1d)  # its weight has three dimensions too
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and min(parameter.shape) > 1 and not _is_head(model, path)
    ]


def experts_but(model: PreTrainedModel, kept: str) -> list[str]:
    """The `expert_parameters` of a model without those in ``kept``, which has the form of ``--lora-targets``."""
    targets = [target.strip() for target in kept.split(",")]
    named = [] if kept == "all-linear" else expert_parameters(model)
    return [name for name in named if not any(_is_named(name, target) for target in targets)]


def _is_named(name: str, target: str) -> bool:
    """Whether a name equals or ends with the user's target."""
    return name == target or name.endswith(f".{target}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _targets(wanted: str, names: list[str]) -> list[str]:
    """The layers that ``--lora-targets`` selects."""
    if wanted == "all-linear":
        return names
    chosen: set[str] = set()
    for target in (part.strip() for part in wanted.split(",")):
        matched = [name for name in names if _is_named(name, target)]
        if not matched:
            ends = sorted({_last(name) for name in names})
            near = difflib.get_close_matches(_last(target), ends, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(
                f"--lora-targets: no linear layer of the model is named {target!r}{hint}; its layers are {', '.join(ends)}"
            )
        chosen |= set(matched)
    return [name for name in names if name in chosen]


# Adapters on disk ------------------------------------------------------------------------------------------------------


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
OLD_WEIGHTS = "adapter_model.bin"
"""The same in torch's format: what PEFT wrote before 0.6, and writes without ``safe_serialization``."""
OTHER_HEADS = ("value_head",)
"""Modules saved in full with adapters that no model of transformers has; `heedful.models.origins` reads them."""
ADAPTER = "default"
"""PEFT's name of a model's only set of adapters."""
PREFIX = "base_model.model."
"""PEFT's prefix of parameter names."""
ROWS = ".token_adapter.trainable_tokens_delta"
"""Suffix of the name of trained embedding rows that replace the base's."""


def is_adapter(name: str | Path) -> bool:
    """Whether ``name`` is a folder of adapters."""
    return (Path(name) / ADAPTER_CONFIG).is_file()


def adapter_chain(name: str) -> tuple[str, list[Path]]:
    """The plain base model of ``name``, and the adapter folders to merge into it, in the order of merging.

    Args:
        name: a folder, or a name on the Hub. For a plain model the list is empty. A base on ModelScope is downloaded if
            needed, and its local folder returned.

    Raises CheckpointError for adapters that are not LoRA, are incomplete, or have themselves as base.
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
    """Name of the adapters' base model. Raises CheckpointError."""
    settings = read_adapter_config(folder)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{folder} has adapters of type {kind}; heedful supports only LORA, which can be merged into the "
            "model (prompt tuning, prefix tuning and p-tuning cannot)"
        )
    if not any((folder / file).is_file() for file in (ADAPTER_WEIGHTS, OLD_WEIGHTS)):
        raise CheckpointError(f"{folder} has an {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}; download the adapters again")
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is {base!r}; it must be the adapters' base model"
        )
    return base


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The settings of an adapter folder. Raises CheckpointError if they cannot be read."""
    return read_object(folder / ADAPTER_CONFIG, "bring it back, or download the adapters again", needs=["peft_type"])


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter folder by their names there. Raises CheckpointError if they cannot be read."""
    try:
        if (folder / ADAPTER_WEIGHTS).is_file():
            return load_file(folder / ADAPTER_WEIGHTS)
        return torch.load(folder / OLD_WEIGHTS, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{folder}: the adapters cannot be read: {error}") from error


def whole_weights(folders: Iterable[Path]) -> dict[str, Tensor]:
    """Parameters that adapter folders store in full, such as a reward model's head, by name."""
    return {
        _plain_name(name): tensor
        for folder in folders
        for name, tensor in adapter_tensors(folder).items()
        if ".lora_" not in name
    }


def adapted_layers(folders: Iterable[Path]) -> set[str]:
    """Names of the layers to which adapter folders have adapters."""
    return {_bare(_plain_name(name)) for folder in folders for name in adapter_tensors(folder) if ".lora_" in name}


def trained_rows(folder: Path) -> dict[str, Tensor]:
    """Embedding rows in an adapter folder that replace the base's, by the last part of their layer's name."""
    return {
        name.removesuffix(ROWS).rpartition(".")[2]: tensor
        for name, tensor in adapter_tensors(folder).items()
        if name.endswith(ROWS)
    }


def attach_adapter(model: PreTrainedModel, folder: Path) -> "LoraModel":
    """Add saved adapters to a model, in place, and replace the weights that were saved in full.

    Args:
        model: a model of the adapters' architecture. Adapters of a language model also fit its trunk, and a classifier
            on the same trunk; a bare trunk skips those of heads.
        folder: the adapter folder.

    Returns PEFT's wrapper, whose ``merge_and_unload`` merges the adapters. Raises CheckpointError if they do not fit.
    """
    from peft import LoraConfig, LoraModel, set_peft_model_state_dict

    tensors = adapter_tensors(folder)
    try:
        config = LoraConfig.from_pretrained(folder)
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: the adapters cannot be read: {error}") from error
    config.ensure_weight_tying = config.ensure_weight_tying and _keeps_tied(model, tensors)
    names = _fitted(model, tensors, config, folder)
    _replace_weights(model, tensors, names, config, folder)
    adapters = {own: tensors[name] for name, own in names.items() if ".lora_" in name}
    adapted = {name.partition(".lora_")[0] for name in adapters}
    config.target_parameters = _experts(model, config.target_parameters or ())
    of_experts = {name.rpartition(".")[0] for name in config.target_parameters or ()}
    config.target_modules = {name for name in adapted if name.partition(".base_layer")[0] not in of_experts} or None
    config.modules_to_save = config.trainable_token_indices = None  # already in the weights
    config.ensure_weight_tying = False  # tied weights are one matrix, which has the adapters
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # PEFT warns about settings that it wrote itself
        try:
            tuner = LoraModel(model, config, ADAPTER)
            outcome = set_peft_model_state_dict(model, adapters, ADAPTER)
        except (RuntimeError, ValueError, KeyError) as error:
            first_line = str(error).strip().splitlines()[-1].strip()
            raise CheckpointError(f"{folder}: the adapters do not fit their base: {first_line}") from error
    unread = [*outcome.unexpected_keys, *(name for name in outcome.missing_keys if ".lora_" in name)]
    if unread:
        raise CheckpointError(
            f"{folder}: the base has no place for {counted(len(unread), 'adapter weight')}, first {unread[0]}"
        )
    return tuner


def merge_adapters(model: PreTrainedModel, folders: Iterable[Path]) -> PreTrainedModel:
    """Merge saved adapters into a model, one folder after the other: ``W + alpha / rank * B A``. Raises
    CheckpointError."""
    for folder in folders:
        model = attach_adapter(model, folder).merge_and_unload()
        model.requires_grad_(True)
    return model


def _fitted(model: PreTrainedModel, tensors: Iterable[str], config: "LoraConfig", folder: Path) -> dict[str, str]:
    """Map names in an adapter file to names in ``model``, whose trunk may be one level higher or lower.

    Weights of a language model's output head are left out for a model without one. So are duplicates in the file for a
    head that PEFT keeps tied to the embeddings (``ensure_weight_tying``), and heads of other libraries.
    """
    trunk = f"{model.base_model_prefix}."
    names = {name: _plain_name(name) for name in tensors}
    names = {name: plain for name, plain in names.items() if plain.partition(".")[0] not in OTHER_HEADS}
    of_another_head = config.task_type == "CAUSAL_LM" and model.get_output_embeddings() is None
    if (model.base_model is model or of_another_head) and any(plain.startswith(trunk) for plain in names.values()):
        names = {name: plain for name, plain in names.items() if plain.startswith(trunk)}
    there = {name for name, _ in model.named_modules()} | {name for name, _ in _parameters(model)}
    fitted = {}
    for name, plain in names.items():
        for candidate in (plain, plain.removeprefix(trunk), trunk + plain):
            if _bare(candidate) in there:
                fitted[name] = candidate
                break
        else:
            raise CheckpointError(
                f"{folder}: the adapters have weights for {_bare(plain)}, which {type(model).__name__} does not have; they "
                "belong to another kind of model"
            )
    if config.ensure_weight_tying and _is_tied(model):
        head = _ends(model)[1]
        fitted = {name: own for name, own in fitted.items() if _layer(own) != head or name.endswith(ROWS)}
    return fitted


def _keeps_tied(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an adapter file has equal adapters for embeddings and output head.

    Under names unknown to PEFT (``wte``), it trains only one of them, regardless of ``ensure_weight_tying``.
    """
    if not _is_tied(model):
        return False
    embeddings, head = _ends(model)
    trained = {_plain_name(name): tensor for name, tensor in tensors.items() if not _is_of_base(name)}
    if any(".lora_" in name and _layer(name) == head for name in trained):
        return True
    both = [trained.get(f"{end}.weight") for end in (embeddings, head)]
    return both[0] is not None and both[1] is not None and torch.equal(both[0], both[1])


def _plain_name(name: str) -> str:
    """A tensor's name without the parts added by PEFT's wrappers.

    They are kept for adapters of parameters, since two of one module differ only in them.
    """
    name = name.removeprefix(PREFIX)
    if ".lora_" not in name:
        name = name.removesuffix(ROWS) + ".weight" * name.endswith(ROWS)
        for wrapper in (".token_adapter", ".base_layer", ".modules_to_save", ".original_module"):
            name = name.replace(f"{wrapper}.", ".")
    return name


def _bare(name: str) -> str:
    """The layer (for adapters) or parameter to which a tensor of an adapter file belongs."""
    return name.partition(".lora_")[0].replace(".base_layer", "")


def _layer(name: str) -> str:
    """The layer to which a tensor of an adapter file belongs."""
    return _bare(name) if ".lora_" in name else name.rpartition(".")[0]


def _experts(model: PreTrainedModel, names: Iterable[str]) -> list[str] | None:
    """Parameters of experts by their names in ``model``, as in `_fitted`; a name may also be the end of several."""
    trunk, there = f"{model.base_model_prefix}.", [name for name, _ in _parameters(model)]
    found = [
        full for name in names for full in there
        if full in {name, name.removeprefix(trunk), trunk + name} or full.endswith(f".{name}")
    ]  # fmt: skip
    return found or None


def _replace_weights(
    model: PreTrainedModel, tensors: dict[str, Tensor], names: dict[str, str], config: "LoraConfig", folder: Path
) -> None:
    """Load full weights and embedding rows of an adapter file, with PEFT's semantics.

    An untrained full weight replaces the base's, and so also all weights tied to it. So do embedding rows, unless the
    file has others for the output head. Other trained weights replace only their layer's: if the base ties embeddings
    and head, they become two matrices.
    """
    ends = _ends(model)
    rows = {name for name in names if name.endswith(ROWS)}
    whole = {name for name in names if ".lora_" not in name} - rows
    shared = {name for name in whole if not _was_trained(name, config)}
    _fit_vocabulary(model, [(names[name], tensors[name], name in shared) for name in whole], config, folder)
    ids = {name: _token_ids(names[name], ends, config, model, folder) for name in rows}
    if any(_layer(names[name]) == ends[0] for name in rows) and _are_equal(
        [(ids[name], tensors[name]) for name in rows]
    ):
        shared |= rows
    parted = {_layer(own) for name, own in names.items() if name not in shared}

    def put(name: str) -> None:
        weight = model.get_parameter(names[name])
        index = ids.get(name, slice(None))
        shape, needed = list(tensors[name].shape), list(weight[index].shape)
        if shape != needed:
            raise CheckpointError(
                f"{folder}: {names[name]} has shape {shape}, but the model's is {needed}; "
                "the adapters belong to another model"
            )
        with torch.no_grad():
            weight[index] = tensors[name].to(weight.dtype)

    for name in [*(shared - rows), *(shared & rows)]:
        put(name)
    if ends[1:] and (ends[1] in parted or (ends[0] in parted and not config.ensure_weight_tying)):
        _untie(model)
    for name in [*(whole - shared), *(rows - shared)]:
        put(name)


def _are_equal(rows: list[tuple[list[int], Tensor]]) -> bool:
    """Whether all rows have the same tokens and numbers."""
    return all(ids == rows[0][0] and torch.equal(tensor, rows[0][1]) for ids, tensor in rows)


def _was_trained(name: str, config: "LoraConfig") -> bool:
    """Whether a full weight of an adapter file was trained, by its name there."""
    if _is_of_base(name):
        return False
    layer = _layer(_plain_name(name))
    return any(f".{layer}".endswith(f".{trained}") for trained in config.modules_to_save or ())


def _is_of_base(name: str) -> bool:
    """Whether a name in an adapter file is a base weight's under a PEFT wrapper."""
    return any(wrapper in name for wrapper in (".base_layer.", ".original_module."))


def _fit_vocabulary(
    model: PreTrainedModel, whole: list[tuple[str, Tensor, bool]], config: "LoraConfig", folder: Path
) -> None:
    """Resize a model's embeddings to the rows of an adapter file. Raises CheckpointError if the file lacks the new
    rows.

    ``whole`` has names in the model, weights of the file, and whether a weight also applies to weights tied to it.
    """
    ends = _ends(model)
    of_ends = {_layer(name): (len(tensor), is_shared) for name, tensor, is_shared in whole if _layer(name) in ends}
    rows, before = max((n for n, _ in of_ends.values()), default=0), len(model.get_input_embeddings().weight)
    if rows in (0, before):
        return
    is_one = _is_tied(model) and (config.ensure_weight_tying or any(shared for _, shared in of_ends.values()))
    covered = set(ends) if is_one else set(of_ends)
    missing = sorted(set(ends) - covered)
    if rows > before and missing:
        raise CheckpointError(
            f"{folder}: the adapters have {rows} tokens but their base has {before}, and the file lacks rows of "
            f"{missing[0]} for the new ones; save the resized base and use it as the base, or retrain with {missing[0]} "
            "in modules_to_save"
        )
    model.resize_token_embeddings(rows, mean_resizing=False)


def _token_ids(own: str, ends: list[str], config: "LoraConfig", model: PreTrainedModel, folder: Path) -> list[int]:
    """The tokens of a layer's rows in an adapter file (``trainable_token_indices``). Raises CheckpointError."""
    found, rows = config.trainable_token_indices, len(model.get_parameter(own))
    if isinstance(found, dict):
        layers = [_layer(own), *ends]  # a head tied to the embeddings has their tokens
        found = next((ids for layer in layers for name, ids in found.items() if f".{layer}".endswith(f".{name}")), None)
    if not isinstance(found, list) or not all(type(i) is int and 0 <= i < rows for i in found):
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: trainable_token_indices is {config.trainable_token_indices!r}; it must have the "
            f"tokens of {_layer(own)}, from 0 to {rows - 1}"
        )
    return found


def _ends(model: PreTrainedModel) -> list[str]:
    """Names of the embeddings and, if there is one, of the output head."""
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for end in both for name, module in model.named_modules() if module is end]


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether embeddings and output head are one matrix."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _untie(model: PreTrainedModel) -> None:
    """Untie the output head from the embeddings, with an equal matrix, if they are tied."""
    if not _is_tied(model):
        return
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys.pop(f"{_ends(model)[1]}.weight", None)


def _parameters(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under all of their names: a tied output head is listed besides the embeddings."""
    return model.named_parameters(remove_duplicate=False)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters, so that saving it saves only them."""
    return bool(getattr(model, "peft_config", None))


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model in Hugging Face format; with adapters, write only the adapters, in PEFT's format.

    Other trained weights, such as a reward model's head, are stored in full with the adapters, where PEFT expects them.
    """
    if not has_adapters(model):
        model.save_pretrained(folder)
        return
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors |= {name: p for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        folder / ADAPTER_WEIGHTS,
        metadata={"format": "pt"},
    )
    save_adapter_config(model, folder)


def save_adapter_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the settings of a model's adapters."""
    config = copy.copy(model.peft_config[ADAPTER])
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules or ()) or None  # the order of a set differs between runs
    config.save_pretrained(folder)
