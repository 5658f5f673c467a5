"""Hidden tests of lesson 4, log-probs and KL."""

import math
from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same


def _logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_1(answer: Callable[..., Any]) -> None:
    """Log-probs of the last T tokens."""
    logits, ids = _logits(0, 2, 6, 5), torch.tensor([[0, 1, 2, 3, 4, 0], [4, 3, 2, 1, 0, 4]])
    came_out = answer(logits, ids, 3)
    right = core.token_logprobs(logits[:, 2:5], ids[:, 3:])
    if isinstance(came_out, torch.Tensor) and came_out.shape == right.shape:
        unshifted = core.token_logprobs(logits[:, 3:], ids[:, 3:])
        assert not torch.allclose(came_out, unshifted), (
            "the token at position i is predicted by the logits at i - 1, but yours are read at i"
        )
    same(came_out, right, "log-probs of the last 3 of 6 tokens, [2, 3]")


def check_2(answer: Callable[..., Any]) -> None:
    """The KL over the vocabulary."""
    logits, ref_logits = _logits(1, 2, 3, 7), _logits(2, 2, 3, 7)
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    came_out = answer(logits.clone(), ref_logits.clone())
    reverse = (log_q.exp() * (log_q - log_p)).sum(-1)
    if isinstance(came_out, torch.Tensor) and came_out.shape == reverse.shape:
        assert not torch.allclose(came_out, reverse), (
            "this is KL(reference || policy); the expectation is over the policy's tokens"
        )
    same(came_out, (log_p.exp() * (log_p - log_q)).sum(-1), "KL of logits [2, 3, 7]")


def check_3(answer: Callable[..., Any]) -> None:
    """k3, summed over the tokens of a response."""
    logprobs = torch.tensor([[-1.0, -2.0, math.inf], [-0.5, -3.0, -1.0]])
    ref_logprobs = torch.tensor([[-1.5, -1.0, 0.0], [-0.5, -1.0, -4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    right = core.response_kl(logprobs, ref_logprobs, mask, kind="k3")
    same(answer(logprobs, ref_logprobs, mask), right, "k3 of a response of 2 tokens (with padding) and one of 3")
