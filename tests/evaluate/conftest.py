"""Tiny models whose scores and probabilities are known, and small data sets."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from heedful import make_tiny_model

CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """``tiny(architecture, seed=0)`` is the folder of a tiny model, made once."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(architecture="gpt2", *, max_length=128, seed=0):
        path = root / f"{architecture}-{max_length}-{seed}"
        if not path.is_dir():
            make_tiny_model(architecture, path, hidden_size=32, num_layers=2, max_length=max_length, seed=seed)
        return str(path)

    return folder


@pytest.fixture(scope="session")
def planted_model(tiny, tmp_path_factory):
    """A reward model whose order is known by hand: the more "!" and the fewer "?" a text has for its length, the higher.

    One attention layer with uniform attention averages, over the text, an embedding that is 1 at "!" and -1 at "?"; all
    other weights are 0. The score is that average, times a positive scale.
    """
    folder = tmp_path_factory.mktemp("rm") / "planted"
    source = tiny("llama")
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(source, num_labels=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        trunk = model.model
        trunk.norm.weight.fill_(1.0)
        layer = trunk.layers[0]
        layer.input_layernorm.weight.fill_(1.0)
        # Embeddings: a constant part that keeps the norm equal for every token, and one part that tells "!" and "?".
        trunk.embed_tokens.weight[:, 0] = 1.0
        for text, value in (("!", 1.0), ("?", -1.0)):
            trunk.embed_tokens.weight[tokenizer(text).input_ids[0], 1] = value
        # Keys and queries are 0, so attention is uniform; values copy part 1, the output puts it into part 2.
        layer.self_attn.v_proj.weight[0, 1] = 1.0
        layer.self_attn.o_proj.weight[2, 0] = 1.0
        model.score.weight[0, 2] = 1.0
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def uniform_model(tiny, tmp_path_factory):
    """A language model that finds every token equally likely: its (tied) output weights are 0."""
    folder = tmp_path_factory.mktemp("lm") / "uniform"
    model = AutoModelForCausalLM.from_pretrained(tiny("gpt2"))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny("gpt2")).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def written(tmp_path):
    """``written(records)`` is the path of a JSONL file."""

    def write(records, name="数据.jsonl"):
        path: Path = tmp_path / name
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def prompts(written):
    """Twelve raw-text prompts."""
    return written([{"prompt": f"第{i}个问题", "难度": i} for i in range(12)])


@pytest.fixture
def cpu():
    """Float32 on the CPU, whatever the machine is fast at."""
    return dict(CPU)
