"""Models with random weights in the shapes of real ones, a tokenizer with their vocabulary, and prompts."""

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from heedful.data.loading import EncodedPrompt
from heedful.kernels.attention import use_attention
from heedful.models.load import learn_every_embedding
from heedful.types import Prompt

SPECIALS = ("<|pad|>", "<|endoftext|>", "<|unknown|>")


def shapes(*, smoke: bool) -> dict[str, PreTrainedConfig]:
    """The models by name."""
    special: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if smoke:
        small = special | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
        gated = {**small, "intermediate_size": 64, "num_key_value_heads": 2}
        found: dict[str, PreTrainedConfig] = {
            "toy GPT-2": GPT2Config(**special, **no_dropout, vocab_size=300, n_embd=32, n_layer=2, n_head=4),
            "toy Qwen2": Qwen2Config(**gated, tie_word_embeddings=True),
            "toy Llama": LlamaConfig(**gated, tie_word_embeddings=True),
        }
    else:
        found = {
            "GPT-2 124M": GPT2Config(**special, **no_dropout),
            "Qwen2.5 0.5B": Qwen2Config(
                **special,
                hidden_size=896,
                intermediate_size=4864,
                num_hidden_layers=24,
                num_attention_heads=14,
                num_key_value_heads=2,
                vocab_size=151_936,
                tie_word_embeddings=True,
            ),
            "Llama-3.2 1.2B": LlamaConfig(
                **special,
                hidden_size=2048,
                intermediate_size=8192,
                num_hidden_layers=16,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=128_256,
                tie_word_embeddings=True,
            ),
        }
    return found


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A word for every id, so that any response is text and its text the same ids again."""
    words = [*SPECIALS, *(f"w{i}" for i in range(len(SPECIALS), vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIALS[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIALS[0], eos_token=SPECIALS[1])


def make_prompts(number: int, length: int, vocab_size: int) -> list[EncodedPrompt]:
    """Different prompts of one length."""
    rows = torch.randint(len(SPECIALS), vocab_size, (number, length), generator=torch.Generator().manual_seed(1))
    return [EncodedPrompt(Prompt(" ".join(f"w{i}" for i in row), source="random"), row) for row in rows.tolist()]


def make_model(
    from_config: Callable[[PreTrainedConfig], PreTrainedModel], config: PreTrainedConfig, device: torch.device
) -> PreTrainedModel:
    """A model with random weights, otherwise as the library loads one.

    They are drawn where they belong: a billion of them take a CPU long.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = from_config(config)
    return use_attention(learn_every_embedding(model.eval()))
