"""Hidden tests of lesson 1, a language model as a policy."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import first, normal, same


def check_1(answer: Callable[..., Any]) -> None:
    """Log-probs of tokens at a temperature."""
    ids = torch.tensor([0, 6, 3, 3, 1])
    for seed, temperature in enumerate((1.0, 0.5, 2.0)):
        logits = normal(seed, 5, 7)
        expected = core.token_logprobs(logits, ids, temperature=temperature)
        same(answer(logits, ids, temperature), expected, f"log-probs of 5 tokens at temperature {temperature}")
    large = torch.tensor([[1000.0, 0.0], [1000.0, 0.0]])
    asked = "each of two tokens, with logits 1000 and 0 (use log_softmax, not log(softmax))"
    same(answer(large, torch.tensor([0, 1]), 1.0), [0.0, -1000.0], asked)


def check_2(answer: Callable[..., Any]) -> None:
    """The logits that predict the response."""
    for prompt_length, length in ((1, 5), (2, 4), (4, 2), (3, 1)):
        logits = torch.arange(float(prompt_length + length)).unsqueeze(1).expand(-1, 3)  # a row holds its position
        asked = f"logits whose rows hold their positions, for a prompt of {prompt_length} tokens and {length} more"
        same(answer(logits, prompt_length), logits[prompt_length - 1 : -1], asked)


def check_3(answer: Callable[..., Any]) -> None:
    """Sum over the response, independent of the padding."""
    logprobs = torch.tensor([[-0.5, -1.0, -0.25], [-2.0, 7.0, float("nan")]])
    mask = first([3, 1], 3)
    same(answer(logprobs[:1], mask[:1]), [-1.75], "three tokens without padding")
    same(answer(logprobs, mask), [-1.75, -2.0], "a second response of one token, -2, with 7 and NaN in its padding")
    logprobs, mask = -normal(1, 3, 5).abs(), first([5, 2, 4], 5)
    expected = torch.where(mask, logprobs, 0.0).sum(dim=1)
    same(answer(logprobs, mask), expected, "responses of 5, 2 and 4 tokens")
