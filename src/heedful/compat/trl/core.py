"""The names of ``trl.core`` that scripts import."""

import random

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TopKLogitsWarper, TopPLogitsWarper

__all__ = ["LengthSampler", "respond_to_batch", "set_seed"]


class LengthSampler:
    """A random length per call, at least ``min_value`` and below ``max_value``, drawn by numpy's global generator."""

    def __init__(self, min_value: int, max_value: int) -> None:
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        return int(np.random.choice(self.values))


def set_seed(seed: int) -> None:
    """Set the seeds of Python's, numpy's and torch's global generators, those of all devices included."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@torch.no_grad()
def respond_to_batch(
    model: nn.Module, queries: Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Sample ``txt_len`` tokens after each query, at temperature 1.

    Args:
        model: one whose first output is logits, such as `AutoModelForCausalLMWithValueHead`.
        queries: token ids [B, T] without padding.
        txt_len: number of tokens.
        top_k: sample only from the k most probable tokens; 0 from all.
        top_p: sample only from the most probable tokens that have this probability together.

    Returns the sampled token ids [B, txt_len].
    """
    ids = queries
    for _ in range(txt_len):
        logits = model(ids)[0][:, -1]
        if top_k > 0:
            logits = TopKLogitsWarper(top_k)(ids, logits)
        if top_p < 1:
            logits = TopPLogitsWarper(top_p)(ids, logits)
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return ids[:, queries.shape[1] :]
