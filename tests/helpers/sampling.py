"""Prompts of different lengths, and responses to them: heedful's, and those of transformers."""

import torch

from heedful.configs.options import SamplingOptions
from heedful.engines import generate
from heedful.models import byte_tokenizer
from heedful.types import MicroBatch

TOKENIZER = byte_tokenizer()
PROMPTS = [TOKENIZER(text).input_ids for text in ("你好", "今天天气怎么样？", "a", "Hi! ", "再见，")]
PAD = 0


def sharpened(lm):
    """Random weights are so small that predictions are nearly uniform and no mistake shows; these are made larger."""
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(5) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return lm.eval()


def roll(policy, prompts=PROMPTS, *, stop_ids=(), pad_id=PAD, seed=0, rows=64, tokens=None, **options):
    """Rollouts of prompts, in micro-batches of so many rows and tokens."""
    return generate.generate(
        policy,
        prompts,
        SamplingOptions(**options),
        stop_ids=stop_ids,
        pad_id=pad_id,
        generator=torch.Generator().manual_seed(seed),
        micro_batch=MicroBatch(rows, tokens),
    )


def greedy(lm, prompt, new_tokens, stop_ids=()):
    """The most likely response to one prompt, by transformers."""
    ids = torch.tensor([prompt])
    output = lm.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
        eos_token_id=list(stop_ids) or None, pad_token_id=PAD,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()
