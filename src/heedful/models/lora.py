"""LoRA (Hu et al. 2021): a frozen model with low-rank adapters on its linear layers.

    y = W x + alpha / rank * B A x        A [rank, in] random, B [out, rank] zero at the start

B is zero, so fresh adapters change nothing. They are added in place: the model keeps its class, and everything that
uses it (trunk, head, sampling, a value head) keeps working.

The experts of a mixture are often no linear layers, but all of them one parameter ``[experts, out, in]``. Each of its
matrices gets adapters of its own.
"""

import difflib
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from heedful.configs.options import LoRAOptions
from heedful.errors import ConfigError
from heedful.kernels.device import HALF
from heedful.models.adapters import ADAPTER


def add_adapters(model: PreTrainedModel, options: LoRAOptions, *, base: str, seed: int, dropout: float = 0.0) -> None:
    """Freeze a model and put fresh adapters on its linear layers and experts, in place. A classifier's head stays trainable.

    Args:
        model: the model to adapt.
        options: rank, alpha and target layers.
        base: where the model came from. It is saved with the adapters; a local folder as an absolute path.
        seed: of the random matrices A.
        dropout: of the adapters' inputs.

    Raises ConfigError if ``lora_targets`` matches no layer, or ``dropout`` would be in front of experts.
    """
    linear, experts = _linear_layers(model), expert_parameters(model)
    targets = _targets(options.lora_targets, [*linear, *experts])
    adapted = [name for name in targets if name in experts]
    if adapted and dropout:
        layers = ",".join(sorted({_last(name) for name in linear}))
        raise ConfigError(
            f"--lora-dropout {dropout:g} cannot be in front of a mixture's experts ({adapted[0]} and others): set "
            f"--lora-dropout 0, or name only linear layers: --lora-targets {layers}"
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
        warnings.simplefilter("ignore")  # PEFT warns of fan_in_fan_out if a model has both kinds of layer
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    for parameter in model.parameters():  # PEFT makes adapters in the dtype of the matrices below them
        if parameter.requires_grad and parameter.dtype in HALF:
            parameter.data = parameter.data.float()
    heads = [name for name, _ in model.named_parameters() if _is_head(model, name) and _task(model) == "SEQ_CLS"]
    for name in heads:
        model.get_parameter(name).requires_grad_(True)
    config.modules_to_save = sorted({_head_module(name) for name in heads}) or None


def _task(model: PreTrainedModel) -> str:
    """PEFT's name for what a model does."""
    if model.base_model is model:
        return "FEATURE_EXTRACTION"
    return "SEQ_CLS" if model.get_output_embeddings() is None else "CAUSAL_LM"


def _is_head(model: PreTrainedModel, name: str) -> bool:
    """Whether a layer is above the trunk. A pooler is part of the head wherever it is."""
    in_trunk = model.base_model is model or name.startswith(f"{model.base_model_prefix}.")
    return not in_trunk or "pooler" in name.split(".")


def _head_module(name: str) -> str:
    """The module that PEFT should save in full: the pooler, or the outermost part of the head."""
    parts = name.split(".")
    return "pooler" if "pooler" in parts else parts[0]


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not _is_head(model, name)
    }


def expert_parameters(model: PreTrainedModel) -> list[str]:
    """Names of the parameters that hold the matrices of all experts of a mixture, ``[experts, out, in]``."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if not isinstance(module, nn.Conv1d)  # its weight has three dimensions too
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and min(parameter.shape) > 1 and not _is_head(model, path)
    ]


def experts_but(model: PreTrainedModel, kept: str) -> list[str]:
    """The `expert_parameters` of a model, without those that ``kept`` names in the way of ``--lora-targets``."""
    targets = [target.strip() for target in kept.split(",")]
    named = [] if kept == "all-linear" else expert_parameters(model)
    return [name for name in named if not any(_is_named(name, target) for target in targets)]


def _is_named(name: str, target: str) -> bool:
    """Whether a name, or its end, is what a user wrote."""
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
