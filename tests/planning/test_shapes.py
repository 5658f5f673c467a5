"""Shapes counted without weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from cases import often
from heedful import CheckpointError
from heedful.models import load_causal_lm
from heedful.models.shape import load_shape, shape_of
from heedful.planning.shapes import KNOWN

QWEN2 = {"vocab_size": 151_936, "num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN3 = {
    "vocab_size": 151_936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
CONFIGS = {
    "0.5B": Qwen2Config(**QWEN2, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, intermediate_size=4864),
    "1.5B": Qwen2Config(
        **QWEN2, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, intermediate_size=8960
    ),
    "4B": Qwen3Config(**QWEN3, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "8B": Qwen3Config(**QWEN3, hidden_size=4096, intermediate_size=12_288, tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", often(KNOWN, ("0.5B", "8B")))
def test_known_shapes_are_those_of_the_models_that_transformers_builds(name):
    with torch.device("meta"):
        assert shape_of(CONFIGS[name]) == KNOWN[name]
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    assert KNOWN[name].parameters == sum(p.numel() for p in model.parameters())


def test_known_sizes_are_what_they_are_called():
    """Parameters as the models' own pages give them, in billions."""
    sizes = {name: round(shape.parameters / 1e9, 2) for name, shape in KNOWN.items()}
    assert sizes == {"0.5B": 0.49, "1.5B": 1.54, "4B": 4.02, "8B": 8.19}


def test_every_parameter_of_a_folder_is_counted_once(decoder):
    shape = load_shape(decoder)
    assert shape.parameters == sum(p.numel() for p in load_causal_lm(decoder).parameters())
    assert shape.trunk.parameters == sum(p.numel() for p in load_causal_lm(decoder).base_model.parameters())


def test_a_folder_that_holds_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"without a config\.json"):
        load_shape(str(tmp_path))
