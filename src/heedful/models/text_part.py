"""Read weights; of a checkpoint that also reads images or sound, those of its text model."""

import warnings
from typing import Any, Literal

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel

from heedful.errors import CheckpointError
from heedful.models.model_code import leave_code
from heedful.models.source import Source, load_config

NAMES = {r"^(model\.)?language_model\.lm_head\.": "lm_head.", r"^(model\.)?language_model\.(model\.)?": "model."}
"""Parameter names within such a checkpoint, and within its text model."""
Kind = Literal["causal language model", "sequence classifier"]
LOADS = {
    "causal language model": MODEL_FOR_CAUSAL_LM_MAPPING,
    "sequence classifier": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}


def read_weights(
    auto: Any, source: Source, kind: Kind = "causal language model", **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model in float32 without its adapters, and transformers' report of missing weights.

    Args:
        auto: the class whose ``from_pretrained`` is called.
        source: the checkpoint.
        kind: what the run needs. transformers knows some models with images as such, and loads their text model or the
            whole of them, which also trains and samples. Of others only the text model is read.
        options: further arguments.

    A text model is saved as what it is, which a warning says. Raises CheckpointError if transformers has no class for it.
    """
    options |= {"dtype": torch.float32, "output_loading_info": True, "trust_remote_code": source.runs_code}
    config = load_config(source)
    if not source.runs_code:
        leave_code(config, source.folder)
    text = getattr(config, "text_config", None)
    if text is None or type(config) in LOADS[kind]:
        return auto.from_pretrained(source.base, **options)
    if type(text) not in LOADS[kind]:
        raise CheckpointError(
            f"{source.folder} is a {config.model_type} model, which reads more than text, and transformers has no {kind} for "
            f"its text part ({text.model_type}); heedful trains text models: give one of those in docs/architectures.md"
        )
    warnings.warn(
        f"{source.folder}: only the text part ({text.model_type}) of this {config.model_type} model is loaded, and saved "
        "after training",
        stacklevel=3,
    )
    text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    text.num_labels = options.pop("num_labels", text.num_labels)
    model, report = auto.from_pretrained(source.base, config=text, key_mapping=NAMES, **options)
    model._weight_conversions = None  # else the names would be changed back when it is saved
    return model, report
