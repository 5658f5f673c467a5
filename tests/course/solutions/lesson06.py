"""Answers to the exercises of lesson 6, right and typically wrong."""

import torch


def answer_1(logprobs, old_logprobs, advantages, mask, clip_eps):
    ratio, advantages = (logprobs - old_logprobs)[mask].exp(), advantages[mask]
    return torch.min(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages).mean()


def wrong_1(logprobs, old_logprobs, advantages, mask, clip_eps):
    """Without the minimum."""
    ratio = (logprobs - old_logprobs)[mask].exp()
    return (ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages[mask]).mean()


def answer_2(ratio, advantages, clip_eps):
    return ((advantages > 0) & (ratio > 1 + clip_eps)) | ((advantages < 0) & (ratio < 1 - clip_eps))


def wrong_2(ratio, advantages, clip_eps):
    """As the retold notebook counts."""
    return (ratio - 1).abs() > clip_eps


def answer_3(values, values_old, returns, value_clip_eps):
    clipped = values_old + (values - values_old).clamp(-value_clip_eps, value_clip_eps)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()


def wrong_3(values, values_old, returns, value_clip_eps):
    """Only the clipped square."""
    clipped = values_old + (values - values_old).clamp(-value_clip_eps, value_clip_eps)
    return 0.5 * ((clipped - returns) ** 2).mean()
