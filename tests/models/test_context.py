"""How many tokens a model reads, from its configuration."""

import pytest
from transformers import AutoConfig, PreTrainedConfig

from heedful.checkpoints.tiny import tiny_config
from heedful.models.context import context_length


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2", "qwen3", "llama", "deberta-v2"])
def test_context_length(architecture):
    config = tiny_config(architecture, vocab_size=9, hidden_size=16, num_layers=1, max_length=99)
    assert context_length(config) == 99


def test_no_limit_of_context():
    assert context_length(PreTrainedConfig()) == 2**31


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "gemma4", "mistral3", "qwen3_vl"])
def test_a_model_of_pictures_and_text_has_the_limit_of_its_text(kind):
    config = AutoConfig.for_model(kind, text_config={"max_position_embeddings": 77})
    assert context_length(config) == 77
