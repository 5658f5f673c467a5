"""Hidden tests of lesson 4, log-probs and KL."""

import math
from collections.abc import Callable
from typing import Any

import torch

from heedful import core
from heedful.apps.course.checks import first, normal, same


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def check_1(answer: Callable[..., Any]) -> None:
    """The KL between two temperatures."""
    for seed, tau, shape in ((0, 0.5, (2, 3, 7)), (1, 1.0, (2, 3, 7)), (2, 2.0, (4, 5))):
        logits = normal(seed, *shape)
        log_p, log_q = (logits / tau).log_softmax(-1), logits.log_softmax(-1)
        came_out = answer(logits, tau)
        if tau != 1.0 and isinstance(came_out, torch.Tensor) and came_out.shape == log_p.shape[:-1]:
            assert not torch.allclose(came_out.float(), _kl(log_q, log_p), atol=1e-6), (
                "this is the KL of temperature 1 to temperature tau; the expectation is over tokens sampled at tau"
            )
        same(came_out, _kl(log_p, log_q), f"the KL of temperature {tau:g} to temperature 1, logits {[*shape]}")


def check_2(answer: Callable[..., Any]) -> None:
    """The bias of k2."""
    for seed, shape in ((1, (2, 3, 7)), (5, (4, 6))):
        logits, ref_logits = normal(seed, *shape), normal(seed + 1, *shape)
        log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        mean = (log_p.exp() * 0.5 * (log_p - log_q).square()).sum(-1)
        came_out = answer(logits, ref_logits)
        if isinstance(came_out, torch.Tensor) and came_out.shape == mean.shape:
            assert not torch.allclose(came_out.float(), mean, atol=1e-6), (
                "this is the mean of k2; the bias is this mean minus the KL"
            )
        same(came_out, mean - _kl(log_p, log_q), f"the bias of k2, logits {[*shape]}")


def check_3(answer: Callable[..., Any]) -> None:
    """k3, summed over the tokens of a response."""
    for seed, lengths in ((0, [2, 3]), (3, [1, 4, 2])):
        mask = first(lengths, max(lengths))
        logprobs, ref_logprobs = -normal(seed, *mask.shape).exp(), -normal(seed + 1, *mask.shape).exp()
        logprobs[0, lengths[0] :] = math.inf
        right = core.response_kl(logprobs, ref_logprobs, mask, kind="k3")
        told = " and ".join(map(str, lengths))
        same(answer(logprobs, ref_logprobs, mask), right, f"k3 of responses of {told} tokens, with padding")
