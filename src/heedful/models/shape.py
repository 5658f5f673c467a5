"""A model's shape (from a copy built without memory), context length, and embedding rows."""

import functools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from heedful.errors import CheckpointError, DataError
from heedful.models.adapters import expert_parameters, read_adapter_config, trained_rows
from heedful.models.source import Source, explained, load_config, resolve
from heedful.planning.shapes import ATTENTION, Shape


def load_shape(model: str | Source) -> Shape:
    """The shape of a model, only from its configuration, without weights. Raises CheckpointError."""
    source = resolve(model)
    config = load_config(source)
    with explained(source.folder, "model's shape"), torch.device("meta"):
        shape = shape_of(config, runs_code=source.runs_code)
        return replace(shape, head=shape.output) if _are_untied(source, config) else shape


def _are_untied(source: Source, config: Any) -> bool:
    """Whether adapters untie the head from the embeddings of their base.

    They do if one of both was trained without PEFT's ``ensure_weight_tying``, or if rows of the head were trained that
    differ from those of the embeddings.
    """
    if not source.adapters or not config.get_text_config().tie_word_embeddings:
        return False
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=source.runs_code)
    layers = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    embeddings, head = layers[model.get_input_embeddings()], layers[model.get_output_embeddings()]
    for folder in source.adapters:
        settings = read_adapter_config(folder)
        lists = [settings.get(key) for key in ("modules_to_save", "target_modules")]
        trained = {str(name).rpartition(".")[2] for some in lists if isinstance(some, list) for name in some}
        if trained & {embeddings, head} and not settings.get("ensure_weight_tying"):
            return True
        rows = trained_rows(folder)
        if head in rows and not (embeddings in rows and torch.equal(rows[head], rows[embeddings])):
            return True
    return False


def shape_of(config: Any, *, runs_code: bool = False) -> Shape:
    """The shape of a model with this configuration, including the output head of a decoder."""
    trunk = AutoModel.from_config(config, trust_remote_code=runs_code)
    text = config.get_text_config()
    embedding = trunk.get_input_embeddings().weight
    linear = {name: module.weight for name, module in trunk.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    names = expert_parameters(trunk)
    of_experts = [trunk.get_parameter(name) for name in names]
    counted = {id(parameter) for parameter in (embedding, *linear.values(), *of_experts)}
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
        linear=sum(p.numel() for p in linear.values()),
        attention=sum(p.numel() for name, p in linear.items() if {*name.split(".")} & {*ATTENTION}),
        edges=sum(sum(p.shape) for p in linear.values()),
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


def context_length(config: Any) -> int:
    """Context length of a model in tokens; a very large number if its configuration has no limit.

    A multimodal model has the limit in its text configuration. A LongRoPE model (Phi-3.5, Phi-4-mini) is limited to the
    length before its long factors, with a warning: beyond it they rotate all positions of a call, so keys in a cache
    would differ from those of the whole text, and a long row would change the shorter ones in its batch.
    """
    config = config.get_text_config(decoder=True)
    lengths = (getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    limit = int(next(filter(None, lengths), 2**31))
    first = min(_longrope_lengths(getattr(config, "rope_parameters", None) or {}), default=limit)
    if first < limit:
        _say_capped(config.model_type, first, limit)
    return min(first, limit)


def _longrope_lengths(rope: dict[str, Any]) -> list[int]:
    """The lengths beyond which LongRoPE uses its long factors; models with several layer types have one per type."""
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return [int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"]


@functools.cache
def _say_capped(model_type: str, first: int, limit: int) -> None:
    warnings.warn(
        f"this {model_type} model (LongRoPE) is limited to {first} tokens instead of {limit}: beyond them, other factors "
        "rotate all positions, also of earlier tokens, so sampled log-probs would differ from those of training",
        stacklevel=3,
    )


# Rows of embeddings -----------------------------------------------------------------------------------------------------
#
# A tokenizer may have more tokens than the model has rows: tokens were added without resizing the embeddings, or are
# never used (Gemma 3). So only the tokens in texts, and those that a run itself needs, are checked.


def rows_of(model: PreTrainedModel) -> int:
    """Number of a model's embedding rows."""
    return int(model.get_input_embeddings().weight.shape[0])


def rows_with_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of a model's embedding rows up to the last token of its tokenizer. Further ones are padding to a round number:
    their ids have no text, so they are not sampled. Their share of the softmax stays, in all log-probs alike.
    """
    return min(rows_of(model), max(tokenizer.get_vocab().values(), default=-1) + 1)


def check_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Iterable[tuple[str, Sequence[int]]]
) -> None:
    """Raises DataError for a text (``file:line`` and token ids) with a token without an embedding row."""
    rows = rows_of(model)
    for source, ids in texts:
        beyond = [i for i in ids if i >= rows] if len(ids) and max(ids) >= rows else []
        if beyond:
            raise DataError(f"{source}: {_said(tokenizer, beyond[0], rows)}; or take it out of the text")


def check_own_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Iterable[int], pad_id: int
) -> None:
    """Raises CheckpointError if a stop token or the padding token has no embedding row."""
    rows = rows_of(model)
    for name, i in [*(("a token that ends responses", i) for i in stop_ids), ("the padding token", pad_id)]:
        if not 0 <= i < rows:
            raise CheckpointError(f"{tokenizer.name_or_path}: {name}: {_said(tokenizer, i, rows)}; or choose another")


def _said(tokenizer: PreTrainedTokenizerBase, i: int, rows: int) -> str:
    return (
        f"the token {tokenizer.convert_ids_to_tokens(i)!r} has the id {i}, but the model has embedding rows only for "
        f"{rows} tokens (0 to {rows - 1}): it was added to the tokenizer in {tokenizer.name_or_path} without resizing the "
        f"embeddings. Load both with transformers, call model.resize_token_embeddings({len(tokenizer)}), and save the "
        "model"
    )
