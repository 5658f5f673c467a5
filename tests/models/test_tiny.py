"""Tiny models: real folders that plain transformers reads, and a tokenizer that loses nothing."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from architectures import DECODERS
from heedful import make_tiny_model
from heedful.models import byte_tokenizer

ARCHITECTURES = (*DECODERS, "deberta-v2")
FEW = ["gpt2", "qwen3", "deberta-v2"]
EXACT = ["gpt2", "deberta-v2"]
"""A qwen2 folder reloads as transformers' own tokenizer, which normalises to NFC; all others keep every byte."""
TEXT = "你好，世界！\n\n  两个空格\t🙂👩‍👩‍👧 \x00\x07\x1b ｆｕｌｌ <|endoftext|> <|end|><|pad|> ok\r\n"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_transformers_loads_every_weight(checkpoints, architecture):
    kind = AutoModelForCausalLM if architecture in DECODERS else AutoModelForSequenceClassification
    model, info = kind.from_pretrained(checkpoints[architecture], output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    config, tokenizer = model.config, AutoTokenizer.from_pretrained(checkpoints[architecture])
    assert (config.model_type, config.hidden_size) == (architecture, 32)
    assert max(tokenizer.get_vocab().values()) < model.get_input_embeddings().weight.shape[0]
    assert tokenizer.eos_token_id == config.eos_token_id
    assert tokenizer.pad_token_id == config.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize("architecture", FEW)
def test_one_token_a_byte_and_back(checkpoints, architecture):
    """Special texts too where they are asked to be read literally, whatever the reloaded class is."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[architecture])
    ids = tokenizer(TEXT, add_special_tokens=False, split_special_tokens=True).input_ids
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == TEXT


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2"])
def test_special_texts_of_the_template_become_single_ids(checkpoints, architecture):
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[architecture])
    names = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
    for name in names:
        assert tokenizer(name, add_special_tokens=False).input_ids == [tokenizer.convert_tokens_to_ids(name)]
    generation = AutoModelForCausalLM.from_pretrained(checkpoints[architecture]).generation_config
    assert sorted(generation.eos_token_id) == sorted(
        tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|end|>")
    )


LEARNED = ["What colour is snow?", "Of course! It is white.", "雪是什么颜色？", "当然，是白色。"]


@pytest.mark.parametrize("architecture", EXACT)
def test_tokens_learned_from_texts(tmp_path, architecture):
    """Whole words and Chinese characters, never two of them; a reload splits and joins as before, any text."""
    size = {"hidden_size": 16, "num_layers": 1}
    make_tiny_model(architecture, tmp_path, **size, texts=LEARNED, vocab_size=400)
    model, tokenizer = AutoModel.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    own = byte_tokenizer(encoder=architecture not in DECODERS, texts=LEARNED, vocab_size=400)
    assert own.get_vocab() == tokenizer.get_vocab()
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) <= 400
    for text, parts in {
        LEARNED[1]: ["Of", " course", "!", " It", " is", " white", "."],
        LEARNED[3]: [*LEARNED[3]],
    }.items():
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert [tokenizer.decode(one) for one in ids] == parts
    for text in (TEXT, *LEARNED):
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_fewer_tokens_than_asked_for_if_the_texts_have_no_more():
    assert len(byte_tokenizer(texts=["雪"], vocab_size=400)) == len(byte_tokenizer()) + 2


def test_an_encoder_reads_pairs(checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["deberta-v2"])
    a, b = (tokenizer(text, add_special_tokens=False).input_ids for text in ("问？", "答。"))
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    assert tokenizer("问？", "答。").input_ids == [cls, *a, sep, *b, sep]
    assert tokenizer("问？").input_ids == [cls, *a, sep]


@pytest.mark.parametrize("architecture", ["qwen3", "deberta-v2"])
def test_a_seed_makes_the_weights_and_leaves_the_callers_random_state(tmp_path, architecture):
    state = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(architecture, tmp_path / name, hidden_size=16, num_layers=1, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert any(not torch.equal(a[key], c[key]) for key in a)


@pytest.mark.parametrize("architecture", FEW)
def test_weights_are_drawn_as_wide_as_asked_for(tmp_path, architecture):
    """The padding token's too: a random model samples it as often as any other, and the gradient into a row of zeros would
    be far too large."""
    make_tiny_model(architecture, tmp_path, hidden_size=256, num_layers=1, initializer_range=0.125)
    model = AutoModel.from_pretrained(tmp_path)
    weight = model.get_input_embeddings().weight
    assert weight.std().item() == pytest.approx(0.125, rel=0.02)
    assert weight[model.config.pad_token_id].std().item() == pytest.approx(0.125, rel=0.15)  # three standard errors


@pytest.mark.exhaustive
def test_the_first_call_of_a_program_prints_nothing(tmp_path):
    """In a process of its own: whatever loads a model switches bars off for all that follows."""
    program = "import heedful, sys; heedful.make_tiny_model('qwen3', sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "模型")], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
