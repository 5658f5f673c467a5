"""The workload of the side-by-side measurements: models with random weights, their tokenizer and prompts, as plain folders.

python benchmarks/workload.py --output runs/workload

Writes policy/, policy-natural/, value/ and reward/ (Qwen3 shape, 6.8 million parameters each by default), prompts.json (lists
of token ids, all of one length) and prompts.jsonl (the same prompts as text), and prints what they are.

- Every token but the bytes and the special ones is a word with a space before it, and words are never merged: whatever the
  policy samples, its text encodes back to exactly its ids, so that a reward model which reads text (heedful's) and one which
  reads ids (TRL's) have the same tokens to read. Bytes and special tokens are so unlikely that none is ever sampled.
- policy/ never samples EOS. policy-natural/ has the same weights, but its EOS has about the same probability at every step,
  such that responses of at most --response-length tokens have half of that as their mean. The lengths are geometric, cut at
  the maximum: a coefficient of variation of about 0.7. What was sampled is measured and printed.

How EOS gets its probability in a model that has no biases: the last coordinate of the residual stream is 1 at every token's
embedding and no layer writes to it, so the final hidden state holds a constant; the EOS row of the (tied) output matrix is
zero but for that coordinate.
"""

import argparse
import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from heedful.configs.options import SamplingOptions
from heedful.engines.generate import generate
from heedful.models.policy import Policy
from heedful.models.save import VALUE_HEAD, save_tensors

PAD, END = "<|pad|>", "<|endoftext|>"
FIRST_WORD = 2 + 256
"""Ids below are the two special tokens and the bytes."""
KINDS = ("policy", "policy-natural", "value", "reward")
UNLIKELY = -15.0
"""Logit of what shall never be sampled, the words' mean being 0."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of one model."""

    vocabulary: int = 8192
    layers: int = 6
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 768
    head_dim: int = 0
    """Size of a head; 0: the hidden size is divided among them."""
    context: int = 1024


