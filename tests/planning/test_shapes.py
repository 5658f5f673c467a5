"""Shapes counted without weights."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from heedful import CheckpointError, make_tiny_model
from heedful.models import load_causal_lm
from heedful.models.shape import load_shape, shape_of
from heedful.planning.shapes import KNOWN

CONFIGS = {
    "0.5B": Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        tie_word_embeddings=True,
    ),
    "1.5B": Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        tie_word_embeddings=True,
    ),
    "4B": Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=9728,
        tie_word_embeddings=True,
    ),
    "8B": Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12_288,
        tie_word_embeddings=False,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_shapes_are_those_of_the_models_that_transformers_builds(name):
    with torch.device("meta"):
        assert shape_of(CONFIGS[name]) == KNOWN[name]
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    assert KNOWN[name].parameters == sum(p.numel() for p in model.parameters())


def test_known_sizes_are_what_they_are_called():
    """Parameters as the models' own pages give them, in billions."""
    assert {name: round(shape.parameters / 1e9, 2) for name, shape in KNOWN.items()} == {
        "0.5B": 0.49,
        "1.5B": 1.54,
        "4B": 4.02,
        "8B": 8.19,
    }


def test_every_parameter_of_a_folder_is_counted_once(decoder):
    shape = load_shape(decoder)
    assert shape.parameters == sum(p.numel() for p in load_causal_lm(decoder).parameters())
    assert shape.trunk.parameters == sum(p.numel() for p in load_causal_lm(decoder).base_model.parameters())


@pytest.mark.parametrize(
    ("trained", "untied"),
    [
        ({"modules_to_save": ["lm_head"]}, True),
        ({"target_modules": ["q_proj", "embed_tokens"]}, True),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_head_that_adapters_untie_is_counted(tmp_path, trained, untied):
    """The base has one matrix for embeddings and head; what trains one of them gives it a matrix of its own."""
    base, folder = tmp_path / "模型", tmp_path / "适配器"
    make_tiny_model("qwen3", base, hidden_size=32, num_layers=1)
    lm = AutoModelForCausalLM.from_pretrained(base)
    assert lm.config.tie_word_embeddings
    with warnings.catch_warnings(action="ignore"):
        get_peft_model(lm, LoraConfig(**{"target_modules": ["q_proj"], "r": 2} | trained)).save_pretrained(folder)
    shape = load_shape(str(folder))
    assert shape.parameters == sum(p.numel() for p in load_causal_lm(str(folder)).parameters())
    assert shape.parameters - load_shape(str(base)).parameters == (shape.output if untied else 0)


def test_a_folder_that_holds_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"without a config\.json"):
        load_shape(str(tmp_path))
