"""Tiny models with random weights and a byte-level tokenizer: real architectures, created without a download.

The tokenizer has one token per UTF-8 byte, and further ones for frequent sequences of bytes if it learns from texts, so it
encodes any text in any language losslessly. (A ``qwen2`` folder reloads as transformers' own Qwen2 tokenizer, which
normalises text to NFC first and splits it by rules of its own, so a tokenizer that learned would encode differently.)
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DebertaV2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from heedful.files import complete_or_absent
from heedful.types import LEARNED

transformers.utils.logging.disable_progress_bar()

Architecture = Literal["gpt2", "qwen2", "qwen3", "llama", "deberta-v2"]
PAD, END_OF_TEXT, TURN_END, CLS, SEP = "<|pad|>", "<|endoftext|>", "<|end|>", "<|cls|>", "<|sep|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIALS = [PAD, END_OF_TEXT, TURN_END, CLS, SEP, *ROLES]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A turn starts and ends with a single token each. In bytes, role names would be a third of a short conversation."""


def byte_tokenizer(*, encoder: bool = False, texts: Iterable[str] = (), vocab_size: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer over bytes (BPE over the byte-level alphabet), special tokens first: one token per byte, unless it learns.

    Args:
        encoder: add the special tokens around an encoder's text; otherwise set a chat template.
        texts: what it learns from: the most frequent pair of tokens becomes a token of its own, again and again (Sennrich
            et al. 2016). Tokens never reach beyond a word or a Chinese character.
        vocab_size: number of tokens at which it stops learning; 0 learns nothing.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIALS, *alphabet])}, merges=[]))
    words = [pre_tokenizers.Split(Regex(r"\p{Han}"), "isolated")] if vocab_size else []
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=vocab_size > 0)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes]) if words else to_bytes
    tokenizer.decoder = decoders.ByteLevel()
    if vocab_size:
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    vocabulary = tokenizer.get_vocab()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    names = {"pad_token": PAD, "eos_token": END_OF_TEXT}
    if encoder:
        ids = [(token, vocabulary[token]) for token in (CLS, SEP)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ids
        )
        names |= {"cls_token": CLS, "sep_token": SEP}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=[TURN_END, *ROLES], **names)
    if not encoder:
        fast.chat_template = CHAT_TEMPLATE
    fast.init_kwargs[LEARNED] = []
    return fast


def tiny_config(
    architecture: Architecture,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    max_length: int,
    initializer_range: float = 0.02,
) -> PreTrainedConfig:
    """A small configuration of a real architecture. ``max_length`` is the context length in tokens."""
    common: dict[str, Any] = {"vocab_size": vocab_size, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    common["initializer_range"] = initializer_range
    shape = {"hidden_size": hidden_size, "num_hidden_layers": num_layers, "num_attention_heads": 4}
    rest = {"intermediate_size": 2 * hidden_size, "max_position_embeddings": max_length}
    if architecture == "gpt2":
        return GPT2Config(**common, n_embd=hidden_size, n_layer=num_layers, n_head=4, n_positions=max_length)
    if architecture == "deberta-v2":
        relative: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32}
        relative |= {"norm_rel_ebd": "layer_norm", "type_vocab_size": 0, "share_att_key": True}
        return DebertaV2Config(**common, **shape, **rest, **relative)
    decoders = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
    extra = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    if architecture == "qwen3":
        extra["head_dim"] = hidden_size // 4
    return decoders[architecture](**common, **shape, **rest, **extra)


def make_tiny_model(
    architecture: Architecture,
    folder: str | Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    max_length: int = 512,
    initializer_range: float = 0.02,
    seed: int = 0,
    texts: Iterable[str] = (),
    vocab_size: int = 0,
) -> None:
    """Write a random checkpoint with its tokenizer: a causal language model, or for ``deberta-v2`` a classifier.

    ``max_length`` is the context length in tokens, ``initializer_range`` the standard deviation of the weights. The tokenizer
    learns ``vocab_size`` tokens from ``texts`` as in `byte_tokenizer`; with 0 it has one per byte.
    """
    tokenizer = byte_tokenizer(encoder=architecture == "deberta-v2", texts=texts, vocab_size=vocab_size)
    config = tiny_config(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_length=max_length,
        initializer_range=initializer_range,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if architecture == "deberta-v2":
            config.num_labels = 1
            model = AutoModelForSequenceClassification.from_config(config)
        else:
            model = AutoModelForCausalLM.from_config(config)
            model.generation_config.eos_token_id = [1, SPECIALS.index(TURN_END)]
        embedding = model.get_input_embeddings()
        if embedding.padding_idx is not None:  # its row is zero, but a random model samples it as often as other tokens
            torch.nn.init.normal_(embedding.weight.data[embedding.padding_idx], std=initializer_range)
    with complete_or_absent(Path(folder)) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