def make_workload(
    folder: Path,
    shape: Shape,
    *,
    num_prompts: int = 1024,
    prompt_length: int = 32,
    response_length: int = 64,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Write these kinds of folders, and the files; returns what they are. ``response_length`` is the maximum of
    policy-natural's. Models are made on torch's default device and stored in ``dtype``.
    """
    tokenizer = make_tokenizer(shape.vocabulary)
    prompts = make_prompts(shape.vocabulary, num_prompts, prompt_length, seed)
    folder.mkdir(parents=True, exist_ok=True)
    policy = make_policy(shape, seed)
    _save(policy.to(dtype), tokenizer, folder / "policy")
    facts = {
        "shape": asdict(shape),
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "prompts": num_prompts,
        "prompt_tokens": prompt_length,
    }
    if "policy-natural" in kinds:
        p = end_probability(response_length)
        set_end_probability(policy, p, prompts[:64])
        _save(policy, tokenizer, folder / "policy-natural")
        lengths = sampled_lengths(policy, prompts[: min(256, num_prompts)], response_length)
        facts["natural"] = {
            "max": response_length,
            "mean": round(float(lengths.mean()), 2),
            "cv": round(float(lengths.std() / lengths.mean()), 3),
            "ended_frac": round(float((lengths < response_length).float().mean()), 3),
        }
    for offset, name in enumerate(("value", "reward"), start=1):
        if name not in kinds:
            continue
        classifier = make_classifier(shape, seed + offset).to(dtype)
        _save(classifier, tokenizer, folder / name)
        if name == "value":  # heedful's critic starts from a head of this form, and TRL's from the classifier's
            head = {"weight": classifier.score.weight.float(), "bias": torch.zeros(1)}
            save_tensors(head, folder / name / VALUE_HEAD)
    texts = [tokenizer.decode(ids) for ids in prompts]
    assert tokenizer(texts).input_ids == prompts, "the prompts' texts do not encode back to their ids"
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8"
    )
    (folder / "workload.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return facts


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Two special tokens, one token a byte, and words of four letters, each with a space before it."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["Ġ" + "".join(four) for four in itertools.product(letters, repeat=4)]
    random.Random(0).shuffle(words)
    tokens = [PAD, END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words][:vocabulary]
    if len(tokens) < vocabulary or vocabulary <= FIRST_WORD:
        raise SystemExit(
            f"--vocabulary must lie between {FIRST_WORD + 1} and {FIRST_WORD + len(words)}, got {vocabulary}"
        )
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, END)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def make_prompts(vocabulary: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Random words."""
    generator = random.Random(seed)
    return [[generator.randrange(FIRST_WORD, vocabulary) for _ in range(length)] for _ in range(count)]


def make_policy(shape: Shape, seed: int) -> Qwen3ForCausalLM:
    """A policy with a spread of logits of about 2 that never samples bytes or special tokens."""
    torch.manual_seed(seed)
    policy = Qwen3ForCausalLM(_config(shape))
    policy.generation_config.eos_token_id = 1
    policy.generation_config.pad_token_id = 0
    trunk = policy.model
    with torch.no_grad():
        embedding = trunk.embed_tokens.weight
        embedding.normal_(std=0.02)
        embedding[:, -1] = 1.0
        for layer in trunk.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight[-1] = 0.0
        trunk.norm.weight.fill_(2.0 / (0.02 * math.sqrt(shape.hidden)))
    _set_end_rows(policy, slice(0, FIRST_WORD), UNLIKELY)
    return policy.eval()


def make_classifier(shape: Shape, seed: int) -> Qwen3ForSequenceClassification:
    """A trunk of the same shape with one score."""
    torch.manual_seed(seed)
    classifier = Qwen3ForSequenceClassification(_config(shape, num_labels=1))
    with torch.no_grad():
        classifier.score.weight.normal_(std=1 / math.sqrt(shape.hidden + 1))
    return classifier.eval()


def end_probability(max_length: int) -> float:
    """The probability p of EOS at each step with which the mean of min(length, max) is max / 2: (1 - (1-p)^max) / p."""
    low, high = 1e-9, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        mean = (1 - (1 - middle) ** max_length) / middle
        low, high = (middle, high) if mean > max_length / 2 else (low, middle)
    return low


@torch.no_grad()
def set_end_probability(policy: Qwen3ForCausalLM, p: float, prompts: list[list[int]]) -> None:
    """Set the EOS row so that the mean probability of EOS over these contexts is p."""
    ids = torch.tensor(prompts)
    logits = policy(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, 4:].flatten(0, 1)
    others = torch.cat([logits[:, :1], logits[:, 2:]], dim=1).logsumexp(dim=1)
    per_unit = _constant(policy, ids)[:, 4:].flatten()
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = torch.sigmoid(middle * per_unit - others).mean()
        low, high = (middle, high) if mean < p else (low, middle)
    policy.model.embed_tokens.weight[1, -1] = low


def sampled_lengths(policy: Qwen3ForCausalLM, prompts: list[list[int]], max_length: int) -> Tensor:
    """Response lengths, EOS included, under sampling."""
    options = SamplingOptions(max_new_tokens=max_length)
    generator = torch.Generator().manual_seed(0)
    return generate(Policy(policy), prompts, options, stop_ids=[1], pad_id=0, generator=generator).lengths.float()


def _config(shape: Shape, **more: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        initializer_range=1 / math.sqrt(shape.hidden),
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **more,
    )


@torch.no_grad()
def _constant(policy: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    """The last coordinate of the final hidden state."""
    return policy.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[..., -1]


@torch.no_grad()
def _set_end_rows(policy: Qwen3ForCausalLM, rows: slice, logit: float) -> None:
    """Make these tokens' logits about ``logit``, apart from the constant that all words share."""
    embedding = policy.model.embed_tokens.weight
    per_unit = _constant(policy, torch.arange(FIRST_WORD, FIRST_WORD + 64).unsqueeze(0) % embedding.shape[0])
    embedding[rows] = 0.0
    embedding[rows, -1] = 1.0 + logit / float(per_unit.mean())


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    for name, default in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--response-length", type=int, default=64, help="maximum that policy-natural is made for")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    facts = make_workload(
        options.output,
        Shape(**{name: getattr(options, name) for name in asdict(Shape())}),
        num_prompts=options.prompts,
        prompt_length=options.prompt_length,
        response_length=options.response_length,
        seed=options.seed,
    )
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
