"""The shape of a model, counted on one that is built without memory."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.pytorch_utils import Conv1D

from heedful.models.lora import expert_parameters
from heedful.models.source import Source, explained, load_config, resolve
from heedful.planning.shapes import Shape


def load_shape(model: str | Source) -> Shape:
    """The shape of a model, from its configuration alone: no weights are read. Raises CheckpointError."""
    source = resolve(model)
    config = load_config(source)
    with explained(source.folder, "model's shape"), torch.device("meta"):
        return shape_of(config, runs_code=source.runs_code)


def shape_of(config: Any, *, runs_code: bool = False) -> Shape:
    """The shape of a model of this configuration, with its output head if it is a decoder."""
    trunk = AutoModel.from_config(config, trust_remote_code=runs_code)
    text = config.get_text_config()
    embedding = trunk.get_input_embeddings().weight
    linear = [module.weight for module in trunk.modules() if isinstance(module, nn.Linear | Conv1D)]
    names = expert_parameters(trunk)
    of_experts = [trunk.get_parameter(name) for name in names]
    counted = {id(parameter) for parameter in (embedding, *linear, *of_experts)}
    others = [p for p in trunk.parameters() if id(p) not in counted]
    hidden, heads = text.hidden_size, text.num_attention_heads
    size = getattr(text, "head_dim", None) or hidden // heads
    used = getattr(text, "num_experts_per_tok", None) or 1
    width = (getattr(text, "moe_intermediate_size", None) if used > 1 else None) or getattr(
        text, "intermediate_size", None
    )
    return Shape(
        embedding=embedding.numel(),
        head=0 if text.tie_word_embeddings else text.vocab_size * hidden,
        linear=sum(p.numel() for p in linear),
        edges=sum(sum(p.shape) for p in linear),
        vectors=sum(p.numel() for p in others),
        layers=text.num_hidden_layers,
        hidden=hidden,
        vocabulary=text.vocab_size,
        heads=heads,
        query=heads * size,
        key=(getattr(text, "num_key_value_heads", None) or heads) * size,
        intermediate=used * (width or getattr(text, "n_inner", None) or 4 * hidden),
        experts=sum(p.numel() for p in of_experts),
        expert_edges=sum(len(p) * sum(p.shape[1:]) for p in of_experts),
        expert_names=tuple(sorted({".".join(name.split(".")[-3:]) for name in names})),
        head_norms=any(name.endswith("q_norm.weight") for name, _ in trunk.named_parameters()),
    )
