"""Hidden tests of lesson 4, log-probs and KL."""

import math
from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.course.checks import same


def _logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def check_1(answer: Callable[..., Any]) -> None:
    """The KL between two temperatures."""
    logits = _logits(0, 2, 3, 7)
    log_q = logits.log_softmax(-1)
    for tau in (0.5, 1.0, 2.0):
        log_p = (logits / tau).log_softmax(-1)
        came_out = answer(logits.clone(), tau)
        if tau != 1.0 and isinstance(came_out, torch.Tensor) and came_out.shape == log_p.shape[:-1]:
            assert not torch.allclose(came_out, _kl(log_q, log_p), atol=1e-6), (
                "this is the KL of temperature 1 to temperature tau; the expectation is over tokens sampled at tau"
            )
        same(came_out, _kl(log_p, log_q), f"the KL of temperature {tau:g} to temperature 1, logits [2, 3, 7]")


def check_2(answer: Callable[..., Any]) -> None:
    """The bias of k2."""
    logits, ref_logits = _logits(1, 2, 3, 7), _logits(2, 2, 3, 7)
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    mean = (log_p.exp() * 0.5 * (log_p - log_q).square()).sum(-1)
    came_out = answer(logits.clone(), ref_logits.clone())
    if isinstance(came_out, torch.Tensor) and came_out.shape == mean.shape:
        assert not torch.allclose(came_out, mean, atol=1e-6), (
            "this is the mean of k2; the bias is this mean minus the KL"
        )
    same(came_out, mean - _kl(log_p, log_q), "the bias of k2, logits [2, 3, 7]")


def check_3(answer: Callable[..., Any]) -> None:
    """k3, summed over the tokens of a response."""
    logprobs = torch.tensor([[-1.0, -2.0, math.inf], [-0.5, -3.0, -1.0]])
    ref_logprobs = torch.tensor([[-1.5, -1.0, 0.0], [-0.5, -1.0, -4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    right = core.response_kl(logprobs, ref_logprobs, mask, kind="k3")
    same(answer(logprobs, ref_logprobs, mask), right, "k3 of a response of 2 tokens (with padding) and one of 3")
