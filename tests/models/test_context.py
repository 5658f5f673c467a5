"""How many tokens a model reads, from its configuration."""

import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config, PreTrainedConfig

from heedful import DataError, SFTConfig, train_sft
from heedful.models import byte_tokenizer, shape
from heedful.models.shape import context_length
from heedful.models.tiny import tiny_config


def test_context_length():
    for architecture in ("gpt2", "qwen2", "deberta-v2"):
        config = tiny_config(architecture, vocab_size=9, hidden_size=16, num_layers=1, max_length=99)
        assert context_length(config) == 99, architecture
    for kind in ("qwen3_5", "gemma3", "gemma4", "mistral3", "qwen3_vl", "llava"):
        assert context_length(AutoConfig.for_model(kind, text_config={"max_position_embeddings": 77})) == 77, kind
    assert context_length(PreTrainedConfig()) == 2**31


def test_longrope_ends_where_its_factors_change(tmp_path):
    """transformers chooses them by the longest row of a call: past that length a cache and a batch would change log-probs."""
    factors = [1.0 + i for i in range(4)]
    rope = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": [9.0 * f for f in factors],
        "rope_theta": 1e4,
    }
    config = Phi3Config(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, original_max_position_embeddings=8, pad_token_id=0,
        bos_token_id=None, eos_token_id=1, sliding_window=None, rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(20, 32)[None]
    with torch.no_grad():
        at_limit, beyond = (lm(input_ids=ids[:, :n], use_cache=False).logits[:, :8] for n in (8, 9))
    assert (at_limit - beyond).abs().max() > 1e-4, "one token more changes all before it"
    lm.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    shape._say_capped.cache_clear()
    with pytest.warns(UserWarning, match=r"phi3 model \(LongRoPE\) is limited to 8 tokens instead of 64"):
        assert context_length(AutoConfig.from_pretrained(tmp_path / "model")) == 8
    with warnings.catch_warnings(action="error"):
        assert context_length(config) == 8, "said once"
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "abc", "completion": "defghijk"}\n' * 4, encoding="utf-8")
    with pytest.raises(DataError, match="longer than 8 tokens"):
        train_sft(SFTConfig(model=str(tmp_path / "model"), data=str(data), output=tmp_path / "run", eval_fraction=0.0))
