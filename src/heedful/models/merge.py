"""Merge adapters into their base model, for tools that do not support adapters."""

from pathlib import Path

import torch

from heedful.configs.tools import MergeConfig
from heedful.errors import CheckpointError, ConfigError
from heedful.files import check_output_folder, complete_or_absent, model_names
from heedful.models.adapters import read_adapter_config, whole_weights
from heedful.models.load import load_causal_lm, load_reward_model, load_value_model
from heedful.models.origins import openrlhf_kind, save_origin_head
from heedful.models.reward_model import HEADS
from heedful.models.save import (
    VALUE_HEAD,
    check_saving,
    half_dtype_of,
    load_tensors,
    round_saved,
    save_reward_model,
    save_tensors,
    save_value_model,
)
from heedful.models.source import Source, resolve
from heedful.models.tokenizer import load_tokenizer

CPU = torch.device("cpu")


def merge_model(config: MergeConfig) -> None:
    """Write the merged model of an adapter folder, with its tokenizer: ``W + alpha / rank * B A`` in every layer.

    A policy keeps its value head, also one of another library, and its generation config; a reward model keeps its head and
    offset. Weights are computed in float32, and by default rounded to the dtype of the base.

    Raises ConfigError and CheckpointError before anything is written.
    """
    source = resolve(config.adapter, config)
    if not source.adapters:
        raise CheckpointError(f"{config.adapter} has no adapters (adapter_config.json), so there is nothing to merge")
    _check_output(config, source)
    tokenizer, folder = load_tokenizer(source), Path(source.folder)
    with complete_or_absent(config.output) as partial:
        match _kind(source):
            case "SEQ_CLS":
                model = load_reward_model(source, tokenizer, device=CPU, compute_dtype=torch.float32, merged=True)
                check_saving([model.classifier], tokenizer)
                save_reward_model(model, tokenizer, partial)
            case "FEATURE_EXTRACTION":
                critic = load_value_model(source, device=CPU, compute_dtype=torch.float32)
                check_saving([critic.trunk], tokenizer)
                save_value_model(critic, tokenizer, partial)
            case _:
                lm = load_causal_lm(source)
                check_saving([lm], tokenizer)
                lm.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                if (folder / VALUE_HEAD).is_file():
                    save_tensors(load_tensors(folder / VALUE_HEAD), partial / VALUE_HEAD)
                else:
                    save_origin_head(source, partial)
        dtype = half_dtype_of(source) if config.save_dtype == "base" else None
        if dtype is not None:
            round_saved(partial, dtype)


def _kind(source: Source) -> str:
    """PEFT's task type of the adapters. Not every tool saves it; then it is inferred from a head."""
    folder = Path(source.folder)
    task = read_adapter_config(folder).get("task_type")
    if task is None:
        kind = openrlhf_kind(source)
        if kind is not None:
            return "FEATURE_EXTRACTION" if kind == "CriticModel" else "SEQ_CLS"
        if any(name.split(".")[0] in HEADS for name in whole_weights([folder])):
            return "SEQ_CLS"
    return str(task or "CAUSAL_LM")


def _check_output(config: MergeConfig, source: Source) -> None:
    """Raises ConfigError for an output folder that has other content, or from which the model is read."""
    output = config.output
    for path in (Path(source.base), *source.adapters):
        if path.exists() and path.resolve().is_relative_to(output.resolve()):
            raise ConfigError(
                f"--output {output} contains {path}, from which the model is merged; choose another folder"
            )
    check_output_folder(output, "heedful merge", overwrite=config.overwrite, ours=lambda: model_names(output))
