"""Answers to the exercises of lesson 4, right and typically wrong."""

import torch


def answer_1(logits, tau):
    log_p, log_q = (logits / tau).log_softmax(dim=-1), logits.log_softmax(dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def wrong_1(logits, tau):
    """torch's kl_div(input, target) is the KL of the target to the input."""
    log_p, log_q = (logits / tau).log_softmax(dim=-1), logits.log_softmax(dim=-1)
    return torch.nn.functional.kl_div(log_p, log_q, log_target=True, reduction="none").sum(dim=-1)


def answer_2(logits, ref_logits):
    log_pi, log_ref = logits.log_softmax(dim=-1), ref_logits.log_softmax(dim=-1)
    d = log_pi - log_ref
    return (log_pi.exp() * (0.5 * d**2 - d)).sum(dim=-1)


def wrong_2(logits, ref_logits):
    """The mean over the vocabulary is weighted by the reference."""
    log_pi, log_ref = logits.log_softmax(dim=-1), ref_logits.log_softmax(dim=-1)
    d = log_pi - log_ref
    return (log_ref.exp() * (0.5 * d**2 - d)).sum(dim=-1)


def answer_3(logprobs, ref_logprobs, mask):
    d = torch.where(mask, logprobs - ref_logprobs, 0.0)
    return (torch.exp(-d) - 1 + d).sum(dim=1)


def wrong_3(logprobs, ref_logprobs, mask):
    """Has the sign of d the wrong way round."""
    d = torch.where(mask, logprobs - ref_logprobs, 0.0)
    return (torch.exp(d) - 1 - d).sum(dim=1)
