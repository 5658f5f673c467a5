"""Hidden tests of lesson 1, a language model as a policy."""

from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    """Log-probs of tokens at a temperature."""
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([0, 6, 3, 3, 1])
    for temperature in (1.0, 0.5, 2.0):
        expected = core.token_logprobs(logits, ids, temperature=temperature)
        same(answer(logits, ids, temperature), expected, f"log-probs of 5 tokens at temperature {temperature}")
    large = torch.tensor([[1000.0, 0.0], [1000.0, 0.0]])
    asked = "each of two tokens, with logits 1000 and 0 (use log_softmax, not log(softmax))"
    same(answer(large, torch.tensor([0, 1]), 1.0), [0.0, -1000.0], asked)


def check_2(answer: Callable[..., Any]) -> None:
    """The logits that predict the response."""
    logits = torch.arange(6.0).unsqueeze(1).expand(6, 3)  # each row holds its own position
    for prompt_length in (1, 2, 4):
        came_out = answer(logits, prompt_length)
        is_table = isinstance(came_out, torch.Tensor) and came_out.ndim == 2 and came_out.shape[1] == 3
        assert is_table, "return a tensor [T, V], rows of the logits"
        expected = list(range(prompt_length - 1, 5))
        asked = f"positions read for a prompt of {prompt_length} tokens and {6 - prompt_length} more"
        same(came_out[:, 0], expected, asked)


def check_3(answer: Callable[..., Any]) -> None:
    """Sum over the response, independent of the padding."""
    logprobs = torch.tensor([[-0.5, -1.0, -0.25], [-2.0, 7.0, float("nan")]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    same(answer(logprobs[:1], mask[:1]), [-1.75], "three tokens without padding")
    same(answer(logprobs, mask), [-1.75, -2.0], "a second response of one token, -2, with 7 and NaN in its padding")
